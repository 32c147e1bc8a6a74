"""One decoding step, row by row and as the recurrence says."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["selective_state_update"]


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    state_batch_indices: torch.Tensor | None,
) -> torch.Tensor:
    """See `anymamba.ops.selective_state_update.SelectiveStateUpdateBackend`."""
    compute = torch.promote_types(torch.promote_types(x.dtype, state.dtype), torch.float32)
    heads = x.shape[1] // B.shape[1]  # of a group
    out = torch.empty_like(x)
    for row in range(x.shape[0]):
        entry = row if state_batch_indices is None else int(state_batch_indices[row])
        if entry < 0:
            out[row] = 0
            continue
        inputs, step = x[row].to(compute), dt[row].to(compute)  # (nheads, headdim)
        if dt_bias is not None:
            step = step + dt_bias.to(compute)
        if dt_softplus:
            step = F.softplus(step)
        b, c = (matrix[row].to(compute).repeat_interleave(heads, dim=0)[:, None, :] for matrix in (B, C))
        decay = torch.exp(step[..., None] * A.to(compute))  # (nheads, headdim, dstate)
        updated = decay * state[entry].to(compute) + (step * inputs)[..., None] * b
        y = (updated * c).sum(-1)
        if D is not None:
            y = y + D.to(compute) * inputs
        if z is not None:
            y = y * F.silu(z[row].to(compute))
        state[entry] = updated.to(state.dtype)
        out[row] = y.to(x.dtype)
    return out
