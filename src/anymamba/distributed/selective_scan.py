"""The selective scan over a sharded sequence: exact, by scanning with the state that enters each rank.

Forward: a rank between the ends scans from a zero state first, only for the state it ends in; the states are combined
(`states`); then it scans with the one that enters it. The first rank knows its own and the last one's state nobody needs, so
these two scan once. Backward the same from the end: a rank between the ends differentiates once for the gradient of its
entering state, and again with that of its last state. (Correcting a scan from a zero state instead, y += C * decay * h0,
takes an exponential per channel, state and step like the scan itself, rounds twice, and stores y a second time.)

What travels: (batch, dim, dstate) and the sum of the time steps (batch, dim); A is the same on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from anymamba.distributed.handshake import check_agreement, refuse
from anymamba.distributed.ranks import Ranks, by_key
from anymamba.distributed.states import Part, entering
from anymamba.errors import ArgumentError
from anymamba.ops import selective_scan as local
from anymamba.ops._checks import cast
from anymamba.ops._library import (
    backward_where_forward_ran,
    below_autograd,
    define,
    differentiated,
    placeholder,
    traced,
)

__all__ = ["selective_scan"]

BLOCK = 4096
"""Columns whose time steps are summed at once: bounds the temporary memory."""


def selective_scan(
    ranks: Ranks,
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and the state after this rank's part; see `anymamba.ops.selective_scan_fn`."""
    try:
        local._check(u, delta, A, B, C, D, z, delta_bias, initial_state)
    except ArgumentError as error:
        refuse(ranks, u, error)
        raise
    inputs = local._normalised(u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state)
    wanted = differentiated(*(value for value in inputs if isinstance(value, torch.Tensor)))
    if traced(u):
        out, last_state, *_ = torch.ops.anymamba.sharded_selective_scan(ranks.key, *inputs, wanted)
    elif wanted:
        out, last_state, *_ = _ShardedSelectiveScan.apply(ranks.key, *inputs, True)
    else:
        out, last_state, *_ = _forward(*(ranks.key, *inputs, False))
    return cast(out, u.dtype), last_state


def _part(gain: torch.Tensor, delta: torch.Tensor, delta_bias: torch.Tensor | None, softplus: bool) -> Part:
    """Return what a part of the sequence does to a state: the gain, and the sum of its time steps (batch, dim)."""
    real = local.real_dtype(gain.dtype)
    total = gain.new_zeros(delta.shape[:2], dtype=real)
    for start in range(0, delta.shape[2], BLOCK):
        steps = delta[..., start : start + BLOCK].to(real)
        if delta_bias is not None:
            steps = steps + delta_bias.unsqueeze(-1)
        total += (F.softplus(steps) if softplus else steps).sum(-1)
    return Part(gain, total)


