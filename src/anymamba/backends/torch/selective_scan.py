"""Selective scan over bounded segments of time: everything but the recurrence itself is one operation per segment.

A segment holds (steps, rows, groups, channels of a group, dstate) numbers, time first, so that a step is contiguous. The
recurrence is one fused multiply-add per step, written over its own input. Where a step is too small to fill the device
(GPUs), many pieces of the sequence stand side by side as rows: one pass from zero states finds what each piece adds, the
states are passed from piece to piece, and a second pass has the right ones. Only sums of delta * A are exponentiated,
never their negatives, so strong decay underflows to zero and nothing overflows.

The backward keeps one state per CHECKPOINT_LENGTH steps from the forward and computes the others again, segment by
segment from the end. Everything between is fp32 (fp64 for fp64). The gradient of a complex number is, as PyTorch has it,
dL/d(re) + i dL/d(im). Conjugates are computed, not marked (`conj_physical`): the first call of a compiled graph runs us with
the dispatch key excluded that would resolve the mark.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from anymamba.ops.selective_scan import CHECKPOINT_LENGTH, Gradients, real_dtype

__all__ = ["selective_scan_backward", "selective_scan_forward"]

# Numbers in a segment. CPU: a few buffers of it stay in the second-level cache of a core or two.
CPU_SEGMENT = 2**19
DEVICE_SEGMENT = 2**26
# Numbers a step should have to keep a GPU busy for longer than a launch takes.
DEVICE_STEP = 2**20


class _Segment(NamedTuple):
    start: int
    pieces: int  # side by side; 1: in sequence
    steps: int  # of each piece


class _Scan(NamedTuple):
    """A scan's inputs as the segments below read them."""

    u: torch.Tensor
    delta: torch.Tensor
    A: torch.Tensor  # (groups, channels of a group, dstate)
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None  # (groups, channels)
    z: torch.Tensor | None
    delta_bias: torch.Tensor | None  # (groups, channels)
    softplus: bool

    @property
    def real(self) -> torch.dtype:
        return real_dtype(self.A.dtype)

    def rows(self, tensor: torch.Tensor, segment: _Segment) -> torch.Tensor:
        """Return the segment of a (batch, dim, seqlen) tensor as (steps, rows, groups, channels), contiguous."""
        view: torch.Tensor = self.view(tensor, segment)
        return view.to(self.real, memory_format=torch.contiguous_format).flatten(1, 2)

    def view(self, tensor: torch.Tensor, segment: _Segment) -> torch.Tensor:
        """Return the segment of a (batch, dim, seqlen) tensor as a view (steps, pieces, batch, groups, channels)."""
        start, pieces, steps = segment
        columns = tensor[..., start : start + pieces * steps].unflatten(-1, (pieces, steps))
        view: torch.Tensor = columns.unflatten(1, self.A.shape[:2]).permute(4, 3, 0, 1, 2)
        return view

    def matrix(self, matrix: torch.Tensor, segment: _Segment) -> torch.Tensor:
        """Return B or C of the segment, to be multiplied with (steps, rows, groups, channels, dstate)."""
        if matrix.dim() == 2:
            return matrix.view(self.A.shape)
        view = self.matrix_view(matrix, segment).to(self.real, memory_format=torch.contiguous_format).flatten(1, 2)
        return (torch.view_as_complex(view) if self.A.is_complex() else view).unsqueeze(3)

    def matrix_view(self, matrix: torch.Tensor, segment: _Segment) -> torch.Tensor:
        """Return the segment of a variable B or C as a view (steps, pieces, batch, groups, dstate[, 2])."""
        start, pieces, steps = segment
        columns: torch.Tensor
        if self.A.is_complex():
            columns = matrix[..., 2 * start : 2 * (start + pieces * steps)].unflatten(-1, (pieces, steps, 2))
            return columns.permute(4, 3, 0, 1, 2, 5)
        columns = matrix[..., start : start + pieces * steps].unflatten(-1, (pieces, steps))
        return columns.permute(4, 3, 0, 1, 2)

    def time_step(self, segment: _Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """Return delta before and after softplus."""
        raw = self.rows(self.delta, segment)
        if self.delta_bias is not None:
            raw = raw + self.delta_bias
        return raw, F.softplus(raw) if self.softplus else raw


def selective_scan_forward(
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
    """See `anymamba.ops.selective_scan.SelectiveScanBackend`."""
    batch, dim, seqlen = u.shape
    dstate = A.shape[1]
    scan = _scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus)
    out = torch.empty_like(delta)
    state = A.new_zeros(batch, dim, dstate)
    if initial_state is not None:
        state.copy_(initial_state)
    checkpoints = None
    if save:
        checkpoints = A.new_empty(batch, dim, (seqlen + CHECKPOINT_LENGTH - 1) // CHECKPOINT_LENGTH, dstate)
    state = state.view(batch, *scan.A.shape)
    with _full_precision(u):
        for block, steps in _blocks(u, A):
            if checkpoints is not None and block.pieces == 1:
                checkpoints[:, :, block.start // CHECKPOINT_LENGTH] = state.flatten(1, 2)
            for segment in _split(block, steps):
                inputs = scan.rows(u, segment)
                _, dt = scan.time_step(segment)
                decay = torch.mul(dt.unsqueeze(-1), scan.A).exp_()
                states = (dt * inputs).unsqueeze(-1) * scan.matrix(B, segment)
                entering, state = _recur(decay, states, dt, scan.A, state, segment)
                if checkpoints is not None and block.pieces > 1:
                    first = block.start // CHECKPOINT_LENGTH
                    kept = checkpoints[:, :, first : first + block.pieces].unflatten(1, scan.A.shape[:2])
                    kept.copy_(entering.unflatten(0, (block.pieces, batch)).permute(1, 2, 3, 0, 4))
                y = _contract(states, scan.matrix(C, segment), real=scan.real)
                if scan.D is not None:
                    y.addcmul_(inputs, scan.D)
                if z is not None:
                    y.mul_(F.silu(scan.rows(z, segment)))
                _write(scan.view(out, segment), y)
    return out, state.flatten(1, 2).clone(memory_format=torch.contiguous_format), checkpoints


def selective_scan_backward(
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
    checkpoints: torch.Tensor | None,
    dout: torch.Tensor,
    dlast_state: torch.Tensor | None,
    *,
    return_out: bool = False,
    dz_out: torch.Tensor | None = None,
) -> Gradients:
    """See `anymamba.ops.selective_scan.SelectiveScanBackend`."""
    if checkpoints is None:
        _, _, checkpoints = selective_scan_forward(
            u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, save=True
        )
        assert checkpoints is not None
    batch, dim, _ = u.shape
    scan = _scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus)
    grads = _GradientBuffers(
        du=torch.empty_like(u),
        ddelta=torch.empty_like(delta),
        dA=torch.zeros_like(scan.A),
        dB=torch.empty_like(B) if B.dim() == 4 else torch.zeros_like(scan.A),
        dC=torch.empty_like(C) if C.dim() == 4 else torch.zeros_like(scan.A),
        dD=None if scan.D is None else torch.zeros_like(scan.D),
        dz=dz_out if dz_out is not None else None if z is None else torch.empty_like(z),
        ddelta_bias=None if scan.delta_bias is None else torch.zeros_like(scan.delta_bias),
        out=torch.empty_like(delta) if return_out else None,
    )
    carry = A.new_zeros(batch, dim, A.shape[1])  # the gradient of the state that leaves the segment
    if dlast_state is not None:
        carry.copy_(dlast_state)
    carry = carry.view(batch, *scan.A.shape)
    with _full_precision(u):
        for block, steps in reversed(_blocks(u, A)):
            first = block.start // CHECKPOINT_LENGTH
            kept = checkpoints[:, :, first : first + block.pieces].unflatten(1, scan.A.shape[:2])
            entering = kept.permute(3, 0, 1, 2, 4).contiguous().flatten(0, 1)
            segments = _split(block, steps)
            states = [entering]
            for segment in segments[:-1]:  # finer checkpoints, where a piece is several segments
                _, dt = scan.time_step(segment)
                decay = torch.mul(dt.unsqueeze(-1), scan.A).exp_()
                inner = (dt * scan.rows(u, segment)).unsqueeze(-1) * scan.matrix(B, segment)
                states.append(_loop(decay, inner, states[-1]).clone())
            for segment in reversed(segments):
                carry = _segment_backward(scan, grads, segment, states.pop(), carry, dout)
    return (
        grads.du,
        grads.ddelta,
        torch.empty_like(A).copy_(grads.dA.view(A.shape)),
        grads.dB if B.dim() == 4 else torch.empty_like(B).copy_(grads.dB.view(B.shape)),
        grads.dC if C.dim() == 4 else torch.empty_like(C).copy_(grads.dC.view(C.shape)),
        None if D is None or grads.dD is None else torch.empty_like(D).copy_(grads.dD.view(D.shape)),
        grads.dz,
        None
        if delta_bias is None or grads.ddelta_bias is None
        else torch.empty_like(delta_bias).copy_(grads.ddelta_bias.view(delta_bias.shape)),
        None if initial_state is None else torch.empty_like(initial_state).copy_(carry.flatten(1, 2)),
        grads.out,
    )


class _GradientBuffers(NamedTuple):
    """Where segments write (du, ddelta, variable dB and dC, dz, out) or add (the rest)."""

    du: torch.Tensor
    ddelta: torch.Tensor
    dA: torch.Tensor
    dB: torch.Tensor
    dC: torch.Tensor
    dD: torch.Tensor | None
    dz: torch.Tensor | None
    ddelta_bias: torch.Tensor | None
    out: torch.Tensor | None


def _segment_backward(
    scan: _Scan,
    grads: _GradientBuffers,
    segment: _Segment,
    entering: torch.Tensor,
    carry: torch.Tensor,
    dout: torch.Tensor,
) -> torch.Tensor:
    """Add one segment's share to `grads`; return the gradient of the state entering its first piece."""
    twice = 2 if scan.A.is_complex() else 1
    inputs = scan.rows(scan.u, segment)
    raw, dt = scan.time_step(segment)
    B, C = scan.matrix(scan.B, segment), scan.matrix(scan.C, segment)
    decay = torch.mul(dt.unsqueeze(-1), scan.A).exp_()
    dtu = dt * inputs
    states = dtu.unsqueeze(-1) * B
    _loop(decay, states, entering)
    dy = scan.rows(dout, segment)
    if scan.z is not None or grads.out is not None:
        y = _contract(states, C, real=scan.real)
        if scan.D is not None:
            y.addcmul_(inputs, scan.D)
        if scan.z is not None:
            z = scan.rows(scan.z, segment)
            gate = torch.sigmoid(z)
            assert grads.dz is not None
            _write(scan.view(grads.dz, segment), dy * y * gate * (1 + z * (1 - gate)))
            gate.mul_(z)
            dy = dy * gate
            y.mul_(gate)
        if grads.out is not None:
            _write(scan.view(grads.out, segment), y)
    dstates = (twice * dy).unsqueeze(-1) * C.conj_physical()
    carry = _recur_back(decay, dstates, dt, scan.A, carry, segment)

    _add_matrix_gradient(scan, grads.dC, segment, states, dy, scale=twice, conjugate=True)
    _add_matrix_gradient(scan, grads.dB, segment, dstates, dtu, scale=1, conjugate=False)
    ddtu = _contract(dstates, B.conj_physical(), real=scan.real, twice=False)

    # The gradient of delta * A at each step: dstates * conj(decay * state before).
    decay[0].mul_(entering)
    decay[1:].mul_(states[:-1])
    ddecay = decay.conj_physical_().mul_(dstates)
    ddt = torch.mul(ddecay, scan.A.conj_physical(), out=states).sum(-1)  # the states are not needed any more
    ddt = ddt.real if ddt.is_complex() else ddt
    grads.dA.add_(ddecay.mul_(dt.unsqueeze(-1)).flatten(0, 1).sum(0))

    ddt = torch.addcmul(ddt, ddtu, inputs)
    du = ddtu.mul_(dt)
    if scan.D is not None:
        assert grads.dD is not None
        du.addcmul_(dy, scan.D)
        grads.dD.add_((dy * inputs).sum((0, 1)))
    if scan.softplus:
        ddt.mul_(torch.sigmoid(raw))
    if grads.ddelta_bias is not None:
        grads.ddelta_bias.add_(ddt.sum((0, 1)))
    _write(scan.view(grads.du, segment), du)
    _write(scan.view(grads.ddelta, segment), ddt)
    return carry


def _add_matrix_gradient(
    scan: _Scan,
    gradient: torch.Tensor,
    segment: _Segment,
    states: torch.Tensor,
    weight: torch.Tensor,
    *,
    scale: int,
    conjugate: bool,
) -> None:
    """Write (variable) or add (constant) ``scale * sum(weight * states)``: the gradient of B or C."""
    if gradient.dim() == 3:
        total = (weight.unsqueeze(-1) * states).flatten(0, 1).sum(0).mul_(scale)
        gradient.add_(total.conj_physical_() if conjugate else total)
        return
    if states.device.type == "cpu" and not states.is_complex():
        total = torch.matmul(weight.unsqueeze(-2), states).squeeze(-2)
    else:
        total = (weight.unsqueeze(-1) * states).sum(3)
    if states.is_complex():
        total = torch.view_as_real(total.mul_(scale).conj_physical_() if conjugate else total)
    target = scan.matrix_view(gradient, segment)
    target.copy_(total.unflatten(1, target.shape[1:3]))


def _contract(states: torch.Tensor, matrix: torch.Tensor, *, real: torch.dtype, twice: bool = True) -> torch.Tensor:
    """Return the real part of ``sum(states * matrix)`` over dstate; of complex states twice that, as the model has it."""
    if states.is_complex():
        total = (states * matrix).sum(-1).real
        return 2 * total if twice else total.contiguous()
    # matmul beats a product and a sum on CPU, but elsewhere may round to TF32.
    if states.device.type == "cpu" and matrix.dim() == 5:
        return torch.matmul(states, matrix.transpose(-1, -2)).squeeze(-1)
    return (states * matrix).sum(-1)


def _loop(decay: torch.Tensor, states: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Turn `states` from each step's input into the state after it, in place; return the last."""
    for a, x in zip(decay.unbind(0), states.unbind(0)):
        state = x.addcmul_(a, state)
    return state


def _recur(
    decay: torch.Tensor,
    states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    state: torch.Tensor,
    segment: _Segment,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence over the segment; return the state entering each piece (rows), and the one after the last."""
    if segment.pieces == 1:
        return state, _loop(decay, states, state)
    steps = list(zip(decay.unbind(0), states.unbind(0)))
    gained = steps[0][1]
    for a, x in steps[1:]:
        gained = torch.addcmul(x, a, gained)
    shape = (segment.pieces, state.shape[0])
    lost = torch.exp(dt.sum(0).unsqueeze(-1) * A).unflatten(0, shape)
    entering = [state]
    for gain, loss in zip(gained.unflatten(0, shape), lost):
        entering.append(torch.addcmul(gain, loss, entering[-1]))
    rows = torch.cat(entering[:-1])
    _loop(decay, states, rows)
    return rows, entering[-1]


def _recur_back(
    decay: torch.Tensor,
    dstates: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    carry: torch.Tensor,
    segment: _Segment,
) -> torch.Tensor:
    """Turn `dstates` from each output's gradient into that of the state, in place; return the entering state's."""
    decays = decay.conj_physical().unbind(0)
    columns = dstates.unbind(0)
    last, batch = len(columns) - 1, carry.shape[0]
    if segment.pieces > 1:
        gained = columns[last]
        for t in range(last - 1, -1, -1):
            gained = torch.addcmul(columns[t], decays[t + 1], gained)
        shape = (segment.pieces, batch)
        gained = (decays[0] * gained).unflatten(0, shape)
        lost = torch.exp(dt.sum(0).unsqueeze(-1) * A.conj_physical()).unflatten(0, shape)
        leaving = [carry]
        for gain, loss in zip(reversed(gained[1:].unbind(0)), reversed(lost[1:].unbind(0))):
            leaving.append(torch.addcmul(gain, loss, leaving[-1]))
        carry = torch.cat(leaving[::-1])
    gradient = columns[last].add_(carry)
    for t in range(last - 1, -1, -1):
        gradient = columns[t].addcmul_(decays[t + 1], gradient)
    return decays[0][:batch] * gradient[:batch]


def _scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    softplus: bool,
) -> _Scan:
    groups = B.shape[1] if B.dim() == 4 else C.shape[1] if C.dim() == 4 else 1
    dim, real = A.shape[0], real_dtype(A.dtype)
    shape = (groups, dim // groups)
    return _Scan(
        u,
        delta,
        A.reshape(*shape, A.shape[1]),
        B if B.dim() == 4 else B.contiguous(),
        C if C.dim() == 4 else C.contiguous(),
        None if D is None else D.to(real).reshape(shape),
        z,
        None if delta_bias is None else delta_bias.to(real).reshape(shape),
        softplus,
    )


def _blocks(u: torch.Tensor, A: torch.Tensor) -> list[tuple[_Segment, int]]:
    """Cut the sequence into blocks of pieces, each piece CHECKPOINT_LENGTH long; with each, how long a segment may be."""
    batch, dim, seqlen = u.shape
    step = max(1, batch * dim * A.shape[1] * (2 if A.is_complex() else 1))
    limit = CPU_SEGMENT if u.device.type == "cpu" else DEVICE_SEGMENT
    steps = 1
    while steps < CHECKPOINT_LENGTH and 2 * steps * step <= limit:
        steps *= 2
    beside = _pieces_beside(u.device, step)
    blocks: list[tuple[_Segment, int]] = []
    start = 0
    while start < seqlen:
        pieces = min(beside, (seqlen - start) // CHECKPOINT_LENGTH)
        if pieces > 1:
            blocks.append((_Segment(start, pieces, CHECKPOINT_LENGTH), CHECKPOINT_LENGTH))
            start += pieces * CHECKPOINT_LENGTH
        else:
            length = min(CHECKPOINT_LENGTH, seqlen - start)
            blocks.append((_Segment(start, 1, length), steps))
            start += length
    return blocks


def _pieces_beside(device: torch.device, step: int) -> int:
    """Return how many pieces to run side by side: on CPU a step is cheap to start, and one pass is less work than two."""
    if device.type == "cpu":
        return 1
    return max(1, min(DEVICE_STEP // step, DEVICE_SEGMENT // (CHECKPOINT_LENGTH * step)))


def _split(block: _Segment, steps: int) -> list[_Segment]:
    """Cut a block of one piece into segments of at most `steps` steps."""
    if block.pieces > 1:
        return [block]
    return [
        _Segment(block.start + offset, 1, min(steps, block.steps - offset)) for offset in range(0, block.steps, steps)
    ]


def _write(view: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy (steps, rows, groups, channels) into a view (steps, pieces, batch, groups, channels)."""
    view.copy_(rows.unflatten(1, view.shape[1:3]))


def _full_precision(u: torch.Tensor) -> Any:
    """Return a context in which autocast leaves matrix products on CPU alone (elsewhere none are used)."""
    return torch.autocast("cpu", enabled=False) if u.device.type == "cpu" else contextlib.nullcontext()
