"""Selective scan, written as the recurrence says: one step of the state after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from anymamba.backends.reference._autograd import gradients
from anymamba.ops.selective_scan import CHECKPOINT_LENGTH, Gradients, real_dtype

__all__ = ["selective_scan_backward", "selective_scan_forward"]


def selective_scan_forward(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    initial_state: torch.Tensor | None,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See `anymamba.ops.selective_scan.SelectiveScanBackend`."""
    batch, dim, seqlen = u.shape
    dstate = A.shape[1]
    real = real_dtype(A.dtype)
    inputs, dt = u.to(real), delta.to(real)
    if delta_bias is not None:
        dt = dt + delta_bias[:, None]
    if delta_softplus:
        dt = F.softplus(dt)
    B, C = _over_time(B, A, dim, seqlen), _over_time(C, A, dim, seqlen)
    state = A.new_zeros(batch, dim, dstate) if initial_state is None else initial_state
    entering, columns = [], []
    for t in range(seqlen):
        if t % CHECKPOINT_LENGTH == 0:
            entering.append(state)
        decay = torch.exp(dt[:, :, t, None] * A)  # (batch, dim, dstate)
        state = decay * state + (dt[:, :, t] * inputs[:, :, t])[..., None] * B[..., t]
        y = (state * C[..., t]).sum(-1)
        columns.append(2 * y.real if A.is_complex() else y)
    y = torch.stack(columns, dim=-1) if columns else torch.zeros_like(inputs)
    if D is not None:
        y = y + D[:, None] * inputs
    if z is not None:
        y = y * F.silu(z.to(real))
    out = torch.empty_like(delta).copy_(y)
    checkpoints = None
    if save:
        checkpoints = torch.stack(entering, dim=2) if entering else A.new_zeros(batch, dim, 0, dstate)
    return out, state.clone(memory_format=torch.contiguous_format), checkpoints


def selective_scan_backward(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    initial_state: torch.Tensor | None,
    checkpoints: torch.Tensor | None,
    dout: torch.Tensor,
    dlast_state: torch.Tensor | None,
    *,
    return_out: bool = False,
    dz_out: torch.Tensor | None = None,
    dB_out: torch.Tensor | None = None,
    dC_out: torch.Tensor | None = None,
) -> Gradients:
    """See `anymamba.ops.selective_scan.SelectiveScanBackend`; the checkpoints are not used."""

    def formula(
        u: torch.Tensor,
        delta: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None,
        z: torch.Tensor | None,
        delta_bias: torch.Tensor | None,
        initial_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        out, last_state, _ = selective_scan_forward(
            u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, save=False
        )
        return out, last_state

    inputs = (u, delta, A, B, C, D, z, delta_bias, initial_state)
    du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial_state = gradients(formula, inputs, (dout, dlast_state))
    assert du is not None and ddelta is not None and dA is not None and dB is not None and dC is not None
    if dz is not None and dz_out is not None:
        dz = dz_out.copy_(dz)
    dB = dB if dB_out is None else dB_out.copy_(dB)
    dC = dC if dC_out is None else dC_out.copy_(dC)
    out = None
    if return_out:
        out, _, _ = selective_scan_forward(
            u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, save=False
        )
    return du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial_state, out


def _over_time(matrix: torch.Tensor, A: torch.Tensor, dim: int, seqlen: int) -> torch.Tensor:
    """Return B or C as (batch or 1, dim, dstate, seqlen) in the state's dtype."""
    if matrix.dim() == 2:
        return matrix[None, :, :, None].expand(-1, -1, -1, seqlen)
    matrix = matrix.to(real_dtype(A.dtype))
    if A.is_complex():
        matrix = torch.view_as_complex(matrix.unflatten(-1, (seqlen, 2)).contiguous())
    return matrix.repeat_interleave(dim // matrix.shape[1], dim=1)
