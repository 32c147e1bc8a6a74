"""SwiGLU in whole-tensor passes, with its backward written out; halves are views, results are written where they belong."""

from __future__ import annotations

import torch

from anymamba.backends.torch._norm import compute_dtype, silu_gradient

__all__ = ["swiglu_backward", "swiglu_forward"]


def swiglu_forward(xy: torch.Tensor) -> torch.Tensor:
    """See `anymamba.ops.swiglu.SwiGLUBackend`."""
    x, y = xy.to(compute_dtype(xy)).chunk(2, dim=1)
    # silu of a contiguous copy: its result is fresh and contiguous, so the product may stay there
    return torch.nn.functional.silu(x.contiguous()).mul_(y).to(xy.dtype)


def swiglu_backward(
    xy: torch.Tensor, dout: torch.Tensor, recompute_out: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `anymamba.ops.swiglu.SwiGLUBackend`."""
    x, y = xy.to(compute_dtype(xy)).chunk(2, dim=1)
    gate, slope = silu_gradient(x)
    dxy = torch.empty_like(xy)
    dx, dy = dxy.chunk(2, dim=1)
    dwide = dout.to(x.dtype)
    out = (gate * y).to(xy.dtype).contiguous() if recompute_out else None
    dx.copy_(slope.mul_(y).mul_(dwide))
    dy.copy_(gate.mul_(dwide))
    return dxy, out
