"""Selective scan over a few steps: every step's states at once, with as few operations as there can be.

The blocks and segments of `selective_scan` cost 0.2 ms of Python before any arithmetic. A few steps of a decoding loop, or a
short prompt, are less work than that, and their states (batch, dim, steps, dstate) are as many numbers as the inputs of a
prompt of usual length. Real A only. Layout: (batch, groups, channels of a group, steps, dstate), as the caller's tensors are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from anymamba.ops.selective_scan import Gradients

__all__ = ["STEPS", "short_backward", "short_forward"]

STEPS = 8
"""At most so many: from there on the segments of the long scan, laid out for one step after the other, are as fast."""


class _States(NamedTuple):
    """What forward and backward both need; the channels are those of a group each."""

    u: torch.Tensor  # (batch, groups, channels, steps)
    raw: torch.Tensor  # before softplus
    dt: torch.Tensor
    B: torch.Tensor  # (batch, groups, 1, steps, dstate), or constant (groups, channels, 1, dstate)
    C: torch.Tensor
    A: torch.Tensor  # (groups, channels, 1, dstate)
    initial: torch.Tensor | None  # (batch, groups, channels, dstate)
    first: int  # the first step before which there is a state that decays: 0 with an initial state, else 1
    decay: torch.Tensor | None  # (batch, groups, channels, steps from `first` on, dstate); None if there are none
    states: torch.Tensor  # after each step


def short_forward(
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
    """Do what `selective_scan_forward` does."""
    s = _states(u, delta, A, B, C, delta_bias, delta_softplus, initial_state)
    y = _ungated(s, D)
    if z is not None:
        y.mul_(F.silu(_by_group(z, s.A)))
    y = y.flatten(1, 2)
    out = y if delta.dtype == y.dtype and delta.is_contiguous() else torch.empty_like(delta).copy_(y)
    last = s.states[..., -1, :].flatten(1, 2).clone(memory_format=torch.contiguous_format)
    checkpoints = None
    if save:
        entering = torch.zeros_like(last) if initial_state is None else initial_state.to(A.dtype)
        checkpoints = entering.unsqueeze(2)
    return out, last, checkpoints


def short_backward(
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
    dout: torch.Tensor,
    dlast_state: torch.Tensor | None,
    return_out: bool,
    dz_out: torch.Tensor | None,
    dB_out: torch.Tensor | None,
    dC_out: torch.Tensor | None,
) -> Gradients:
    """Do what `selective_scan_backward` does."""
    s = _states(u, delta, A, B, C, delta_bias, delta_softplus, initial_state)
    states, decay, steps = s.states, s.decay, u.shape[2]
    dy = _by_group(dout, s.A)
    y = _ungated(s, D) if z is not None or return_out else None
    dz = None
    if z is not None:
        assert y is not None
        gate = _by_group(z, s.A)
        dz = _like(z, torch.ops.aten.silu_backward(dy * y, gate), dz_out)
        silu = F.silu(gate)
        dy = dy * silu
        y = y.mul_(silu)
    wide_dy = dy.unsqueeze(-1)
    dstates = wide_dy * s.C
    dC = _reduced(wide_dy * states, C)
    if dlast_state is not None:
        dstates[..., -1, :] += dlast_state.to(A.dtype).view_as(dstates[..., -1, :])
    if decay is not None:
        gradients, decays = dstates.unbind(-2), decay.unbind(-2)
        for t in range(steps - 1, 0, -1):
            gradients[t - 1].addcmul_(gradients[t], decays[t - s.first])
    dtu = (s.dt * s.u).unsqueeze(-1)
    dB = _reduced(dstates * dtu, B)
    ddtu = (dstates * s.B).sum(-1)
    ddt = ddtu * s.u
    dA, dinitial = None, None
    if decay is not None:
        through = decay.mul_(dstates[..., s.first :, :])  # the gradient of the state before each step
        dinitial = None if initial_state is None else _like(initial_state, through[..., 0, :].clone())
        # The gradient of delta * A at each step: `through` times the state before it.
        if s.initial is not None:
            through[..., 0, :].mul_(s.initial)
        through[..., 1 - s.first :, :].mul_(states[..., :-1, :])
        ddt[..., s.first :].add_((through * s.A).sum(-1))
        dA = through.mul_(s.dt[..., s.first :].unsqueeze(-1)).sum((0, 3))
    du = ddtu.mul_(s.dt)
    dD = None
    if D is not None:
        du.addcmul_(dy, D.to(A.dtype).view(*s.A.shape[:2], 1))
        dD = _like(D, (dy * s.u).sum((0, 3)))
    if delta_softplus:
        ddt.mul_(torch.sigmoid(s.raw))
    return (
        _like(u, du),
        _like(delta, ddt),
        torch.zeros_like(A) if dA is None else _like(A, dA),
        _like(B, dB, dB_out),
        _like(C, dC, dC_out),
        dD,
        dz,
        None if delta_bias is None else _like(delta_bias, ddt.sum((0, 3))),
        dinitial,
        _like(delta, y) if return_out and y is not None else None,
    )


def _states(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    initial_state: torch.Tensor | None,
) -> _States:
    groups = B.shape[1] if B.dim() == 4 else C.shape[1] if C.dim() == 4 else 1
    rates = A.reshape(groups, A.shape[0] // groups, 1, A.shape[1])
    inputs, raw = _by_group(u, rates), _by_group(delta, rates)
    if delta_bias is not None:
        raw = raw + delta_bias.to(A.dtype).view(*rates.shape[:2], 1)
    dt = F.softplus(raw) if delta_softplus else raw
    wide_B = _matrix(B, rates)
    states = (dt * inputs).unsqueeze(-1) * wide_B
    initial = decay = None
    if initial_state is not None:
        initial = initial_state.to(A.dtype).view(-1, groups, rates.shape[1], A.shape[1])
    first = 1 if initial is None else 0
    if u.shape[2] > first:
        decay = (dt[..., first:].unsqueeze(-1) * rates).exp_()
        columns = states.unbind(-2)
        state = columns[0] if initial is None else initial
        for a, x in zip(decay.unbind(-2), columns[first:]):
            state = x.addcmul_(a, state)
    return _States(inputs, raw, dt, wide_B, _matrix(C, rates), rates, initial, first, decay, states)


def _ungated(s: _States, D: torch.Tensor | None) -> torch.Tensor:
    """Return the sum of C times the states, and D u: the output before its gate."""
    y = (s.states * s.C).sum(-1)
    return y if D is None else y.addcmul_(s.u, D.to(y.dtype).view(*s.A.shape[:2], 1))


def _by_group(tensor: torch.Tensor, rates: torch.Tensor) -> torch.Tensor:
    """View (batch, dim, steps) as (batch, groups, channels, steps), in the compute dtype."""
    tensor = tensor if tensor.dtype == rates.dtype else tensor.to(rates.dtype)
    batch, _, steps = tensor.shape
    return tensor.view(batch, rates.shape[0], rates.shape[1], steps)  # splits one dimension: any strides will do


def _matrix(matrix: torch.Tensor, rates: torch.Tensor) -> torch.Tensor:
    """View B or C (batch, groups, dstate, steps), or a constant one (dim, dstate), so that it multiplies states."""
    if matrix.dtype != rates.dtype:
        matrix = matrix.to(rates.dtype)
    if matrix.dim() == 2:
        return matrix.reshape(rates.shape)
    return matrix.transpose(2, 3).contiguous().unsqueeze(2)  # small, and read once a channel


def _reduced(products: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Sum (batch, groups, channels, steps, dstate) over what B or C is shared by, in its shape."""
    return products.sum((0, 3)) if matrix.dim() == 2 else products.sum(2).transpose(2, 3)


def _like(tensor: torch.Tensor, gradient: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
    """Return the gradient in its tensor's shape, dtype and layout, or in the memory given for it."""
    gradient = gradient.reshape(tensor.shape)
    if given is None and gradient.dtype == tensor.dtype and gradient.is_contiguous() and tensor.is_contiguous():
        return gradient
    return (torch.empty_like(tensor) if given is None else given).copy_(gradient)
