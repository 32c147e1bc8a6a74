"""`selective_scan_cuda_oflex`: VMamba's scan that can return fp32 from half-precision inputs, and whose delta may be shared."""

from __future__ import annotations

import torch

from anymamba.extensions import _vmamba

__all__ = ["bwd", "fwd"]


def fwd(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    nrows: int,
    out_float: bool,
) -> list[torch.Tensor]:
    """Scan; return [out, x].

    Shapes: u (batch, dim, seqlen); delta (batch, delta_dim, seqlen) and delta_bias (delta_dim), where delta_dim divides dim and
    neighbouring channels share a delta; A (dim, dstate); B, C (batch, groups, dstate, seqlen); D (dim).
    out is contiguous, in fp32 with `out_float`, else in u's dtype; x is what `bwd` takes.
    """
    out, x = _vmamba.forward(u, delta, A, B, C, D, delta_bias, delta_softplus, nrows, bool(out_float))
    return [out.contiguous(), x]


def bwd(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    dout: torch.Tensor,
    x: torch.Tensor | None,
    delta_softplus: bool,
    nrows: int,
) -> list[torch.Tensor | None]:
    """Return [du, ddelta, dA, dB, dC, dD, ddelta_bias], each in its input's dtype and shape; dout in fp32 or u's dtype."""
    return _vmamba.backward(u, delta, A, B, C, D, delta_bias, dout, x, delta_softplus, nrows)
