"""Compilation: numba's disk cache in our own folder, LLVM flags, and the flat view through which kernels see tensors.

Kernels take one-dimensional arrays over a tensor's memory, with its strides as integers: any layout costs no copy, and one
compiled variant a dtype serves all of them. They release the GIL; `_threads` runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba.core import config as _config

from anymamba import __version__
from anymamba.machine.folders import cache_folder

__all__ = ["exact_kernel", "flat", "inline", "kernel"]

config: Any = _config  # numba fills it at run time

# No "nnan"/"ninf": an infinity or NaN in the inputs must come out as one. Reassociation lets LLVM sum lanes in parallel.
_FLAGS = {"contract", "reassoc", "nsz", "arcp"}


def kernel(function: Callable[..., Any]) -> Any:
    """Compile for the dtypes of its arguments on first call; keep the machine code in anymamba's cache folder."""
    return _kept(function, _FLAGS)


def exact_kernel(function: Callable[..., Any]) -> Any:
    """Compile as `kernel` does, but sum in the order that is written: for sums that carry their own rounding error along."""
    return _kept(function, {"contract"})


def _kept(function: Callable[..., Any], flags: set[str]) -> Any:
    before = config.CACHE_DIR
    # numba looks only at the age of the kernel's own file; the version covers what it calls in other files.
    config.CACHE_DIR = str(cache_folder() / "numba" / __version__)
    try:
        return _njit(function, flags, cache=True)
    except RuntimeError:  # no writable folder: compiled anew in every process
        return _njit(function, flags, cache=False)
    finally:
        config.CACHE_DIR = before


def inline(function: Callable[..., Any]) -> Any:
    """Compile a scalar function that kernels call in their inner loops; LLVM inlines and vectorises it."""
    return _njit(function, _FLAGS, cache=False)


def _njit(function: Callable[..., Any], flags: set[str], *, cache: bool) -> Any:
    return numba.njit(nogil=True, fastmath=flags, cache=cache, error_model="numpy")(function)


_DTYPES = {
    dtype: np.dtype(str(dtype).removeprefix("torch."))
    for dtype in (
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
    )
}


class _Memory:
    """Shows a tensor's memory to numpy.

    `Tensor.numpy` would too, but forbids for ever that the memory is given back, as FSDP does with gathered weights.
    """

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor, span: int) -> None:
        self.tensor = tensor  # the array keeps this object, and this object the memory
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False), "shape": (span,), "typestr": _DTYPES[tensor.dtype].str, "version": 3,
        }  # fmt: skip


def flat(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return the memory a tensor spans as a one-dimensional array starting at its first element (shared, not copied)."""
    span = tensor.numel()
    if span == 0:
        return np.empty(0, dtype=_DTYPES[tensor.dtype])
    if not tensor.is_contiguous():
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return np.asarray(_Memory(tensor, span))
