"""Causal convolution, written as the definition says: every output column sees its own window of columns."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from anymamba.backends.reference._autograd import gradients

__all__ = [
    "causal_conv1d_backward",
    "causal_conv1d_forward",
    "causal_conv1d_update",
    "causal_conv1d_varlen_states",
]


def causal_conv1d_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    silu: bool,
    return_final_states: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `anymamba.ops.causal_conv1d.CausalConv1dBackend`."""
    batch, dim, seqlen = x.shape
    width = weight.shape[1]
    compute = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    before = x.new_zeros(batch, dim, width - 1) if initial_states is None else initial_states
    columns = torch.cat([before.to(compute), x.to(compute)], dim=-1)  # (batch, dim, width - 1 + seqlen)
    if seqlen == 0:
        out = torch.empty_like(x)
    else:
        windows = columns.unfold(-1, width, 1)  # (batch, dim, seqlen, width)
        if seq_idx is not None:
            owner = torch.cat([seq_idx[:, :1].expand(batch, width - 1), seq_idx], dim=-1)
            same = owner.unfold(-1, width, 1) == seq_idx.unsqueeze(-1)  # (batch, seqlen, width)
            windows = windows * same.unsqueeze(1)
        y = (windows * weight.to(compute)[:, None, :]).sum(-1)
        if bias is not None:
            y = y + bias.to(compute)[:, None]
        if silu:
            y = F.silu(y)
        if seq_idx is not None:
            y = y * (seq_idx >= 0).unsqueeze(1)
        out = torch.empty_like(x).copy_(y)
    if not return_final_states:
        return out, None
    last = columns[..., columns.shape[-1] - (width - 1) :]
    if seq_idx is not None and seqlen > 0:
        owner = torch.cat([seq_idx[:, :1].expand(batch, width - 1), seq_idx], dim=-1)
        kept = owner[:, owner.shape[-1] - (width - 1) :] == seq_idx[:, -1:]
        last = last * kept.unsqueeze(1)
    return out, last.to(x.dtype).contiguous()


def causal_conv1d_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dout: torch.Tensor,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    silu: bool,
    *,
    dx_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """See `anymamba.ops.causal_conv1d.CausalConv1dBackend`."""

    def formula(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, initial_states: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        return causal_conv1d_forward(
            x, weight, bias, seq_idx, initial_states, silu, return_final_states=dfinal_states is not None
        )

    dx, dweight, dbias, dinitial = gradients(formula, (x, weight, bias, initial_states), (dout, dfinal_states))
    assert dx is not None and dweight is not None
    return dx if dx_out is None else dx_out.copy_(dx), dweight, dbias, dinitial


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    cache_seqlens: torch.Tensor | None,
    conv_state_indices: torch.Tensor | None,
) -> torch.Tensor:
    """See `anymamba.ops.causal_conv1d.CausalConv1dBackend`."""
    seqlen, width, state_len = x.shape[2], weight.shape[1], conv_state.shape[2]
    out = torch.empty_like(x)
    for row in range(x.shape[0]):
        entry = row if conv_state_indices is None else int(conv_state_indices[row])
        if entry < 0:
            out[row] = 0
            continue
        state = conv_state[entry]  # (dim, state_len), a view: written below
        if cache_seqlens is None:
            before = state[:, state_len - (width - 1) :].clone()
        else:
            start = int(cache_seqlens[row])
            back = [(start - (width - 1) + k) % state_len for k in range(width - 1)]
            before = state[:, back]
        y, _ = causal_conv1d_forward(
            x[row : row + 1], weight, bias, None, before.unsqueeze(0).to(x.dtype), silu, return_final_states=False
        )
        out[row] = y[0]
        if cache_seqlens is None:
            state.copy_(torch.cat([state, x[row].to(state.dtype)], dim=-1)[:, seqlen:])
        else:
            for t in range(seqlen):
                state[:, (start + t) % state_len] = x[row, :, t].to(state.dtype)
    return out


def causal_conv1d_varlen_states(x: torch.Tensor, cu_seqlens: torch.Tensor, state_len: int) -> torch.Tensor:
    """See `anymamba.ops.causal_conv1d.CausalConv1dBackend`."""
    starts = cu_seqlens.tolist()
    states = x.new_zeros(len(starts) - 1, state_len, x.shape[1])
    for row, (start, end) in enumerate(zip(starts[:-1], starts[1:])):
        kept = min(state_len, end - start)
        if kept:
            states[row, state_len - kept :] = x[end - kept : end]
    return states.transpose(1, 2)
