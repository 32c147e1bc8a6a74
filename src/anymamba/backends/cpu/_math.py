"""Scalar functions of the kernels' inner loops, written so that LLVM turns them into packed instructions.

numba has no vector math library any more, and a call to exp in an inner loop is one scalar call a lane. These are
straight-line arithmetic: 2^x = 2^n * 2^f with n = round(x), |f| <= 1/2, a polynomial for 2^f, and 2^n built from its bits.
Each has a float32 and a float64 form, chosen by the argument's type when the kernel is compiled.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from anymamba.backends.cpu._compile import inline

__all__ = ["LN2", "LOG2E", "exp2", "sigmoid", "softplus"]

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def exp2(x: Any) -> Any:
    """Return 2 ** x: for float32 within 2 units in the last place, 0 below 2^-126, inf above 2^128, NaN for NaN."""
    return math.pow(2.0, x)


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + math.exp(-x))


def softplus(x: Any) -> Any:
    """Return log(1 + exp(x)) with full relative accuracy at both ends."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


_intrinsic: Any = intrinsic


@_intrinsic
def _float32_from_bits(typing_context: Any, bits: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), build


# Least largest relative error on [-1/2, 1/2] (2e-9 before rounding); c0 = 1 exactly, so that exp2(0) == 1.
_C1 = np.float32(0.6931471824645996)
_C2 = np.float32(0.24022647738456726)
_C3 = np.float32(0.055503323674201965)
_C4 = np.float32(0.00961843691766262)
_C5 = np.float32(0.0013398873852565885)
_C6 = np.float32(0.00015353361959569156)
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)
_TWO = np.float32(2.0)
_LOWEST = np.float32(-127.0)
_HIGHEST = np.float32(128.0)
_LOG2E_32 = np.float32(LOG2E)


@inline
def _exp2_32(x: Any) -> Any:
    # NaN fails both comparisons and passes through; the clamps make n + 127 a valid exponent field (0: zero, 255: inf).
    y = _LOWEST if x < _LOWEST else x
    y = _HIGHEST if y > _HIGHEST else y
    n = np.rint(y)
    f = y - n
    p = _C5 + _C6 * f
    p = _C4 + p * f
    p = _C3 + p * f
    p = _C2 + p * f
    p = _C1 + p * f
    p = _ONE + p * f
    return np.float32(p * _float32_from_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23))))


@inline
def _sigmoid_32(x: Any) -> Any:
    return np.float32(_ONE / (_ONE + _exp2_32(-x * _LOG2E_32)))


# 2 atanh(s) = log((1 + s) / (1 - s)); s = e / (2 + e) gives log1p(e) without losing small e. |s| <= 1/3: seven terms.
_A1 = np.float32(2.0 / 3)
_A2 = np.float32(2.0 / 5)
_A3 = np.float32(2.0 / 7)
_A4 = np.float32(2.0 / 9)
_A5 = np.float32(2.0 / 11)
_A6 = np.float32(2.0 / 13)
_A7 = np.float32(2.0 / 15)


@inline
def _softplus_32(x: Any) -> Any:
    e = _exp2_32(-abs(x) * _LOG2E_32)
    s = e / (_TWO + e)
    q = s * s
    p = _A6 + _A7 * q
    p = _A5 + p * q
    p = _A4 + p * q
    p = _A3 + p * q
    p = _A2 + p * q
    p = _A1 + p * q
    return np.float32((x if x > _ZERO else _ZERO) + s * (_TWO + p * q))


# numba takes plain functions here, not compiled ones: hence the lambdas.


@overload(exp2, strict=False)
def _exp2_overload(x: Any) -> Any:
    return (lambda x: _exp2_32(x)) if x == types.float32 else (lambda x: math.exp(x * LN2))  # noqa: PLW0108


@overload(sigmoid, strict=False)
def _sigmoid_overload(x: Any) -> Any:
    return (lambda x: _sigmoid_32(x)) if x == types.float32 else (lambda x: 1.0 / (1.0 + math.exp(-x)))  # noqa: PLW0108


@overload(softplus, strict=False)
def _softplus_overload(x: Any) -> Any:
    if x == types.float32:
        return lambda x: _softplus_32(x)  # noqa: PLW0108
    return lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x)))
