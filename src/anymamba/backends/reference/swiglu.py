"""SwiGLU, written as its formula."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from anymamba.backends.reference._autograd import gradients

__all__ = ["swiglu_backward", "swiglu_forward"]


def swiglu_forward(xy: torch.Tensor) -> torch.Tensor:
    """See `anymamba.ops.swiglu.SwiGLUBackend`."""
    x, y = xy.to(torch.promote_types(xy.dtype, torch.float32)).chunk(2, dim=1)
    return (F.silu(x) * y).to(xy.dtype).contiguous()


def swiglu_backward(
    xy: torch.Tensor, dout: torch.Tensor, recompute_out: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `anymamba.ops.swiglu.SwiGLUBackend`."""
    (dxy,) = gradients(swiglu_forward, (xy,), (dout,))
    assert dxy is not None
    return dxy, swiglu_forward(xy) if recompute_out else None
