"""One decoding step as a few operations over the whole batch.

The state is the only large tensor: fp32 states are updated where they lie. Where A and dt are tied within a head (Mamba-2),
the decay is one exponential a head instead of headdim * dstate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from anymamba.ops._checks import cast

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
    if _tied(A, 2) and _tied(dt, 1) and (dt_bias is None or _tied(dt_bias, 1)):
        A, dt = A[..., :1, :1], dt[..., :1]
        dt_bias = None if dt_bias is None else dt_bias[..., :1]
    step = cast(dt, compute)
    if dt_bias is not None:
        step = step + cast(dt_bias, compute)
    if dt_softplus:
        step = F.softplus(step)
    decay = (step.unsqueeze(-1) * cast(A, compute)).exp_()
    inputs = cast(x, compute)

    rows = None if state_batch_indices is None else state_batch_indices.clamp(min=0).long()
    in_place = rows is None and state.dtype == compute
    updated = state if in_place else (state if rows is None else state[rows]).to(compute, copy=True)
    # Views, not `unflatten`, which is Python: a step of one layer is a dozen small operations, and every microsecond counts.
    batch, heads, headdim, dstate = updated.shape
    groups = B.shape[1]
    split = (batch, groups, heads // groups)
    grouped = updated.view(*split, headdim, dstate)
    grouped.mul_(decay.view(*split, *decay.shape[2:]))
    driven = (step * inputs).view(*split, headdim, 1)
    grouped.addcmul_(driven, cast(B, compute).view(batch, groups, 1, 1, dstate))
    y = (grouped * cast(C, compute).view(batch, groups, 1, 1, dstate)).sum(-1).flatten(1, 2)
    if D is not None:
        y.addcmul_(inputs, cast(D, compute))
    if z is not None:
        y.mul_(F.silu(cast(z, compute)))
    out = y if y.dtype == x.dtype and x.is_contiguous() else torch.empty_like(x).copy_(y)
    if state_batch_indices is not None and rows is not None:
        # A padding row must not write back what its (clamped) entry held: another row may own that entry.
        padding = state_batch_indices < 0
        real = (~padding).nonzero().squeeze(-1)
        state.index_copy_(0, rows[real], updated[real].to(state.dtype))
        out.masked_fill_(padding[:, None, None], 0)
    elif not in_place:
        state.copy_(updated)
    return out


def _tied(tensor: torch.Tensor, dims: int) -> bool:
    """Return whether the tensor is one value repeated along its last `dims` dimensions (none of them empty)."""
    return all(size > 0 and stride == 0 for size, stride in zip(tensor.shape[-dims:], tensor.stride()[-dims:]))
