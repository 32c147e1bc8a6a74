"""`selective_scan_cuda_core`: VMamba's own scan extension, first of its kind, also in Mamba-YOLO."""

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
) -> list[torch.Tensor]:
    """Scan; return [out, x].

    Shapes: u, delta (batch, dim, seqlen); A (dim, dstate); B, C (batch, groups, dstate, seqlen); D, delta_bias (dim). out is in
    u's dtype and delta's layout; x (batch, dim, chunks of 2048 steps, 2 * dstate) is what `bwd` takes.
    """
    return _vmamba.forward(u, delta, A, B, C, D, delta_bias, delta_softplus, nrows)


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
    """Return [du, ddelta, dA, dB, dC, dD, ddelta_bias], each in its input's dtype; None where there is no such input."""
    return _vmamba.backward(u, delta, A, B, C, D, delta_bias, dout, x, delta_softplus, nrows)
