"""The threads that PyTorch itself computes with, where they can be had: GNU's or LLVM's OpenMP on Linux.

After every parallel operation OpenMP's threads spin for a millisecond or so in case more comes. A thread of another pool then
has no core to run on, and when OpenMP's sleep because the work goes on elsewhere, PyTorch's next operation waits for them to
wake. On the same threads neither happens: a kernel between PyTorch's operations costs what the operations around it cost.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["compiled_team", "team"]

_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def team() -> Callable[[Callable[[], None], int], None] | None:
    """Return a function that runs a callable on up to so many of OpenMP's threads at once (the calling one among them).

    How many there are in the end is OpenMP's affair. The callable must not raise. None: not on this system.
    """
    parallel = _parallel()
    if parallel is None:
        return None

    def run(work: Callable[[], None], threads: int) -> None:
        parallel(_Region(lambda _: work()), None, threads, 0)

    return run


def compiled_team() -> Callable[[int, int, int], None] | None:
    """Return what `team` does for machine code: a function of (address of code, its argument, threads)."""
    function = _compiled_parallel()
    if function is None:
        return None

    def run(code: int, argument: int, threads: int) -> None:
        function(code, argument, threads, 0)

    return run


@functools.cache
def _compiled_parallel() -> Any:
    function = _entry()
    if function is not None:
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return function


@functools.cache
def _parallel() -> Any:
    function = _entry()
    if function is not None:
        function.argtypes, function.restype = [_Region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return function


def _entry() -> Any:
    """Return the entry by which compilers start a parallel region, of the library that PyTorch loaded.

    A new object each time: its types are the caller's to set.
    """
    if sys.platform != "linux":
        return None
    try:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        found = sorted(set(re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)[-.]\S*)", mapped)))
        if len(found) > 1:  # another package brought its own: PyTorch's lies beside it
            home = str(Path(torch.__file__).parent)
            found = [path for path in found if path.startswith(home)]
        if len(found) != 1:
            return None
        return ctypes.CDLL(found[0]).GOMP_parallel
    except (OSError, AttributeError):
        return None
