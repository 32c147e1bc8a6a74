"""Causal convolution as `width` shifted multiply-adds over whole tensors.

A depthwise filter of width 4 is memory-bound: four fused multiply-adds beat PyTorch's grouped conv1d on CPU by 3x, need no
padded copy, keep any layout, and make packed sequences a mask per shift. Everything between is fp32 (fp64 for fp64). The
backward passes 15 times over its temporaries: on a CPU it goes block by block of channels, so that they stay in the cache.
"""

from __future__ import annotations

import torch

from anymamba.backends.torch._norm import BLOCK_ELEMENTS
from anymamba.machine.memory import empty_like

__all__ = [
    "causal_conv1d_backward",
    "causal_conv1d_forward",
    "causal_conv1d_update",
    "causal_conv1d_varlen_states",
    "final_states",
    "kept_at_end",
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
    y = _preactivation(x, weight, bias, seq_idx, initial_states)
    if silu:
        y = torch.nn.functional.silu(y, inplace=True)
    if seq_idx is not None:
        y.mul_((seq_idx >= 0).unsqueeze(1))
    out = y if y.dtype == x.dtype else empty_like(x).copy_(y)  # y has the layout of empty_like(x)
    return out, final_states(x, weight.shape[1], seq_idx, initial_states) if return_final_states else None


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
    batch, dim, seqlen = x.shape
    width = weight.shape[1]
    compute = _compute_dtype(x, weight)
    w = weight.to(compute)
    # Written where it belongs if it can be; widened for a narrower dtype
    dx = empty_like(x, compute) if dx_out is None or x.dtype != compute else dx_out
    dinitial = torch.zeros(batch, dim, width - 1, dtype=compute, device=x.device)
    dweight = torch.zeros(dim, width, dtype=compute, device=x.device)
    dbias = None if bias is None else torch.empty_like(bias, dtype=compute)
    real = None if seq_idx is None else (seq_idx >= 0).unsqueeze(1)
    for rows in _channel_blocks(x):
        columns, dy = x[:, rows].to(compute), dout[:, rows].to(compute)
        before = None if initial_states is None else initial_states[:, rows]
        if real is not None:
            dy = dy * real
        if silu:
            b = None if bias is None else bias[rows]
            dy = torch.ops.aten.silu_backward(dy, _preactivation(columns, w[rows], b, seq_idx, before))
        if dbias is not None:
            dbias[rows] = dy.sum((0, 2))
        products = torch.empty_like(dy)
        torch.mul(dy, w[rows, width - 1, None], out=dx[:, rows])
        for k in range(width):
            shift = width - 1 - k
            inside = max(seqlen - shift, 0)  # outputs whose tap k lies in x
            if inside:
                part = dy[..., shift:] if seq_idx is None else dy[..., shift:] * _same(seq_idx, shift)
                if shift:
                    dx[:, rows, :inside].addcmul_(part, w[rows, k, None])
                product = torch.mul(part, columns[..., :inside], out=products[..., :inside])
                dweight[rows, k] = product.sum((0, 2))
            ahead = min(shift, seqlen)  # outputs whose tap k lies in the initial states
            if ahead and before is not None:
                part = dy[..., :ahead] if seq_idx is None else dy[..., :ahead] * _same_as_first(seq_idx, ahead)
                dinitial[:, rows, k : k + ahead].addcmul_(part, w[rows, k, None])
                dweight[rows, k] += (part * before[..., k : k + ahead]).sum((0, 2))
    if dfinal_states is not None:
        dlast = dfinal_states.to(compute)
        if seq_idx is not None and seqlen:
            dlast = dlast * kept_at_end(seq_idx, width)
        from_x = min(width - 1, seqlen)
        if from_x:
            dx[..., seqlen - from_x :] += dlast[..., width - 1 - from_x :]
        if width - 1 > seqlen:
            dinitial[..., seqlen:] += dlast[..., : width - 1 - seqlen]
    return (
        dx
        if dx is dx_out or (dx_out is None and x.dtype == compute)
        else (torch.empty_like(x) if dx_out is None else dx_out).copy_(dx),
        torch.empty_like(weight).copy_(dweight),
        None if bias is None or dbias is None else torch.empty_like(bias).copy_(dbias),
        None if initial_states is None else torch.empty_like(initial_states).copy_(dinitial),
    )


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
    padding = None if conv_state_indices is None else conv_state_indices < 0
    rows = None if conv_state_indices is None else conv_state_indices.clamp(min=0).long()
    state = conv_state if rows is None else conv_state[rows]
    if cache_seqlens is None:
        before = state[..., state_len - (width - 1) :]
        updated = torch.cat([state, x.to(state.dtype)], dim=-1)[..., seqlen:]
    else:
        start = cache_seqlens.long().unsqueeze(-1)  # (batch, 1)
        back = (start + torch.arange(-(width - 1), 0, device=x.device)) % max(state_len, 1)
        before = state.gather(2, back.unsqueeze(1).expand(-1, state.shape[1], -1))
        kept = min(seqlen, state_len)  # of a longer block only the last state_len columns stay
        ahead = (start + torch.arange(seqlen - kept, seqlen, device=x.device)) % max(state_len, 1)
        updated = state.scatter(
            2, ahead.unsqueeze(1).expand(-1, state.shape[1], -1), x[..., seqlen - kept :].to(state.dtype)
        )
    out, _ = causal_conv1d_forward(x, weight, bias, None, before.to(x.dtype), silu, return_final_states=False)
    if rows is None:
        conv_state.copy_(updated)
    else:
        assert padding is not None
        # A padding row writes back what its (clamped) entry already holds only if nothing else does: leave it out.
        real = (~padding).nonzero().squeeze(-1)
        conv_state.index_copy_(0, rows[real], updated[real])
        out.masked_fill_(padding[:, None, None], 0)
    return out


def causal_conv1d_varlen_states(x: torch.Tensor, cu_seqlens: torch.Tensor, state_len: int) -> torch.Tensor:
    """See `anymamba.ops.causal_conv1d.CausalConv1dBackend`."""
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    index = ends.unsqueeze(1) + torch.arange(-state_len, 0, device=x.device)  # (batch, state_len)
    inside = index >= starts.unsqueeze(1)
    if x.shape[0] == 0:
        return x.new_zeros(starts.shape[0], state_len, x.shape[1]).transpose(1, 2)
    states = x[index.clamp(min=0)] * inside.unsqueeze(-1)
    return states.transpose(1, 2)


def _channel_blocks(x: torch.Tensor) -> list[slice]:
    """Cut the channels so that the temporaries of a block stay in the cache of a CPU; elsewhere all of them are one."""
    batch, dim, seqlen = x.shape
    step = max(1, BLOCK_ELEMENTS // max(1, batch * seqlen)) if x.device.type == "cpu" else max(1, dim)
    return [slice(first, min(first + step, dim)) for first in range(0, dim, step)]


def _compute_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)


def _same(seq_idx: torch.Tensor, shift: int) -> torch.Tensor:
    """Return (batch, 1, seqlen - shift): does a column belong to the same sequence as the one `shift` before it?"""
    return (seq_idx[:, shift:] == seq_idx[:, : seq_idx.shape[1] - shift]).unsqueeze(1)


def _same_as_first(seq_idx: torch.Tensor, count: int) -> torch.Tensor:
    """Return (batch, 1, count): do the initial states belong to this column's sequence?"""
    return (seq_idx[:, :count] == seq_idx[:, :1]).unsqueeze(1)


def kept_at_end(seq_idx: torch.Tensor, width: int) -> torch.Tensor:
    """Return (batch, 1, width - 1): which of the last columns belong to the last sequence."""
    owner = torch.cat([seq_idx[:, :1].expand(-1, width - 1), seq_idx], dim=-1)
    return (owner[:, owner.shape[1] - (width - 1) :] == seq_idx[:, -1:]).unsqueeze(1)


def _preactivation(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
) -> torch.Tensor:
    """Return bias + the weighted sum of shifted columns, in the compute dtype and x's layout."""
    seqlen, width = x.shape[2], weight.shape[1]
    compute = _compute_dtype(x, weight)
    w, columns = weight.to(compute), x.to(compute)
    y = empty_like(x, compute)
    torch.mul(columns, w[:, width - 1, None], out=y)
    if bias is not None:
        y += bias.to(compute)[:, None]
    for k in range(width - 1):
        shift = width - 1 - k
        if shift < seqlen:
            part = columns[..., : seqlen - shift]
            y[..., shift:].addcmul_(part if seq_idx is None else part * _same(seq_idx, shift), w[:, k, None])
        before = min(shift, seqlen)
        if before and initial_states is not None:
            part = initial_states[..., k : k + before].to(compute)
            y[..., :before].addcmul_(part if seq_idx is None else part * _same_as_first(seq_idx, before), w[:, k, None])
    return y


def final_states(
    x: torch.Tensor, width: int, seq_idx: torch.Tensor | None, initial_states: torch.Tensor | None
) -> torch.Tensor:
    """Return (batch, dim, width - 1): the last columns, those of another sequence than the last one zeroed."""
    batch, dim, seqlen = x.shape
    states = x.new_zeros(batch, dim, width - 1)
    from_x = min(width - 1, seqlen)
    if from_x:
        states[..., width - 1 - from_x :] = x[..., seqlen - from_x :]
    if initial_states is not None and from_x < width - 1:
        states[..., : width - 1 - from_x] = initial_states[..., from_x:]
    if seq_idx is not None and seqlen:
        states *= kept_at_end(seq_idx, width)
    return states
