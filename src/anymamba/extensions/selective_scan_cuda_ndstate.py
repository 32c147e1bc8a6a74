"""`selective_scan_cuda_ndstate`: VMamba's scan with one state a channel; A, B and C have no dimension for the states."""

from __future__ import annotations

import torch

from anymamba.extensions import _vmamba
from anymamba.ops._checks import check_dim

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

    Shapes: u, delta (batch, dim, seqlen); A (dim); B, C (batch, groups, seqlen); D, delta_bias (dim). out is in u's dtype and
    delta's layout; x is (batch, dim, chunks of 2048 steps, 2).
    """
    A, B, C = _with_states(A, B, C)
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
    """Return [du, ddelta, dA, dB, dC, dD, ddelta_bias], each in its input's dtype and shape."""
    shapes = {2: A.shape, 3: B.shape, 4: C.shape}
    A, B, C = _with_states(A, B, C)
    gradients = _vmamba.backward(u, delta, A, B, C, D, delta_bias, dout, x, delta_softplus, nrows)
    return [
        gradient.view(shapes[place]) if gradient is not None and place in shapes else gradient
        for place, gradient in enumerate(gradients)
    ]


def _with_states(A: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_dim("A", A, 1, "(dim,)")
    check_dim("B", B, 3, "(batch, groups, seqlen)")
    check_dim("C", C, 3, "(batch, groups, seqlen)")
    return A.unsqueeze(1), B.unsqueeze(2), C.unsqueeze(2)
