"""Memory that a kernel needs while it computes: buffers of a tile, gone when the kernel ends.

    scratch = begin()
    rows = buffer(scratch, (steps, LANES), like)      an array of like's dtype, not filled
    ...
    end(scratch)                                      on every way out

Taken from the C library: kernels know no numba runtime. Known to numba by `_lowering`; nothing to call from Python.
"""

from __future__ import annotations

from typing import Any

__all__ = ["begin", "buffer", "end"]


def begin() -> Any:
    """Return what the buffers of a kernel hang on."""
    raise NotImplementedError


def buffer(scratch: Any, shape: Any, like: Any) -> Any:
    """Return an array of this shape (a number or a tuple) and of the dtype of the array `like`, on a cache line of its own."""
    raise NotImplementedError


def end(scratch: Any) -> None:
    """Give the buffers back."""
    raise NotImplementedError
