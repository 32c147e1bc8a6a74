"""The state-space dual scan, written as the definition says: one state a head, one step a token."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from anymamba.backends.reference._autograd import gradients
from anymamba.ops.ssd import NEW_BUFFERS, SsdBuffers, SsdGradients, ssd_compute_dtype

__all__ = ["ssd_backward", "ssd_forward"]


def ssd_forward(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    return_final_states: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """See `anymamba.ops.ssd.SsdBackend`."""
    batch, seqlen, nheads, headdim = x.shape
    dstate, heads_per_group = B.shape[3], nheads // B.shape[2]
    compute = ssd_compute_dtype(x, dt, A, B, C)
    step = dt.to(compute)
    if dt_bias is not None:
        step = step + dt_bias.to(compute)
    if dt_softplus:
        step = F.softplus(step)
    step = step.clamp(dt_min, dt_max)
    decay = torch.exp(step * A.to(compute))  # (batch, seqlen, nheads)
    inputs = x.to(compute)
    b, c = (tensor.to(compute).repeat_interleave(heads_per_group, dim=2) for tensor in (B, C))  # a copy for each head
    state = (
        x.new_zeros((batch, nheads, headdim, dstate), dtype=compute)
        if initial_states is None
        else initial_states.to(compute)
    )
    outputs, states = [], []
    for t in range(seqlen):
        if seq_idx is not None and t > 0:
            same = seq_idx[:, t] == seq_idx[:, t - 1]
            state = torch.where(same[:, None, None, None], state, torch.zeros_like(state))
        driven = (step[:, t, :, None] * inputs[:, t])[..., None] * b[:, t, :, None, :]
        state = decay[:, t, :, None, None] * state + driven
        outputs.append((state * c[:, t, :, None, :]).sum(-1))
        states.append(state)
    y = torch.stack(outputs, dim=1) if outputs else inputs
    if D is not None:
        skip = D.to(compute)
        y = y + inputs * (skip if skip.dim() == 2 else skip[:, None])
    if z is not None:
        y = y * F.silu(z.to(compute))
    varlen_states = None
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        ends = [
            states[end - 1][0] if end > start else torch.zeros_like(state[0])
            for start, end in zip(bounds[:-1], bounds[1:])
        ]
        varlen_states = torch.stack(ends).to(C.dtype) if ends else C.new_zeros((0, nheads, headdim, dstate))
    out = y.to(x.dtype).contiguous() if outputs else x.new_empty(x.shape)
    # Never the caller's own tensor: an operator's outputs may not alias its inputs.
    final_states = state.clone(memory_format=torch.contiguous_format) if return_final_states else None
    return out, final_states, varlen_states


def ssd_backward(
    dout: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    dvarlen_states: torch.Tensor | None,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    *,
    into: SsdBuffers = NEW_BUFFERS,
    recompute_out: bool = False,
) -> SsdGradients:
    """See `anymamba.ops.ssd.SsdBackend`."""

    def formula(
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None,
        z: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        initial_states: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        return ssd_forward(
            x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens,
            dt_softplus, dt_min, dt_max, return_final_states=True,
        )  # fmt: skip

    inputs = (x, dt, A, B, C, D, z, dt_bias, initial_states)
    found = gradients(formula, inputs, (dout, dfinal_states, dvarlen_states))
    dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial = found
    assert dx is not None and ddt is not None and dA is not None and dB is not None and dC is not None
    return SsdGradients(
        _placed(dx, into.dx),
        _placed(ddt, into.ddt),
        dA,
        _placed(dB, into.dB),
        _placed(dC, into.dC),
        dD,
        dz if dz is None else _placed(dz, into.dz),
        ddt_bias,
        dinitial,
        formula(*inputs)[0] if recompute_out else None,
    )


def _placed(gradient: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
    return gradient if buffer is None else buffer.copy_(gradient)
