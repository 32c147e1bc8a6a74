"""The state-space dual scan over a sharded sequence: states first, then one scan with the state that enters each rank.

Forward: what this part adds to a state is a matrix product (`ssd_states`); the parts of all ranks are combined (`states`), and
one scan with the right entering state gives the outputs. Backward: the gradient of the entering state is another matrix
product; combined from the end they give the gradient of each rank's last state, with which one backward gives everything.

What travels: (batch, nheads, headdim, dstate), a logarithm a head, and the numbers of the first and last packed sequence.
"""

from __future__ import annotations

from typing import Any

import torch

from anymamba.distributed.handshake import check_agreement, refuse
from anymamba.distributed.ranks import Ranks, by_key
from anymamba.distributed.ssd_states import Steps, gradient_of_entering, part_gain, time_steps
from anymamba.distributed.states import Part, entering
from anymamba.errors import ArgumentError
from anymamba.ops import ssd as local
from anymamba.ops._library import (
    backward_where_forward_ran,
    below_autograd,
    define,
    differentiated,
    placeholder,
    traced,
)

__all__ = ["ssd"]


def ssd(
    ranks: Ranks,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    return_final_states: bool,
    return_varlen_states: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return out, final states, varlen states of this rank's part; see `anymamba.ops.mamba_chunk_scan_combined`."""
    try:
        local._check(
            x,
            dt,
            A,
            B,
            C,
            chunk_size,
            D,
            z,
            dt_bias,
            initial_states,
            seq_idx,
            cu_seqlens,
            dt_limit,
            return_varlen_states,
        )
    except ArgumentError as error:
        refuse(ranks, x, error)
        raise
    arguments = (
        ranks.key, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx,
        cu_seqlens if return_varlen_states else None,
        bool(dt_softplus), float(dt_limit[0]), float(dt_limit[1]), bool(return_final_states),
    )  # fmt: skip
    if traced(x):
        out, final, varlen, *_ = torch.ops.anymamba.sharded_ssd(*arguments)
    elif differentiated(x, dt, A, B, C, D, z, dt_bias, initial_states):
        out, final, varlen, *_ = _ShardedSsd.apply(*arguments)
    else:
        out, final, varlen, *_ = _forward(*arguments)
    return out, final, varlen


def _factor(logarithms: torch.Tensor) -> torch.Tensor:
    return torch.exp(logarithms)[..., None, None]


def _part(gain: torch.Tensor, steps: Steps, seq_idx: torch.Tensor | None, *, backward: bool = False) -> Part:
    if seq_idx is None:
        return Part(gain, steps.decay())
    ends = (seq_idx[:, 0], seq_idx[:, -1])
    first, last = reversed(ends) if backward else ends
    return Part(gain, steps.decay(), first, last)


def _own_sequences(ranks: Ranks, cu_seqlens: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bounds of the sequences within this part, and which of them (sequences) end in it."""
    mine = torch.full((1,), length, dtype=torch.int64, device=cu_seqlens.device)
    before = sum(ranks.gather(mine).wait()[: ranks.rank], torch.zeros_like(mine))
    bounds = cu_seqlens - before.to(cu_seqlens.dtype)
    ends = (bounds[1:] > 0) & (bounds[1:] <= length)
    return bounds.clamp(0, length), ends


def _forward(
    key: str,
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return out, final states, varlen states, the states that entered, bounds and ends of this part's sequences."""
    ranks = by_key(key)
    check_agreement(
        ranks,
        "mamba_chunk_scan_combined",
        x.shape[1],
        x,
        {
            "x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias,
            "initial_states": initial_states, "seq_idx": seq_idx, "cu_seqlens": cu_seqlens,
        },
        f"dt_softplus={dt_softplus} dt_limit={dt_min, dt_max}",
        dict.fromkeys(("x", "dt", "B", "C", "z", "seq_idx"), 1),
    )  # fmt: skip
    none = placeholder(A)
    own: tuple[torch.Tensor, torch.Tensor] | None = None
    if cu_seqlens is not None and ranks.size > 1:
        own = _own_sequences(ranks, cu_seqlens, x.shape[1])
        cu_seqlens = own[0]
    state, moving = initial_states if ranks.first else None, None
    if ranks.size > 1:
        steps = time_steps(x, dt, A, B, C, dt_bias, seq_idx, dt_softplus, dt_min, dt_max)
        if ranks.last:
            gain = steps.dt.new_zeros((x.shape[0], *x.shape[2:], B.shape[3]))
        else:
            gain = part_gain(steps, x, B)
            if state is not None:
                gain = torch.addcmul(gain, _factor(steps.decay()), state.to(gain.dtype))
        moving = entering(ranks, _part(gain, steps, seq_idx), _factor)
        del steps, gain
        if not ranks.first:
            state = moving.wait()
    out, final, varlen = local._forward(
        x, dt, A, B, C, D, z, dt_bias, state, seq_idx, cu_seqlens, dt_softplus, dt_min, dt_max, return_final_states
    )
    if moving is not None and ranks.first:
        moving.wait()  # it had nothing to wait for; what it sends has had the time of the scan
    if varlen is not None and own is not None:
        varlen = varlen * own[1].to(varlen.dtype).view(-1, 1, 1, 1)
    return (
        out,
        placeholder(x) if final is None else final,
        placeholder(C) if varlen is None else varlen,
        none if ranks.first or state is None else state,
        *((none.long(), none.bool()) if own is None else own),
    )


def _backward(
    key: str,
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
    entered: torch.Tensor | None,
    bounds: torch.Tensor | None,
    ends: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Return dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_states; the last is zero but on the first rank."""
    ranks = by_key(key)
    state = initial_states if ranks.first else entered
    if ranks.size > 1:
        if bounds is not None and ends is not None:
            cu_seqlens = bounds
            if dvarlen_states is not None:
                dvarlen_states = dvarlen_states * ends.to(dvarlen_states.dtype).view(-1, 1, 1, 1)
        steps = time_steps(x, dt, A, B, C, dt_bias, seq_idx, dt_softplus, dt_min, dt_max)
        dstate = steps.dt.new_zeros((x.shape[0], *x.shape[2:], B.shape[3]))
        if not ranks.first:
            dstate = gradient_of_entering(steps, dout, z, C, dfinal_states, dvarlen_states, cu_seqlens, dstate)
        from_next = entering(ranks, _part(dstate, steps, seq_idx, backward=True), _factor, backward=True).wait()
        del steps, dstate
        if from_next is not None:
            dfinal_states = from_next if dfinal_states is None else dfinal_states + from_next
    found = local._backward(
        dout, dfinal_states, dvarlen_states, x, dt, A, B, C, D, z, dt_bias, state, seq_idx, cu_seqlens,
        dt_softplus, dt_min, dt_max,
    )[:-1]  # fmt: skip
    if ranks.first:
        return found
    return *found[:8], None if initial_states is None else torch.zeros_like(initial_states)


@backward_where_forward_ran
class _ShardedSsd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: str, *arguments: Any) -> Any:
        x, tensors, options = arguments[0], arguments[:11], arguments[11:]
        if traced(x):
            with below_autograd():
                results = torch.ops.anymamba.sharded_ssd(key, *arguments)
        else:
            results = _forward(key, *arguments)
        out, final, varlen, entered, bounds, ends = results
        ctx.mark_non_differentiable(entered, bounds, ends)
        ctx.save_for_backward(*tensors, entered, bounds, ends)
        ctx.key, ctx.options = key, options
        ctx.set_materialize_grads(False)
        return out, final, varlen, entered, bounds, ends

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, dout: torch.Tensor | None, dfinal: torch.Tensor | None, dvarlen: torch.Tensor | None, *_: Any
    ) -> Any:
        *tensors, entered, bounds, ends = ctx.saved_tensors
        x, D, z, dt_bias, initial_states, cu_seqlens = (tensors[i] for i in (0, 5, 6, 7, 8, 10))
        dt_softplus, dt_min, dt_max, return_final_states = ctx.options
        dfinal = dfinal if return_final_states else None
        dvarlen = dvarlen if cu_seqlens is not None else None
        run: Any = torch.ops.anymamba.sharded_ssd_backward if traced(x) else _backward
        found = run(
            ctx.key, dout, dfinal, dvarlen, *tensors, dt_softplus, dt_min, dt_max,
            entered if entered.dim() > 1 else None,
            bounds if cu_seqlens is not None else None,
            ends if cu_seqlens is not None else None,
        )  # fmt: skip
        optional = (D, z, dt_bias, initial_states)
        return (
            None,
            *found[:5],
            *(None if tensor is None else gradient for tensor, gradient in zip(optional, found[5:])),
            *(None,) * 6,
        )


# --- torch.library: the same functions as opaque operators


def _forward_fake(
    key: str,
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
) -> tuple[torch.Tensor, ...]:
    ranks = by_key(key)
    none = placeholder(A)
    compute = local.ssd_compute_dtype(x, dt, A, B, C)
    travels = cu_seqlens is not None and ranks.size > 1
    return (
        *local._forward_fake(
            x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens,
            dt_softplus, dt_min, dt_max, return_final_states,
        ),
        none if ranks.first else x.new_empty((x.shape[0], *x.shape[2:], B.shape[3]), dtype=compute),
        torch.empty_like(cu_seqlens) if travels and cu_seqlens is not None else none.long(),
        cu_seqlens.new_empty((cu_seqlens.shape[0] - 1,), dtype=torch.bool)
        if travels and cu_seqlens is not None
        else none.bool(),
    )  # fmt: skip


def _backward_op(key: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
    A = arguments[5]
    return tuple(placeholder(A) if gradient is None else gradient for gradient in _every(key, *arguments))


def _backward_fake(key: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
    inputs = arguments[3:12]
    return tuple(placeholder(inputs[2]) if tensor is None else torch.empty_like(tensor) for tensor in inputs)


_every: Any = _backward


define(
    f"sharded_ssd(str key, {local._INPUTS}, bool return_final_states) -> ({', '.join(['Tensor'] * 6)})",
    _forward,
    _forward_fake,
    autograd=_ShardedSsd.apply,
)
define(
    f"sharded_ssd_backward(str key, Tensor? dout, Tensor? dfinal_states, Tensor? dvarlen_states, {local._INPUTS}, "
    f"Tensor? entered, Tensor? bounds, Tensor? ends) -> ({', '.join(['Tensor'] * 9)})",
    _backward_op,
    _backward_fake,
)
