"""Scalar functions of the kernels' inner loops, written so that LLVM turns them into packed instructions.

numba has no vector math library any more, and a call to exp in an inner loop is one scalar call a lane. For float32 these are
straight-line arithmetic: 2^x = 2^n * 2^f with n = round(x), |f| <= 1/2, a polynomial for 2^f, and 2^n built from its bits; for
float64 they call the C library. Here is what they compute; the instructions are in `_lowering`.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["ATANH", "EXP2", "LN2", "LOG2E", "LOG2E_SINGLE", "exp2", "least", "most", "sigmoid", "softplus"]

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
LOG2E_SINGLE = 1.44269502162933349609375
"""LOG2E, rounded to float32."""

EXP2 = (
    0.00015353361959569156,
    0.0013398873852565885,
    0.00961843691766262,
    0.055503323674201965,
    0.24022647738456726,
    0.6931471824645996,
    1.0,
)
"""2^f, the highest power first: least largest relative error on [-1/2, 1/2] (2e-9 before rounding); exactly 1 at 0."""

ATANH = tuple(2.0 / n for n in (15, 13, 11, 9, 7, 5, 3))
"""2 atanh(s) = log((1 + s) / (1 - s)) = s (2 + s^2 this); s = e / (2 + e) gives log1p(e) without losing small e. |s| <= 1/3."""


def exp2(x: Any) -> Any:
    """Return 2 ** x: for float32 within 2 units in the last place, 0 below 2^-126, inf above 2^128, NaN for NaN."""
    return math.pow(2.0, x)


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + math.exp(-x))


def softplus(x: Any) -> Any:
    """Return log(1 + exp(x)) with full relative accuracy at both ends."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def least(a: int, b: int) -> int:
    """Return the smaller one. What numba has for `min` is a function that it compiles: 0.1 s."""
    return min(a, b)


def most(a: int, b: int) -> int:
    """Return the larger one."""
    return max(a, b)
