"""Kernels as the operators see them: `load` one by file, name and definitions, then `launch` it.

    kernel = load("scale.cu", "scale", {"X": "bf16"}, device=x.get_device())
    kernel.launch((blocks, 1, 1), (256, 1, 1), 0, kernel.pack(x.data_ptr(), out.data_ptr(), ...))

or, where the same call comes again and again, keep a plan and give it only the pointers:

    plan = kernel.plan((blocks, 1, 1), (256, 1, 1), 0, ...)  # what follows the pointers in the struct
    plan(x.data_ptr(), out.data_ptr())

`load` compiles (or reads the disk cache) and keeps the loaded kernel for the process; a second call costs a dictionary
lookup of a few microseconds, so families keep what it returns in a function decorated with `cached`. `launch` is the hot path.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from threading import get_ident
from typing import Any, NamedTuple, ParamSpec, TypeVar

from anymamba.backends.cuda.runtime import sources
from anymamba.backends.cuda.runtime.architectures import target_option, why_unsupported
from anymamba.backends.cuda.runtime.cache import DiskCache, default_directory, key_of
from anymamba.backends.cuda.runtime.driver import INVALID_CONTEXT, Arguments, CudaDriver, Resources
from anymamba.backends.cuda.runtime.nvrtc import Compiled, Nvrtc, find_nvrtc
from anymamba.errors import KernelLaunchError, MachineError

__all__ = ["Kernel", "Plan", "Runtime", "Variant", "cached", "load", "runtime", "use_runtime"]

OPTIONS = ("--std=c++17", "--device-as-default-execution-space")
"""Everything else is spelled out in the sources: fast exp2 and division are calls there, not a compiler switch."""

Arguments_ = ParamSpec("Arguments_")
Result = TypeVar("Result")


class Variant(NamedTuple):
    """One kernel with its compile-time definitions: what `load` takes, as a value."""

    file: str
    kernel: str
    defines: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, file: str, kernel: str, **defines: object) -> Variant:
        """Return the variant with these definitions, booleans as 0 and 1."""
        return cls(file, kernel, _normal(defines))


class Kernel:
    """A kernel loaded on one device.

    Attributes
    ----------
    pack : callable
        Takes the values of the parameter struct's fields in order (arrays flattened; pointers as integers, 0 for none) and
        returns the bytes for `launch`.
    fields : tuple of str
        The names of those fields.
    """

    __slots__ = ("_driver", "_function", "_launch", "_layout", "_shared", "_stream", "device", "name", "pack")

    def __init__(self, driver: Any, function: Any, name: str, layout: sources.Layout, device: int) -> None:
        self.name = name
        self.device = device  # PyTorch's index
        self.pack: Callable[..., bytes] = struct.Struct(layout.format).pack
        self._layout = layout
        self._driver = driver
        self._function = function
        self._launch = driver.launch
        self._stream = driver.current_stream
        self._shared = 48 * 1024

    @property
    def fields(self) -> tuple[str, ...]:
        return self._layout.fields

    def plan(self, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int, *values: float) -> Plan:
        """Return a launch with everything settled but the pointers that the parameter struct begins with."""
        if shared_bytes > self._shared:
            self._driver.allow_shared(self._function, shared_bytes, self.device)
            self._shared = shared_bytes
        return Plan(self, grid, block, shared_bytes, values)

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        parameters: bytes,
        stream: int | None = None,
    ) -> None:
        """Launch on `stream` (a raw handle), or on PyTorch's current stream of the kernel's device.

        Nothing is launched for an empty grid. Nothing is allocated, so the launch can be captured in a CUDA graph.

        Raises
        ------
        KernelLaunchError
            With the driver's words.
        """
        driver = self._driver
        if driver.current_device() != self.device:
            with driver.on_device(self.device):
                self.launch(grid, block, shared_bytes, parameters, stream)
            return
        if shared_bytes > self._shared:
            driver.allow_shared(self._function, shared_bytes, self.device)
            self._shared = shared_bytes
        # The array holds a reference to the bytes: the driver copies them before it returns.
        code = self._launch(
            self._function, *grid, *block, shared_bytes,
            self._stream(self.device) if stream is None else stream, Arguments(parameters), None,
        )  # fmt: skip
        if code:
            self._failed(code, grid, block, shared_bytes, parameters, stream)

    def _failed(
        self,
        code: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        parameters: bytes,
        stream: int | None,
    ) -> None:
        if 0 in grid:
            return
        if code == INVALID_CONTEXT:  # this thread has not used CUDA yet
            self._driver.make_current(self.device)
            stream = self._stream(self.device) if stream is None else stream
            code = self._launch(self._function, *grid, *block, shared_bytes, stream, Arguments(parameters), None)
            if not code:
                return
        raise KernelLaunchError(
            f"Kernel {self.name} could not be launched: {self._driver.error(code)}.",
            why=f"grid {grid}, block {block}, {shared_bytes} bytes of shared memory, device {self.device}; an error of an"
            " earlier kernel on this device shows up here too",
            next_step="CUDA_LAUNCH_BLOCKING=1 finds the kernel that failed first",
        )

    def occupancy(self, threads: int, shared_bytes: int = 0) -> int:
        """Return how many blocks of `threads` threads fit on one multiprocessor at a time."""
        if shared_bytes > self._shared:
            self._driver.allow_shared(self._function, shared_bytes, self.device)
            self._shared = shared_bytes
        return int(self._driver.occupancy(self._function, threads, shared_bytes, self.device))

    def resources(self) -> Resources:
        """Return what the compiler gave the kernel: registers and memory of a thread, shared memory of a block."""
        found: Resources = self._driver.resources(self._function, self.device)
        return found


class Plan:
    """A launch with everything settled but the pointers. Call it with those; it launches on PyTorch's current stream.

    All arguments of the driver's function are made beforehand, once a stream, but for the pointers, which are packed into a
    buffer of the calling thread: the driver copies it before it returns.
    """

    __slots__ = (
        "_current_device", "_device", "_launches", "_pack_into", "_parameters", "_slots", "_stream", "block", "grid",
        "kernel", "shared_bytes",
    )  # fmt: skip

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        values: tuple[float, ...],
    ) -> None:
        self.kernel = kernel
        self.grid, self.block, self.shared_bytes = grid, block, shared_bytes
        layout, driver = kernel._layout, kernel._driver
        self._pack_into = struct.Struct("@" + "P" * layout.pointers).pack_into
        self._parameters = kernel.pack(*[0] * layout.pointers, *values)
        self._slots: dict[int, tuple[Any, Any]] = {}
        self._device = kernel.device
        self._current_device, self._stream = driver.current_device, driver.current_stream
        self._launches: dict[int, Callable[[Any, None], int]] = {}

    def __call__(self, *pointers: int) -> None:
        """Launch. Fewer checks than `Kernel.launch`, the same errors."""
        slot = self._slots.get(get_ident()) or self._new_slot()
        self._pack_into(slot[0], 0, *pointers)
        device = self._device
        if self._current_device() == device:
            stream = self._stream(device)
            if not (self._launches.get(stream) or self._new_launch(stream))(slot[1], None):
                return
        # Another device is current, or an error: the careful way.
        self.kernel.launch(self.grid, self.block, self.shared_bytes, bytes(slot[0]))

    def _new_slot(self) -> tuple[Any, Any]:
        buffer = (ctypes.c_char * len(self._parameters)).from_buffer_copy(self._parameters)
        slot = (buffer, ctypes.byref((ctypes.c_void_p * 1)(ctypes.addressof(buffer))))
        if len(self._slots) > 64:  # threads come and go; what a running one holds stays alive through its own reference
            self._slots.clear()
        self._slots[get_ident()] = slot
        return slot

    def _new_launch(self, stream: int) -> Callable[[Any, None], int]:
        if len(self._launches) > 64:
            self._launches.clear()
        kernel = self.kernel
        launch: Callable[[Any, None], int] = kernel._driver.bound_launch(
            kernel._function, self.grid, self.block, self.shared_bytes, stream
        )
        self._launches[stream] = launch
        return launch


class Runtime:
    """A compiler, a driver and a cache, and the kernels loaded with them.

    Parameters
    ----------
    compiler : Nvrtc
    driver : CudaDriver
    cache : DiskCache
        Tests pass their own of each.
    """

    def __init__(self, compiler: Any, driver: Any, cache: DiskCache) -> None:
        self.compiler = compiler
        self.driver = driver
        self.cache = cache
        self._lock = threading.Lock()
        self._locks: dict[Hashable, threading.Lock] = {}
        self._images: dict[Hashable, bytes] = {}
        self._kernels: dict[Hashable, Kernel] = {}
        self._capabilities: dict[int, int] = {}

    def capability(self, device: int) -> int:
        """Return the device's compute capability, e.g. 86; asked once."""
        found = self._capabilities.get(device)
        if found is None:
            found = self._capabilities[device] = self.driver.capability(device)
        return found

    def load(self, variant: Variant, device: int) -> Kernel:
        """Return the kernel on `device`, compiling and loading it if this process has not yet."""
        key = (variant, device)
        kernel = self._kernels.get(key)
        if kernel is not None:
            return kernel
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:  # one thread compiles; others wanting the same kernel wait for it
            kernel = self._kernels.get(key)
            if kernel is None:
                module = self.driver.load(self.image(variant, self.capability(device)), device)
                function = self.driver.function(module, variant.kernel, device)
                layout = sources.layout(variant.file, variant.kernel)
                kernel = self._kernels[key] = Kernel(self.driver, function, variant.kernel, layout, device)
        return kernel

    def image(self, variant: Variant, capability: int) -> bytes:
        """Return the code for a card of this capability: from memory, from disk, or compiled now."""
        options = self.options(variant, capability)
        memory_key = (variant, options)
        image = self._images.get(memory_key)
        if image is None:
            source = sources.read(variant.file)
            version = ".".join(map(str, self.compiler.version))
            texts = [text for pair in sorted(source.headers.items()) for text in pair]
            key = key_of(["nvrtc", version, *options, source.text, *texts])
            image = self.cache.get(key)
            if image is None:
                image = self.compile(variant, capability).image
                self.cache.put(key, image)
            self._images[memory_key] = image
        return image

    def compile(self, variant: Variant, capability: int, *extra_options: str) -> Compiled:
        """Compile, whatever the caches hold, and return the image and the log."""
        source = sources.read(variant.file)
        options = (*self.options(variant, capability), *extra_options)
        compiled: Compiled = self.compiler.compile(source.text, variant.file, source.headers, options)
        return compiled

    def options(self, variant: Variant, capability: int) -> tuple[str, ...]:
        """Return the compiler's options."""
        return (
            target_option(capability, self.compiler.architectures),
            *OPTIONS,
            *(f"-D{name}={value}" for name, value in variant.defines),
        )

    def why_unsupported(self, device: int) -> str | None:
        """Return None if kernels can be compiled for this device, or why not."""
        return why_unsupported(self.capability(device), self.compiler.architectures)


