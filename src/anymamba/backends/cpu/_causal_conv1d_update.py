"""The convolution's decoding step on the CPU: a few multiply-adds a channel, and everything around them settled once.

One kernel for every option: channels of one batch entry after the other, the window read where it lies (also in a circular
buffer), then the state moved on. A layer's step is 8 us of arithmetic: see `_address`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anymamba.backends import Operator
from anymamba.backends.cpu._compile import CODES, FLOATS, kernel
from anymamba.backends.cpu._math import most, sigmoid
from anymamba.backends.cpu._native import check
from anymamba.backends.torch import causal_conv1d as fallback

__all__ = ["causal_conv1d_update", "prepare"]


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
    if not _fits(
        x, conv_state, weight, bias
    ):  # what is rounded to which dtype on the way is the torch backend's affair
        return fallback.causal_conv1d_update(
            x, conv_state, weight, bias, silu, cache_seqlens, conv_state_indices
        )  # fmt: skip
    lengths, entries = (None if t is None else t.long().contiguous() for t in (cache_seqlens, conv_state_indices))
    out = torch.empty_like(x)
    layout = _layout(x, conv_state, weight, bias, silu, lengths, entries, out)
    step = _update.variant(_signature(x.dtype))
    block = step.layout.pack(layout.data_ptr(), *_addresses(x, conv_state, weight, bias, lengths, entries, out))
    check(step.code.range(0, x.shape[0], block))
    return out


def prepare(operator: Operator, arguments: tuple[Any, ...]) -> Callable[..., torch.Tensor] | None:
    """Return a function that does steps like this one, or None; see `anymamba.ops._prepared`. Arguments as the caller's."""
    if operator.name != "causal_conv1d_update":
        return None
    x, conv_state, weight, bias, silu, lengths, entries = arguments
    if not _fits(x, conv_state, weight, bias):
        return None
    if any(t is not None and not (t.dtype == torch.int64 and t.is_contiguous()) for t in (lengths, entries)):
        return None
    out = torch.empty_like(x)
    columns, columns_out = (x, out) if x.dim() == 3 else (x.unsqueeze(-1), out.unsqueeze(-1))
    layout = _layout(columns, conv_state, weight, bias, silu, lengths, entries, columns_out)
    step = _update.variant(_signature(x.dtype))
    pack, run = step.layout.pack, step.code.range

    def call(
        x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        lengths: torch.Tensor | None, entries: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        out = torch.empty_like(x)
        block = pack(layout.data_ptr(), *_addresses(x, conv_state, weight, bias, lengths, entries, out))
        check(run(0, x.shape[0], block))
        return out

    return call


def _fits(x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return whether all is one dtype that a kernel computes in."""
    same = x.dtype == conv_state.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)
    return same and x.dtype in FLOATS


def _signature(dtype: torch.dtype) -> str:
    return "l" + 4 * CODES[dtype] + "ll" + CODES[dtype]


def _addresses(*tensors: torch.Tensor | None) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _layout(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    lengths: torch.Tensor | None,
    entries: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Return all that is not an address: sizes, strides, options."""
    return torch.tensor(
        [
            *x.shape, weight.shape[1], conv_state.shape[2],
            *x.stride(), *conv_state.stride(), *weight.stride(), 0 if bias is None else bias.stride(0), *out.stride(),
            bias is not None, silu, lengths is not None, entries is not None,
        ],
        dtype=torch.int64,
    )  # fmt: skip


@kernel
def _update(first, after, layout, x, state, weight, bias, lengths, entries, out):
    """Do the step of the batch entries first <= b < after."""
    dim, seqlen, width, state_len = layout[1], layout[2], layout[3], layout[4]
    x_b, x_d, x_t, s_b, s_d, s_t = layout[5], layout[6], layout[7], layout[8], layout[9], layout[10]
    w_d, w_k, bias_d, out_b, out_d, out_t = layout[11], layout[12], layout[13], layout[14], layout[15], layout[16]
    has_bias, silu, circular, has_entries = layout[17] != 0, layout[18] != 0, layout[19] != 0, layout[20] != 0
    reach = width - 1
    # The usual step: one column, everything side by side. Its loops have no branches and no computed indices.
    usual = (
        seqlen == 1 and not circular and width == 4 and s_t == 1 and w_k == 1 and x_d == 1 and out_d == 1 and has_bias
    )
    for b in range(first, after):
        entry = entries[b] if has_entries else b
        if entry < 0:
            for d in range(dim):
                for t in range(seqlen):
                    out[b * out_b + d * out_d + t * out_t] = 0
            continue
        if usual:
            xs = x[b * x_b : b * x_b + dim]
            ys = out[b * out_b : b * out_b + dim]
            for d in range(dim):
                s = entry * s_b + d * s_d
                before = state[s + state_len - 3 : s + state_len]
                w = weight[d * w_d : d * w_d + 4]
                ys[d] = bias[d * bias_d] + w[0] * before[0] + w[1] * before[1] + w[2] * before[2] + w[3] * xs[d]
            if state_len == 4:
                for d in range(dim):
                    kept = state[entry * s_b + d * s_d : entry * s_b + d * s_d + 4]
                    kept[0], kept[1], kept[2], kept[3] = kept[1], kept[2], kept[3], xs[d]
            else:
                for d in range(dim):
                    kept = state[entry * s_b + d * s_d : entry * s_b + d * s_d + state_len]
                    for i in range(state_len - 1):
                        kept[i] = kept[i + 1]
                    kept[state_len - 1] = xs[d]
            if silu:
                for d in range(dim):
                    ys[d] *= sigmoid(ys[d])
            continue
        start = lengths[b] if circular else state_len
        for d in range(dim):
            xd, sd = b * x_b + d * x_d, entry * s_b + d * s_d
            for t in range(seqlen):
                v = bias[d * bias_d] if has_bias else x.dtype.type(0)
                for k in range(width):
                    j = t - reach + k
                    if j >= 0:
                        v += weight[d * w_d + k * w_k] * x[xd + j * x_t]
                    else:
                        i = (start + j) % state_len if circular else start + j
                        v += weight[d * w_d + k * w_k] * state[sd + i * s_t]
                out[b * out_b + d * out_d + t * out_t] = v * sigmoid(v) if silu else v
            if circular:
                for t in range(most(seqlen - state_len, 0), seqlen):  # of a longer block only the last columns stay
                    state[sd + (start + t) % state_len * s_t] = x[xd + t * x_t]
            else:
                for i in range(state_len):
                    source = seqlen + i
                    kept_on = source < state_len
                    state[sd + i * s_t] = state[sd + source * s_t] if kept_on else x[xd + (source - state_len) * x_t]
