"""SwiGLU, block by block of rows, with its backward written out; results are written where they belong."""

from __future__ import annotations

import torch

from anymamba.backends.torch._norm import compute_dtype, row_blocks, widened

__all__ = ["swiglu_backward", "swiglu_forward"]


def swiglu_forward(xy: torch.Tensor) -> torch.Tensor:
    """See `anymamba.ops.swiglu.SwiGLUBackend`."""
    x, y = xy.chunk(2, dim=1)
    compute = compute_dtype(xy)
    if compute == xy.dtype:
        return torch.nn.functional.silu(x).mul_(y)
    out = xy.new_empty(x.shape)
    for block, (gate,) in row_blocks(xy, compute, 1, x.shape[1]):
        out[block] = torch.nn.functional.silu(gate.copy_(x[block]), inplace=True).mul_(y[block])
    return out


def swiglu_backward(
    xy: torch.Tensor, dout: torch.Tensor, recompute_out: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `anymamba.ops.swiglu.SwiGLUBackend`."""
    compute, dim = compute_dtype(xy), xy.shape[1] // 2
    x, y = xy.chunk(2, dim=1)
    dxy = torch.empty_like(xy)
    dx, dy = dxy.chunk(2, dim=1)
    out = xy.new_empty((xy.shape[0], dim)) if recompute_out else None
    for block, (gate, slope, first) in row_blocks(xy, compute, 3, dim):
        wide = widened(x[block], first)
        torch.ops.aten.silu.out(wide, out=gate)
        if out is not None:
            out[block] = gate * y[block]
        dy[block] = gate.mul_(dout[block])
        torch.mul(slope.copy_(dout[block]), y[block], out=slope)
        torch.ops.aten.silu_backward.grad_input(slope, wide, grad_input=gate)
        dx[block] = gate
    return dxy, out
