"""A runtime whose compiler is g++ and whose card is the CPU, so that kernels, their layouts and launches are tested anywhere.

`emulated()` makes backend "cuda" take CPU tensors: `anymamba.ops` calls go through the real runtime code (load, cache, pack,
launch) to the real `.cu` sources, compiled as C++ with `cuda_emulation.h`. PTX, speed and memory order are for the GPU tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from anymamba.backends.cuda.runtime.cache import DiskCache
from anymamba.backends.cuda.runtime.driver import Resources
from anymamba.backends.cuda.runtime.kernel import Runtime, use_runtime
from anymamba.backends.cuda.runtime.nvrtc import Compiled

HEADER = Path(__file__).parent / "cuda_emulation.h"
COMPILER = shutil.which("g++")
_KERNEL = re.compile(r"\b(\w+)\s*\(\s*(?:const\s+|__grid_constant__\s+)*(\w+)\s+\w+\s*\)\s*\{")

needs_emulator = pytest.mark.skipif(
    COMPILER is None or not sys.platform.startswith("linux"), reason="the emulator needs g++ and ucontext (Linux)"
)


class EmulatedCompiler:
    """Stands for NVRTC: g++ to a shared library, with a C entry `emulate_<kernel>` for every kernel."""

    def __init__(self) -> None:
        # The cache key has the compiler's version in it: the header and this file are part of ours.
        ours = HEADER.read_bytes() + Path(__file__).read_bytes()
        self.version = (0, int(hashlib.sha256(ours).hexdigest()[:8], 16))
        self.architectures = (90,)
        self.compiled: list[str] = []

    def compile(self, source: str, name: str, headers: Mapping[str, str], options: Sequence[str]) -> Compiled:
        assert COMPILER is not None
        self.compiled.append(name)
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder)
            for file, text in {**headers, "kernel.cu": source}.items():
                (here / file).write_text(text, encoding="utf-8")
            entries = [
                f'extern "C" int emulate_{kernel}(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,'
                f" unsigned bz, unsigned shared, const void* parameters) {{ {struct} p;"
                f" memcpy(&p, parameters, sizeof p);"
                f" return emulation::run({{gx, gy, gz}}, {{bx, by, bz}}, shared, [&] {{ {kernel}(p); }}); }}"
                for kernel, struct in _KERNEL.findall(source)
                if struct.endswith("Parameters")
            ]
            main = here / "main.cpp"
            main.write_text(
                "\n".join([f'#include "{HEADER}"', f'#line 1 "{name}"', '#include "kernel.cu"', *entries]),
                encoding="utf-8",
            )
            defines = [option for option in options if option.startswith("-D")]
            library = here / "kernel.so"
            subprocess.run(
                [COMPILER, "-std=c++17", "-O0", "-w", "-fPIC", "-shared", "-ffp-contract=off", *defines,
                 "-o", str(library), str(main)],
                check=True,
            )  # fmt: skip
            return Compiled(library.read_bytes(), "")


class EmulatedDriver:
    """Stands for the driver: loads those libraries and calls their entries."""

    device_type = "cpu"
    version = (99, 0)

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[int, ...]]] = []
        self._folder = tempfile.TemporaryDirectory()
        self._loaded = 0

    def capability(self, device: int) -> int:
        return 90

    def multiprocessors(self, device: int) -> int:
        return 4

    def shared_limit(self, device: int) -> int:
        return 227 * 1024

    def load(self, image: bytes, device: int) -> ctypes.CDLL:
        self._loaded += 1
        path = Path(self._folder.name) / f"{self._loaded}.so"
        path.write_bytes(image)
        return ctypes.CDLL(str(path))

    def function(self, module: ctypes.CDLL, name: str, device: int) -> Any:
        function = getattr(module, f"emulate_{name}")
        function.argtypes = [ctypes.c_uint] * 7 + [ctypes.c_void_p]
        return (name, function)

    def allow_shared(self, function: Any, shared_bytes: int, device: int) -> None:
        assert shared_bytes <= 227 * 1024

    def occupancy(self, function: Any, threads: int, shared_bytes: int, device: int) -> int:
        return max(1, 1024 // threads)

    def resources(self, function: Any, device: int) -> Resources:
        return Resources(registers=32, local_bytes=0, shared_bytes=0)

    def launch(self, function: Any, *arguments: Any) -> int:
        *geometry, _stream, parameters, _extra = arguments
        self.launches.append((function[0], tuple(geometry)))
        # Not parameters[0]: that would be a copy up to the first zero byte.
        return int(function[1](*geometry, ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]))

    def bound_launch(self, function: Any, grid: Any, block: Any, shared_bytes: int, stream: int) -> Any:
        return lambda reference, extra: self.launch(function, *grid, *block, shared_bytes, stream, reference, extra)

    def current_stream(self, device: int) -> int:
        return 0

    def current_device(self) -> int:
        return -1  # what get_device() says for CPU tensors

    def make_current(self, device: int) -> None:
        raise AssertionError("an emulated launch cannot lack a context")

    def error(self, code: int) -> str:
        return {1: "invalid grid or block", 700: "deadlock: a barrier that not all threads reach"}.get(code, str(code))


@contextlib.contextmanager
def emulated() -> Iterator[Runtime]:
    """Run backend "cuda" on the CPU. Compiled kernels are kept in the system's temporary folder: g++ takes a second each."""
    from anymamba import backends
    from anymamba.ops import _prepared

    cache = DiskCache(Path(tempfile.gettempdir()) / "anymamba-emulated-kernels")
    backends._chosen.clear()
    _prepared.forget()
    _prepared.DEVICES.add("cpu")
    try:
        with use_runtime(Runtime(EmulatedCompiler(), EmulatedDriver(), cache)) as runtime:
            yield runtime
    finally:
        _prepared.DEVICES.discard("cpu")
        _prepared.forget()
        backends._chosen.clear()
