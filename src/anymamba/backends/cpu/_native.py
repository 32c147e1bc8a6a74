"""Machine code of kernels: kept on disk, linked into this process, called. Needs llvmlite, not numba.

An object file has two entries, which take the address of a block of 8-byte words:

    int32 anymamba_range(int64 first, int64 after, block)   the items first <= item < after
    void anymamba_team(block)                               ranges of items, until all `parts` are taken; any number of threads

Words 0 to 3 are the team's: the next part to take, items, parts, and what went wrong (0: nothing). The kernel's arguments
follow: a tensor's address, a whole number, a truth value, a float64.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import llvmlite
import llvmlite.binding as llvm

from anymamba import __version__
from anymamba.backends.disk_cache import DiskCache, key_of
from anymamba.machine.folders import cache_folder

if TYPE_CHECKING:
    from anymamba.backends.cpu._compile import Kernel

__all__ = ["HEADER_BYTES", "LIBC", "Code", "check", "code", "target_machine"]

HEADER_BYTES = 32

LIBC = ("malloc", "free", "memcpy", "memset", "memmove", "exp", "log1p", "sqrt")
"""All that a kernel may call. What needs more (a later numba's code may) is not linked: the process would end."""


class Code(NamedTuple):
    """A linked kernel."""

    range: Callable[[int, int, Any], int]
    team: int


def check(failed: int) -> None:
    """Raise if a kernel says that it failed, of which there is one way."""
    if failed:
        raise MemoryError("a kernel on the CPU found no memory for its buffers")


def code(kernel: Kernel, signature: str) -> Code:
    """Return a kernel's variant: from disk, or compiled now."""
    key = key_of([*_about(), kernel.name, kernel.function.__code__.co_code.hex(), signature, *sorted(kernel.flags)])
    image = _cache().get(key)
    if image is None:
        from anymamba.backends.cpu import _build

        image = _build.build(kernel, signature)
        _cache().put(key, image)
    return _link(image)


def _cache() -> DiskCache:
    return DiskCache(cache_folder() / "cpu")


@functools.cache
def _about() -> tuple[str, ...]:
    """Return what machine code depends on besides its kernel: this backend's source, the tools, the processor.

    All of the source, since kernels call each other.
    """
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    digest = hashlib.sha256(b"\0".join(sources)).hexdigest()
    name, features = _processor()
    return digest, __version__, llvmlite.__version__, sys.platform, name, features


@functools.cache
def _processor() -> tuple[str, str]:
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


@functools.cache
def target_machine() -> Any:
    """Return how to make code for this processor."""
    with contextlib.suppress(RuntimeError):  # newer ones do it themselves
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    name, features = _processor()
    target = llvm.Target.from_default_triple()
    static = target.name.startswith("x86")
    return target.create_target_machine(
        cpu=name, features=features, opt=3, reloc="static" if static else "default", codemodel="jitdefault", jit=True
    )


@functools.cache
def _libc() -> dict[str, int]:
    library: Any = ctypes.CDLL("ucrtbase") if sys.platform == "win32" else ctypes.CDLL(None)
    found = {}
    for name in LIBC:
        function = getattr(library, name, None)
        if function is not None:
            found[name] = ctypes.cast(function, ctypes.c_void_p).value or 0
    return found


_Range = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p)
_engines: list[Any] = []  # their code must live


def _link(image: bytes) -> Code:
    machine = target_machine()
    for name, address in _libc().items():
        llvm.add_symbol(name, address)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(image))
    engine.finalize_object()
    _engines.append(engine)
    return Code(_Range(engine.get_function_address("anymamba_range")), engine.get_function_address("anymamba_team"))
