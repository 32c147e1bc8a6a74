"""SwiGLU on the CPU: a row at a time, everything read and written once; narrow dtypes by the torch backend."""

from __future__ import annotations

import torch

from anymamba.backends.cpu._compile import kernel
from anymamba.backends.cpu._device import refusal
from anymamba.backends.cpu._math import sigmoid
from anymamba.backends.cpu._norm import ELEMENTS_A_THREAD, by_rows
from anymamba.backends.cpu._tiles import like
from anymamba.backends.cpu._tuning import tunable
from anymamba.backends.torch import swiglu as fallback
from anymamba.machine.memory import empty

__all__ = ["refusal", "swiglu_backward", "swiglu_forward"]

FORWARD = tunable("swiglu forward", __name__, sizes=("rows", "columns"))
BACKWARD = tunable("swiglu backward", __name__, sizes=("rows", "columns"))


def swiglu_forward(xy: torch.Tensor) -> torch.Tensor:
    """See `anymamba.ops.swiglu.SwiGLUBackend`."""
    if not by_rows(xy):
        return fallback.swiglu_forward(xy)
    rows, dim = xy.shape[0], xy.shape[1] // 2
    out = empty(xy, rows, dim)
    arguments = (dim, xy, xy.stride(0), out)
    how = FORWARD.settings(xy.element_size(), rows, dim)
    at_least = how.at_least(-(-ELEMENTS_A_THREAD // dim))
    _forward.over(rows, *arguments, at_least=at_least, most=how.threads)
    return out


def swiglu_backward(
    xy: torch.Tensor, dout: torch.Tensor, recompute_out: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `anymamba.ops.swiglu.SwiGLUBackend`."""
    if not by_rows(xy, dout):
        return fallback.swiglu_backward(xy, dout, recompute_out)
    rows, dim = xy.shape[0], xy.shape[1] // 2
    dxy = empty(xy, rows, 2 * dim)
    out = empty(xy, rows, dim) if recompute_out else None
    again = dxy if out is None else out
    arguments = (dim, xy, xy.stride(0), dout, dout.stride(0), dxy, again, recompute_out)
    how = BACKWARD.settings(xy.element_size(), rows, dim)
    at_least = how.at_least(-(-ELEMENTS_A_THREAD // dim))
    _backward.over(rows, *arguments, at_least=at_least, most=how.threads)
    return like(xy, dxy), out


@kernel
def _forward(first, after, dim, xy, xy_r, out):
    """Compute the rows first <= row < after."""
    for r in range(first, after):
        x, y = xy[r * xy_r : r * xy_r + dim], xy[r * xy_r + dim : r * xy_r + 2 * dim]
        to = out[r * dim : r * dim + dim]
        for i in range(dim):
            to[i] = x[i] * sigmoid(x[i]) * y[i]


@kernel
def _backward(first, after, dim, xy, xy_r, dout, dout_r, dxy, out, recompute_out):
    """Compute the rows first <= row < after."""
    for r in range(first, after):
        x, y = xy[r * xy_r : r * xy_r + dim], xy[r * xy_r + dim : r * xy_r + 2 * dim]
        dx, dy = dxy[2 * r * dim : 2 * r * dim + dim], dxy[2 * r * dim + dim : 2 * r * dim + 2 * dim]
        given = dout[r * dout_r : r * dout_r + dim]
        for i in range(dim):
            gate = sigmoid(x[i])
            dy[i] = given[i] * x[i] * gate
            dx[i] = given[i] * y[i] * gate * (1 + x[i] * (1 - gate))
        if recompute_out:
            to = out[r * dim : r * dim + dim]
            for i in range(dim):
                to[i] = x[i] * sigmoid(x[i]) * y[i]
