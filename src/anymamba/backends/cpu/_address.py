"""Tensors given to a kernel as addresses: a decoding step has a dozen of them, and as arrays each costs over a microsecond.

`array_at(address, like)` is, inside a kernel, an array of `like`'s dtype that starts there. It has no end: the kernel's sizes
and strides say what of it there is. Whoever calls keeps the tensors alive.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from anymamba.backends.cpu._compile import inline

__all__ = ["LIKE", "array_at", "integers_at"]

LIKE = {torch.float32: np.empty(0, np.float32), torch.float64: np.empty(0, np.float64)}
"""What tells a kernel the dtype of its addresses."""

_ENDLESS = 1 << 40
_INTEGERS = np.empty(0, np.int64)
_intrinsic: Any = intrinsic
_carray: Any = numba.carray  # type: ignore[attr-defined]


@_intrinsic
def _pointer(typing_context: Any, address: Any, like: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.intp, like), build


@inline
def array_at(address: Any, like: Any) -> Any:
    """Return the array of `like`'s dtype at this address."""
    return _carray(_pointer(address, like), (_ENDLESS,))


@inline
def integers_at(address: Any) -> Any:
    """Return the array of int64 at this address."""
    return _carray(_pointer(address, _INTEGERS), (_ENDLESS,))
