"""The CUDA driver API, as much of it as loading and launching takes, through ctypes.

`Driver` is what the rest of the runtime sees; tests put another one in its place (tests/cuda_emulator.py runs the
kernels on the CPU). Devices are PyTorch's indices, streams its raw handles; modules live in PyTorch's own (primary) context.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from anymamba.backends.cuda.runtime.libraries import open_driver
from anymamba.errors import KernelLaunchError, MachineError

__all__ = ["CudaDriver", "Resources"]

INVALID_CONTEXT = 201
_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MULTIPROCESSORS, _SHARED_OPTIN = 75, 76, 16, 97
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_RESOURCES = (4, 3, 1)  # CU_FUNC_ATTRIBUTE_NUM_REGS, ..._LOCAL_SIZE_BYTES, ..._SHARED_SIZE_BYTES
_ERROR_LOG, _ERROR_LOG_SIZE = 5, 6  # CU_JIT_ERROR_LOG_BUFFER, ..._SIZE_BYTES
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
Arguments = ctypes.c_char_p * 1


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


class Resources(NamedTuple):
    """What the compiler gave a kernel: registers and local memory (spilled registers) of a thread, shared memory of a block."""

    registers: int
    local_bytes: int
    shared_bytes: int


class CudaDriver:
    """The driver of this machine.

    Raises
    ------
    MachineError
        If its library cannot be loaded or does not start.
    """

    device_type = "cuda"

    def __init__(self) -> None:
        try:
            self._library = library = open_driver()
        except OSError as error:
            raise MachineError("The NVIDIA driver's library cannot be loaded.", why=str(error)) from error
        pointer, integer, unsigned = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
        out, out_integer = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int)
        for name, arguments in {
            "cuInit": [unsigned],
            "cuDriverGetVersion": [out_integer],
            "cuDeviceGet": [out_integer, integer],
            "cuDeviceGetAttribute": [out_integer, integer, integer],
            "cuDevicePrimaryCtxRetain": [out, integer],
            "cuCtxGetCurrent": [out],
            "cuCtxSetCurrent": [pointer],
            "cuCtxPushCurrent_v2": [pointer],
            "cuCtxPopCurrent_v2": [out],
            "cuModuleLoadDataEx": [out, ctypes.c_char_p, unsigned, ctypes.POINTER(integer), out],
            "cuModuleGetFunction": [out, pointer, ctypes.c_char_p],
            "cuFuncSetAttribute": [pointer, integer, integer],
            "cuFuncGetAttribute": [out_integer, integer, pointer],
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": [out_integer, pointer, integer, ctypes.c_size_t],
            "cuThreadExchangeStreamCaptureMode": [out_integer],
            "cuGetErrorName": [integer, ctypes.POINTER(ctypes.c_char_p)],
            "cuGetErrorString": [integer, ctypes.POINTER(ctypes.c_char_p)],
            "cuLaunchKernel": [pointer, *[unsigned] * 7, pointer, pointer, pointer],
        }.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, integer
        self._call("cuInit", 0)
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        self.version = (version.value // 1000, version.value % 1000 // 10)
        self.launch: Callable[..., int] = library.cuLaunchKernel
        """cuLaunchKernel(function, grid x, y, z, block x, y, z, shared bytes, stream, arguments, None) -> error code."""
        # Function objects without argtypes: what is an argument of a C call already needs no conversion (3x faster). The
        # newer function (driver 520, CUDA 11.8) takes 4 arguments instead of 11, which halves what ctypes takes again.
        self._launch_bare: Callable[..., int] = library["cuLaunchKernel"]
        self._launch_extended: Callable[..., int] | None = None
        with contextlib.suppress(AttributeError):
            self._launch_extended = library["cuLaunchKernelEx"]
        self.current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self.current_device: Callable[[], int] = torch._C._cuda_getDevice
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def bound_launch(
        self, function: ctypes.c_void_p, grid: Sequence[int], block: Sequence[int], shared_bytes: int, stream: int
    ) -> Callable[[Any, None], int]:
        """Return a launch with everything settled but the arguments: call it with `ctypes.byref` of their array, and None.

        It returns the error code. What it holds lives as long as it does.
        """
        handle = ctypes.c_void_p.from_param(function.value)
        if self._launch_extended is None:
            numbers = [ctypes.c_uint.from_param(value) for value in (*grid, *block, shared_bytes)]
            return functools.partial(self._launch_bare, handle, *numbers, ctypes.c_void_p.from_param(stream or None))
        config = _LaunchConfig((*grid,), (*block,), shared_bytes, stream or None, None, 0)
        return functools.partial(self._launch_extended, ctypes.byref(config), handle)

    def capability(self, device: int) -> int:
        """Return the compute capability as one number, e.g. 86."""
        return 10 * self.attribute(device, _CAPABILITY_MAJOR) + self.attribute(device, _CAPABILITY_MINOR)

    def multiprocessors(self, device: int) -> int:
        """Return how many multiprocessors the card has."""
        return self.attribute(device, _MULTIPROCESSORS)

    def shared_limit(self, device: int) -> int:
        """Return the most dynamic shared memory, in bytes, that a block can be given."""
        return self.attribute(device, _SHARED_OPTIN)

    def attribute(self, device: int, attribute: int) -> int:
        """Return a device attribute by its number in the driver API."""
        handle, value = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
        return value.value

    def load(self, image: bytes, device: int) -> ctypes.c_void_p:
        """Load a cubin or PTX into the device's context; allowed while another stream, or this one, is being captured."""
        module = ctypes.c_void_p()
        log = ctypes.create_string_buffer(8192)
        keys = (ctypes.c_int * 2)(_ERROR_LOG, _ERROR_LOG_SIZE)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        with self._context(device), self._relaxed_capture():
            code = self._library.cuModuleLoadDataEx(ctypes.byref(module), image, 2, keys, values)
        if code:
            detail = log.value.decode(errors="replace").strip()
            raise KernelLaunchError(
                f"The driver refused a compiled kernel: {self.error(code)}.",
                why=detail,
                next_step="update the NVIDIA driver" if code == 222 else "",  # UNSUPPORTED_PTX_VERSION
            )
        return module

    def function(self, module: ctypes.c_void_p, name: str, device: int) -> ctypes.c_void_p:
        """Return a kernel of a loaded module."""
        function = ctypes.c_void_p()
        with self._context(device):
            self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def allow_shared(self, function: ctypes.c_void_p, shared_bytes: int, device: int) -> None:
        """Let the kernel be launched with this much dynamic shared memory (more than 48 KB must be asked for)."""
        with self._context(device):
            self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared_bytes)

    def occupancy(self, function: ctypes.c_void_p, threads: int, shared_bytes: int, device: int) -> int:
        """Return how many blocks of this kernel fit on one multiprocessor at a time."""
        blocks = ctypes.c_int()
        with self._context(device):
            self._call(
                "cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(blocks), function, threads, shared_bytes
            )
        return blocks.value

    def resources(self, function: ctypes.c_void_p, device: int) -> Resources:
        """Return what the compiler gave the kernel."""
        values = [ctypes.c_int() for _ in _RESOURCES]
        with self._context(device):
            for value, attribute in zip(values, _RESOURCES):
                self._call("cuFuncGetAttribute", ctypes.byref(value), attribute, function)
        return Resources(*(value.value for value in values))

    def make_current(self, device: int) -> None:
        """Make the device's context current in this thread for good, if none is (a thread that never used CUDA)."""
        current = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(current))
        if not current.value:
            self._call("cuCtxSetCurrent", self._primary_context(device))

    def on_device(self, device: int) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which `device` is PyTorch's current device."""
        return torch.cuda.device(device)

    def error(self, code: int) -> str:
        """Return the name and meaning of an error code."""
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(name))
        self._library.cuGetErrorString(code, ctypes.byref(text))
        return f"{(name.value or b'error').decode()} ({code}), {(text.value or b'').decode()}"

    def _primary_context(self, device: int) -> ctypes.c_void_p:
        context = self._contexts.get(device)
        if context is None:
            handle, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(handle), device)
            # Retained for the life of the process, as PyTorch's own runtime does.
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
            self._contexts[device] = context
        return context

    @contextlib.contextmanager
    def _context(self, device: int) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._primary_context(device))
        try:
            yield
        finally:
            popped = ctypes.c_void_p()
            self._call("cuCtxPopCurrent_v2", ctypes.byref(popped))

    @contextlib.contextmanager
    def _relaxed_capture(self) -> Iterator[None]:
        mode = ctypes.c_int(_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise _failed(f"{name} failed: {self.error(code)}.")


def _failed(what: str) -> KernelLaunchError:
    """Make the error, with the cause and the cure where the catalogue of faults knows them."""
    from anymamba.faults import brief  # only who fails pays for it

    known = brief(what + "\n")
    return (
        KernelLaunchError(what) if known is None else KernelLaunchError(what, why=known.why, next_step=known.next_step)
    )
