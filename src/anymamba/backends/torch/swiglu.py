"""SwiGLU, block by block of rows, with its backward written out; results are written where they belong."""

from __future__ import annotations

import torch

from anymamba.backends.torch._norm import compute_dtype, row_blocks, widened
from anymamba.machine.memory import empty, empty_like

__all__ = ["swiglu_backward", "swiglu_forward"]


def swiglu_forward(xy: torch.Tensor) -> torch.Tensor:
    """See `anymamba.ops.swiglu.SwiGLUBackend`."""
    x, y = xy.chunk(2, dim=1)
    out = empty(xy, *x.shape)
    if compute_dtype(xy) == xy.dtype:
        torch.ops.aten.silu.out(x, out=out)
        return out.mul_(y)
    for block, (gate,) in row_blocks(xy, compute_dtype(xy), 1, x.shape[1]):
        torch.ops.aten.silu.out(widened(x[block], gate), out=gate)
        torch.mul(gate, y[block], out=out[block])
    return out


def swiglu_backward(
    xy: torch.Tensor, dout: torch.Tensor, recompute_out: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `anymamba.ops.swiglu.SwiGLUBackend`."""
    compute, dim = compute_dtype(xy), xy.shape[1] // 2
    x, y = xy.chunk(2, dim=1)
    dxy = empty_like(xy)
    dx, dy = dxy.chunk(2, dim=1)
    out = empty(xy, xy.shape[0], dim) if recompute_out else None
    if compute == xy.dtype:  # no scratch memory: each half of the result is worked on where it lies
        for block, _ in row_blocks(xy, compute, 0, dim):
            wide, given, to_x, to_y = x[block], dout[block], dx[block], dy[block]
            torch.ops.aten.silu.out(wide, out=to_y)
            if out is not None:
                torch.mul(to_y, y[block], out=out[block])
            to_y.mul_(given)
            torch.mul(given, y[block], out=to_x)
            torch.ops.aten.silu_backward.grad_input(to_x, wide, grad_input=to_x)
        return dxy, out
    for block, (gate, slope, first) in row_blocks(xy, compute, 3, dim):
        wide, given = widened(x[block], first), dout[block]
        torch.ops.aten.silu.out(wide, out=gate)
        if out is not None:
            torch.mul(gate, y[block], out=out[block])
        torch.mul(gate, given, out=dy[block])
        torch.mul(widened(given, slope), y[block], out=slope)
        dx[block] = torch.ops.aten.silu_backward.grad_input(slope, wide, grad_input=gate)
    return dxy, out