def _forward(
    key: str,
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return out, last state, the scan's checkpoints, the state that entered."""
    ranks = by_key(key)
    check_agreement(
        ranks,
        "selective_scan_fn",
        u.shape[2],
        u,
        {
            "u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias,
            "initial_state": initial_state,
        },
        f"delta_softplus={delta_softplus} backward={save}",
        {"u": 2, "delta": 2, "z": 2} | {name: -1 for name, matrix in (("B", B), ("C", C)) if matrix.dim() == 4},
    )  # fmt: skip

    def scan(state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out, last_state, checkpoints = local._forward(u, delta, A, B, C, D, z, delta_bias, delta_softplus, state, save)
        return out, last_state, placeholder(A) if checkpoints is None else checkpoints

    if ranks.size == 1:
        return *scan(initial_state), placeholder(A)
    found = None
    if ranks.first:
        found = scan(initial_state)
        gain = found[1]
    elif ranks.last:
        gain = A.new_zeros((u.shape[0], *A.shape))
    else:
        _, gain, _ = local._forward(u, delta, A, B, C, None, None, delta_bias, delta_softplus, None, False)
    moving = entering(ranks, _part(gain, delta, delta_bias, delta_softplus), lambda sums: _decay(sums, A))
    state = moving.wait()
    if found is not None:
        return *found, placeholder(A)
    return *scan(state), state


def _decay(sums: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    return torch.exp(sums.unsqueeze(-1) * A)


def _backward(
    key: str,
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
    entered: torch.Tensor | None,
    checkpoints: torch.Tensor | None,
    dout: torch.Tensor,
    dlast_state: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Return du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial_state; the last is zero but on the first rank."""
    ranks = by_key(key)
    state = initial_state if ranks.first else entered

    def differentiate(dlast: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return local._backward(
            u, delta, A, B, C, D, z, delta_bias, delta_softplus, state, checkpoints, dout, dlast
        )[:-1]  # fmt: skip

    if ranks.size == 1:
        return differentiate(dlast_state)
    found: tuple[torch.Tensor | None, ...] | None = None
    if ranks.first:
        dstate: torch.Tensor | None = A.new_zeros((u.shape[0], *A.shape))
    else:
        found = differentiate(dlast_state)
        dstate = found[8]
        if not ranks.last:
            found = None  # frees its memory before the second time
    assert dstate is not None
    conjugate = A.conj_physical()
    moving = entering(
        ranks, _part(dstate, delta, delta_bias, delta_softplus), lambda sums: _decay(sums, conjugate), backward=True
    )
    from_next = moving.wait()
    if found is None:
        found = differentiate(from_next if dlast_state is None else from_next + dlast_state)
    if initial_state is None:
        return *found[:8], None
    return found if ranks.first else (*found[:8], torch.zeros_like(initial_state))


@backward_where_forward_ran
class _ShardedSelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        key: str,
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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        inputs = (key, u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state)
        if traced(u):
            with below_autograd():
                out, last_state, checkpoints, entered = torch.ops.anymamba.sharded_selective_scan(*inputs, True)
        else:
            out, last_state, checkpoints, entered = _forward(*inputs, True)
        ctx.mark_non_differentiable(checkpoints, entered)
        ctx.save_for_backward(u, delta, A, B, C, D, z, delta_bias, initial_state, checkpoints, entered)
        ctx.key, ctx.delta_softplus = key, delta_softplus
        ctx.set_materialize_grads(False)
        return out, last_state, checkpoints, entered

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlast_state: torch.Tensor | None, *_: Any) -> Any:
        u, delta, A, B, C, D, z, delta_bias, initial_state, checkpoints, entered = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(u)
        run = torch.ops.anymamba.sharded_selective_scan_backward if traced(u) else _backward
        found = run(
            ctx.key, u, delta, A, B, C, D, z, delta_bias, ctx.delta_softplus, initial_state,
            entered if entered.dim() > 1 else None,
            checkpoints if checkpoints.dim() > 1 else None, dout, dlast_state,
        )  # fmt: skip
        optional = (D, z, delta_bias)
        return (
            None,
            *found[:5],
            *(None if tensor is None else gradient for tensor, gradient in zip(optional, found[5:8])),
            None,
            None if initial_state is None else found[8],
            None,
        )


# --- torch.library: the same functions as opaque operators


def _forward_fake(
    key: str,
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    out, last_state, checkpoints = local._forward_fake(
        u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, save
    )
    entered = placeholder(A) if by_key(key).first else A.new_empty((u.shape[0], *A.shape))
    return out, last_state, checkpoints, entered


def _backward_op(key: str, u: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    return local._or_placeholders(u, _backward(key, u, *rest))


def _backward_fake(
    key: str,
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
    entered: torch.Tensor | None,
    checkpoints: torch.Tensor | None,
    dout: torch.Tensor,
    dlast_state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    return local._backward_fake(
        u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, checkpoints, dout, dlast_state
    )


define(
    f"sharded_selective_scan(str key, {local._INPUTS}, bool save) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    autograd=_ShardedSelectiveScan.apply,
)
define(
    f"sharded_selective_scan_backward(str key, {local._INPUTS}, Tensor? entered, Tensor? checkpoints, Tensor dout, "
    "Tensor? dlast_state) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_op,
    _backward_fake,
)
