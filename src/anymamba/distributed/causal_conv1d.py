"""The causal convolution over a sharded sequence: each rank needs the last width - 1 columns of the rank before it.

Forward: these columns travel while the local part is convolved as if nothing came before it; the first width - 1 outputs are
then computed again with the columns in front. Backward: the gradient of the columns comes from those first outputs alone, so it
is computed first and travels back while the rest is differentiated. Columns of another packed sequence count as zero.
"""

from __future__ import annotations

from typing import Any

import torch

from anymamba.distributed.handshake import check_agreement, refuse
from anymamba.distributed.ranks import Ranks, by_key
from anymamba.errors import ArgumentError
from anymamba.ops import causal_conv1d as local
from anymamba.ops._library import (
    backward_where_forward_ran,
    below_autograd,
    define,
    differentiated,
    placeholder,
    traced,
)

__all__ = ["causal_conv1d"]


def causal_conv1d(
    ranks: Ranks,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    return_final_states: bool,
    final_states_out: torch.Tensor | None,
    activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and the states after this rank's part; see `anymamba.ops.causal_conv1d_fn`."""
    try:
        local._check_forward(
            x, weight, bias, seq_idx, initial_states, return_final_states, final_states_out, activation
        )
    except ArgumentError as error:
        refuse(ranks, x, error)
        raise
    arguments = (ranks.key, x, weight, bias, seq_idx, initial_states, activation is not None, return_final_states)
    if traced(x):
        out, final_states, _, _ = torch.ops.anymamba.sharded_causal_conv1d(*arguments)
    elif differentiated(x, weight, bias, initial_states):
        out, final_states, _, _ = _ShardedCausalConv1d.apply(*arguments)
    else:
        out, final_states, _, _ = _forward(*arguments)
    return out, final_states


def _forward(
    key: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    silu: bool,
    return_final_states: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return out, final states, the columns before this part (width - 1), and which of them are of its first sequence."""
    ranks, columns = by_key(key), weight.shape[1] - 1
    check_agreement(
        ranks,
        "causal_conv1d_fn",
        x.shape[2],
        x,
        {"x": x, "weight": weight, "bias": bias, "seq_idx": seq_idx, "initial_states": initial_states},
        f"silu={silu}",
        {"x": 2, "seq_idx": 1},
        least=columns,
    )
    none = placeholder(x)
    if ranks.size == 1 or columns == 0:
        out, final = local._forward(x, weight, bias, seq_idx, initial_states, silu, return_final_states)
        return out, none if final is None else final, none, none
    tail = [x[..., -columns:]] if seq_idx is None else [x[..., -columns:], seq_idx[:, -columns:]]
    moving = ranks.shift(tail, forward=True)
    before = initial_states if ranks.first else None
    out, final = local._forward(x, weight, bias, seq_idx, before, silu, return_final_states)
    received = moving.wait()
    final = none if final is None else final
    if received is None:
        return out, final, none, none
    before, same = received[0], none
    if seq_idx is not None:
        same = (received[1] == seq_idx[:, :1]).to(x.dtype).unsqueeze(1)
        before = torch.where(same.bool(), before, torch.zeros_like(before))
    numbers = None if seq_idx is None else seq_idx[:, :columns]
    start, _ = local._forward(x[..., :columns], weight, bias, numbers, before, silu, False)
    out[..., :columns] = start
    return out, final, before, same


def _backward(
    key: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dout: torch.Tensor,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    before: torch.Tensor | None,
    same: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return dx, dweight, dbias, dinitial_states; the last is zero but on the first rank."""
    ranks, columns = by_key(key), weight.shape[1] - 1
    if ranks.size == 1 or columns == 0:
        return local._backward(x, weight, bias, dout, seq_idx, initial_states, dfinal_states, silu)
    if ranks.first:
        before = initial_states
        dbefore = x.new_zeros((x.shape[0], x.shape[1], columns))  # only its shape matters: nobody is sent it
    else:
        numbers = None if seq_idx is None else seq_idx[:, :columns]
        _, _, _, found = local._backward(
            x[..., :columns], weight, bias, dout[..., :columns], numbers, before, None, silu
        )
        assert found is not None
        dbefore = found.to(x.dtype) if same is None else found.to(x.dtype) * same
    moving = ranks.shift([dbefore], forward=False)
    dx, dweight, dbias, dinitial = local._backward(x, weight, bias, dout, seq_idx, before, dfinal_states, silu)
    received = moving.wait()
    if received is not None:
        dx[..., -columns:] += received[0]
    if initial_states is None:
        dinitial = None
    elif not ranks.first:
        dinitial = torch.zeros_like(initial_states)
    return dx, dweight, dbias, dinitial


def _given(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a saved tensor, None for a placeholder."""
    return tensor if tensor.dim() > 1 else None


@backward_where_forward_ran
class _ShardedCausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        key: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        seq_idx: torch.Tensor | None,
        initial_states: torch.Tensor | None,
        silu: bool,
        return_final_states: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        arguments = (key, x, weight, bias, seq_idx, initial_states, silu, return_final_states)
        if traced(x):
            with below_autograd():
                out, final_states, before, same = torch.ops.anymamba.sharded_causal_conv1d(*arguments)
        else:
            out, final_states, before, same = _forward(*arguments)
        ctx.mark_non_differentiable(before, same)
        ctx.save_for_backward(x, weight, bias, seq_idx, initial_states, before, same)
        ctx.key, ctx.silu, ctx.return_final_states = key, silu, return_final_states
        ctx.set_materialize_grads(False)
        return out, final_states, before, same

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dfinal_states: torch.Tensor | None, *_: Any) -> Any:
        x, weight, bias, seq_idx, initial_states, before, same = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(x)
        if not ctx.return_final_states:
            dfinal_states = None
        run = torch.ops.anymamba.sharded_causal_conv1d_backward if traced(x) else _backward
        dx, dweight, dbias, dinitial = run(
            ctx.key,
            x,
            weight,
            bias,
            dout,
            seq_idx,
            initial_states,
            _given(before),
            _given(same),
            dfinal_states,
            ctx.silu,
        )
        return (
            None,
            dx,
            dweight,
            None if bias is None else dbias,
            None,
            None if initial_states is None else dinitial,
            None,
            None,
        )


# --- torch.library: the same functions as opaque operators


def _forward_fake(
    key: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    silu: bool,
    return_final_states: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ranks, columns = by_key(key), weight.shape[1] - 1
    batch, dim = x.shape[0], x.shape[1]
    travels = not ranks.first and columns > 0
    return (
        torch.empty_like(x),
        x.new_empty((batch, dim, columns)) if return_final_states else placeholder(x),
        x.new_empty((batch, dim, columns)) if travels else placeholder(x),
        x.new_empty((batch, 1, columns)) if travels and seq_idx is not None else placeholder(x),
    )


def _backward_op(
    key: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dout: torch.Tensor,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    before: torch.Tensor | None,
    same: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dx, dweight, dbias, dinitial = _backward(
        key, x, weight, bias, dout, seq_idx, initial_states, before, same, dfinal_states, silu
    )
    return (
        dx,
        dweight,
        placeholder(weight) if dbias is None else dbias,
        placeholder(x) if dinitial is None else dinitial,
    )


def _backward_fake(
    key: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dout: torch.Tensor,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    before: torch.Tensor | None,
    same: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(x),
        torch.empty_like(weight),
        placeholder(weight) if bias is None else torch.empty_like(bias),
        placeholder(x) if initial_states is None else torch.empty_like(initial_states),
    )


define(
    "sharded_causal_conv1d(str key, Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, Tensor? initial_states, "
    "bool silu, bool return_final_states) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    autograd=_ShardedCausalConv1d.apply,
)
define(
    "sharded_causal_conv1d_backward(str key, Tensor x, Tensor weight, Tensor? bias, Tensor dout, Tensor? seq_idx, "
    "Tensor? initial_states, Tensor? before, Tensor? same, Tensor? dfinal_states, bool silu) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _backward_op,
    _backward_fake,
)