_replacement: Runtime | None = None
_forget: list[Callable[[], None]] = []


def runtime() -> Runtime:
    """Return the process's runtime.

    Raises
    ------
    MachineError
        If the driver or NVRTC is missing or too old.
    """
    return _replacement if _replacement is not None else _default()


@functools.cache
def _default() -> Runtime:
    driver = CudaDriver()
    compiler: Nvrtc = find_nvrtc(driver.version[0])
    return Runtime(compiler, driver, DiskCache(default_directory()))


def why_no_runtime() -> str | None:
    """Return None if `runtime()` works, or why not."""
    try:
        runtime()
    except MachineError as error:
        return f"{error.what} {error.why}".strip()
    return None


def load(file: str, name: str, defines: Mapping[str, object] | None = None, device: int = 0) -> Kernel:
    """Return a kernel ready to launch.

    Parameters
    ----------
    file : str
        In `backends/cuda/kernels`.
    name : str
        The `extern "C" __global__` function, which takes one struct by value (see `sources`).
    defines : mapping, optional
        Macros for the compiler; booleans become 0 and 1.
    device : int
        PyTorch's index: ``x.get_device()``.

    Raises
    ------
    KernelCompileError, KernelLaunchError, MachineError
    """
    return runtime().load(Variant(file, name, _normal(defines or {})), device)


def cached(function: Callable[Arguments_, Result]) -> Callable[Arguments_, Result]:
    """Decorate a function of hashable arguments that returns kernels: remembers, until tests change the runtime."""
    remembering = functools.lru_cache(maxsize=4096)(function)
    _forget.append(remembering.cache_clear)
    return remembering  # type: ignore[return-value]  # lru_cache's own type forgets the parameters


@contextlib.contextmanager
def use_runtime(replacement: Runtime) -> Iterator[Runtime]:
    """Let `load` and `runtime` use another runtime (tests: an emulated driver; a compiler of another version)."""
    global _replacement  # noqa: PLW0603 - the one process-wide switch
    before = _replacement
    _replacement = replacement
    for forget in _forget:
        forget()
    try:
        yield replacement
    finally:
        _replacement = before
        for forget in _forget:
            forget()


def _normal(defines: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(int(value)) if isinstance(value, bool) else str(value)) for name, value in defines.items())
