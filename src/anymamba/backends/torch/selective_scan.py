"""Selective scan over bounded segments of time: everything but the recurrence itself is one operation per segment.

A block is CHECKPOINT_LENGTH steps, laid out (steps, rows, groups, channels of a group), time first, so that a step is
contiguous. Within it, segments short enough for the cache hold the states (..., dstate), and the recurrence is one fused
multiply-add per step, written over its own input. Where a step is too small to fill the device (GPUs), a block is many pieces
of the sequence, side by side as rows: one pass from zero states finds what each piece adds, the states are passed from piece
to piece, and a second pass has the right ones. Only sums of delta * A are exponentiated, never their negatives, so strong
decay underflows to zero and nothing overflows.

The backward keeps one state per CHECKPOINT_LENGTH steps from the forward and computes the others again, block by block from
the end. Everything between is fp32 (fp64 for fp64). The gradient of a complex number is, as PyTorch has it,
dL/d(re) + i dL/d(im). Conjugates are computed, not marked (`conj_physical`): the first call of a compiled graph runs us with
the dispatch key excluded that would resolve the mark.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from anymamba.backends.torch._short_scan import STEPS, short_backward, short_forward
from anymamba.machine.memory import empty_like
from anymamba.ops.selective_scan import CHECKPOINT_LENGTH, Gradients, real_dtype

__all__ = ["selective_scan_backward", "selective_scan_forward"]

# Numbers in a segment. CPU: a few buffers of it stay in the second-level cache of a core or two.
CPU_SEGMENT = 2**19
DEVICE_SEGMENT = 2**26
# Numbers a step should have to keep a GPU busy for longer than a launch takes.
DEVICE_STEP = 2**20


class _Block(NamedTuple):
    start: int
    pieces: int  # side by side as rows
    steps: int  # of each piece


class _Scan(NamedTuple):
    """A scan's inputs as the blocks below read them."""

    u: torch.Tensor
    delta: torch.Tensor
    A: torch.Tensor  # (groups, channels of a group, dstate)
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None  # (groups, channels)
    z: torch.Tensor | None
    delta_bias: torch.Tensor | None  # (groups, channels)
    softplus: bool
    buffers: dict[str, torch.Tensor]  # reused by every segment: fresh pages cost more than the arithmetic on them

    @property
    def real(self) -> torch.dtype:
        return real_dtype(self.A.dtype)

    def view(self, tensor: torch.Tensor, block: _Block) -> torch.Tensor:
        """Return the block of a (batch, dim, seqlen) tensor as a view (steps, pieces, batch, groups, channels)."""
        start, pieces, steps = block
        columns = tensor[..., start : start + pieces * steps].unflatten(-1, (pieces, steps))
        view: torch.Tensor = columns.unflatten(1, self.A.shape[:2]).permute(4, 3, 0, 1, 2)
        return view

    def rows(self, tensor: torch.Tensor, block: _Block) -> torch.Tensor:
        """Return the block of a (batch, dim, seqlen) tensor as (steps, rows, groups, channels), contiguous."""
        if block.pieces > 1:
            return _contiguous(self.view(tensor, block), self.real).flatten(1, 2)
        # PyTorch transposes a dense matrix in tiles, and anything else number by number, 10 times slower on CPU.
        columns = _contiguous(tensor[..., block.start : block.start + block.steps], self.real)
        return columns.view(-1, block.steps).t().contiguous().view(block.steps, tensor.shape[0], *self.A.shape[:2])

    def write(self, tensor: torch.Tensor, block: _Block, rows: torch.Tensor) -> None:
        """Copy (steps, rows, groups, channels) into the block of a (batch, dim, seqlen) tensor."""
        if block.pieces > 1:
            view = self.view(tensor, block)
            view.copy_(rows.unflatten(1, view.shape[1:3]))
            return
        columns = tensor[..., block.start : block.start + block.steps]
        columns.copy_(rows.view(block.steps, -1).t().contiguous().view(columns.shape))

    def matrix_view(self, matrix: torch.Tensor, block: _Block) -> torch.Tensor:
        """Return the block of a variable B or C as a view (steps, pieces, batch, groups, dstate[, 2])."""
        start, pieces, steps = block
        columns: torch.Tensor
        if self.A.is_complex():
            columns = matrix[..., 2 * start : 2 * (start + pieces * steps)].unflatten(-1, (pieces, steps, 2))
            return columns.permute(4, 3, 0, 1, 2, 5)
        columns = matrix[..., start : start + pieces * steps].unflatten(-1, (pieces, steps))
        return columns.permute(4, 3, 0, 1, 2)

    def matrix(self, matrix: torch.Tensor, block: _Block) -> torch.Tensor:
        """Return B or C of the block: (steps, rows, groups, 1, dstate), or a constant one as (groups, channels, dstate)."""
        if matrix.dim() == 2:
            return matrix.view(self.A.shape)
        view = _contiguous(self.matrix_view(matrix, block), self.real).flatten(1, 2)
        return (torch.view_as_complex(view) if self.A.is_complex() else view).unsqueeze(3)

    def time_step(self, block: _Block) -> tuple[torch.Tensor, torch.Tensor]:
        """Return delta before and after softplus."""
        raw = self.rows(self.delta, block)
        if self.delta_bias is not None:
            raw.add_(self.delta_bias)
        return raw, F.softplus(raw) if self.softplus else raw

    def product(self, name: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return left[..., None] * right, (steps, rows, groups, channels, dstate), in the buffer of this name."""
        shape = (*left.shape, self.A.shape[2])
        size = math.prod(shape)
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self.buffers[name] = self.A.new_empty(size)
        return torch.mul(left.unsqueeze(-1), right, out=buffer[:size].view(shape))

    def decay_and_gain(self, dt: torch.Tensor, dtu: torch.Tensor, B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what each step multiplies the state with and adds to it."""
        return self.product("decay", dt, self.A).exp_(), self.product("states", dtu, B)


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
    if 0 < seqlen <= STEPS and not A.is_complex():
        return short_forward(u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, save)
    scan = _scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus)
    out = empty_like(delta)
    state = A.new_zeros(batch, dim, dstate)
    if initial_state is not None:
        state.copy_(initial_state)
    checkpoints = None
    if save:
        checkpoints = A.new_empty(batch, dim, (seqlen + CHECKPOINT_LENGTH - 1) // CHECKPOINT_LENGTH, dstate)
    state = state.view(batch, *scan.A.shape)
    with _full_precision(u):
        for block in _blocks(u, A):
            first = block.start // CHECKPOINT_LENGTH
            inputs = scan.rows(u, block)
            _, dt = scan.time_step(block)
            dtu = dt * inputs
            matrix_B, matrix_C = scan.matrix(B, block), scan.matrix(C, block)
            y = torch.empty_like(inputs)
            if checkpoints is not None and block.pieces == 1:
                checkpoints[:, :, first] = state.flatten(1, 2)
            for part in _segments(block, scan):
                decay, states = scan.decay_and_gain(dt[part], dtu[part], _part(matrix_B, part))
                entering, state = _recur(decay, states, dt[part], scan.A, state, block.pieces)
                if checkpoints is not None and block.pieces > 1:
                    kept = checkpoints[:, :, first : first + block.pieces].unflatten(1, scan.A.shape[:2])
                    kept.copy_(entering.unflatten(0, (block.pieces, batch)).permute(1, 2, 3, 0, 4))
                _contract(states, _part(matrix_C, part), y[part], twice=True)
            if scan.D is not None:
                y.addcmul_(inputs, scan.D)
            if z is not None:
                y.mul_(F.silu(scan.rows(z, block), inplace=True))
            scan.write(out, block, y)
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
    dB_out: torch.Tensor | None = None,
    dC_out: torch.Tensor | None = None,
) -> Gradients:
    """See `anymamba.ops.selective_scan.SelectiveScanBackend`."""
    if 0 < u.shape[2] <= STEPS and not A.is_complex():
        return short_backward(
            u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, dout, dlast_state,
            return_out, dz_out, dB_out, dC_out,
        )  # fmt: skip
    if checkpoints is None:
        _, _, checkpoints = selective_scan_forward(
            u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, save=True
        )
        assert checkpoints is not None
    batch, dim, _ = u.shape
    scan = _scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus)
    grads = _GradientBuffers(
        du=empty_like(u),
        ddelta=empty_like(delta),
        dA=torch.zeros_like(scan.A),
        dB=(torch.empty_like(B) if dB_out is None else dB_out) if B.dim() == 4 else torch.zeros_like(scan.A),
        dC=(torch.empty_like(C) if dC_out is None else dC_out) if C.dim() == 4 else torch.zeros_like(scan.A),
        dD=None if scan.D is None else torch.zeros_like(scan.D),
        dz=dz_out if dz_out is not None else None if z is None else empty_like(z),
        ddelta_bias=None if scan.delta_bias is None else torch.zeros_like(scan.delta_bias),
        out=empty_like(delta) if return_out else None,
    )
    carry = A.new_zeros(batch, dim, A.shape[1])  # the gradient of the state that leaves the segment
    if dlast_state is not None:
        carry.copy_(dlast_state)
    carry = carry.view(batch, *scan.A.shape)
    with _full_precision(u):
        for block in reversed(_blocks(u, A)):
            first = block.start // CHECKPOINT_LENGTH
            kept = checkpoints[:, :, first : first + block.pieces].unflatten(1, scan.A.shape[:2])
            entering = kept.permute(3, 0, 1, 2, 4).contiguous().flatten(0, 1)
            carry = _block_backward(scan, grads, block, entering, carry, dout)
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


def _block_backward(
    scan: _Scan,
    grads: _GradientBuffers,
    block: _Block,
    entering: torch.Tensor,
    carry: torch.Tensor,
    dout: torch.Tensor,
) -> torch.Tensor:
    """Add one block's share to `grads`; return the gradient of the state entering its first piece."""
    twice = 2 if scan.A.is_complex() else 1
    inputs = scan.rows(scan.u, block)
    raw, dt = scan.time_step(block)
    dtu = dt * inputs
    B, C = scan.matrix(scan.B, block), scan.matrix(scan.C, block)
    dout = scan.rows(dout, block)
    dy, gate, z = dout, None, None
    if scan.z is not None:
        z = scan.rows(scan.z, block)
        gate = torch.sigmoid(z)
        dy = dout * gate * z
    y = torch.empty_like(dy) if gate is not None or grads.out is not None else None
    # The gradients of B and C of this block, (steps, rows, groups, dstate), where they vary with time.
    dB, dC = (None if m.dim() == 3 else m.new_empty(*m.shape[:3], m.shape[4]) for m in (B, C))
    ddt, ddtu = torch.empty_like(dt), torch.empty_like(dt)

    # Of long steps at least 8 a segment: fewer would keep more states between segments than within one.
    parts = _segments(block, scan, least=8)
    starts = [entering]
    for part in parts[:-1]:  # finer checkpoints, where a block is several segments
        starts.append(_loop(*scan.decay_and_gain(dt[part], dtu[part], _part(B, part)), starts[-1]).clone())
    for part in reversed(parts):
        start = starts.pop()
        decay, states = scan.decay_and_gain(dt[part], dtu[part], _part(B, part))
        _loop(decay, states, start)
        if y is not None:
            _contract(states, _part(C, part), y[part], twice=True)
        dstates = scan.product("dstates", twice * dy[part], _part(C, part).conj_physical())
        carry = _recur_back(decay, dstates, dt[part], scan.A, carry, block.pieces)
        _matrix_gradient(grads.dC, dC, part, states, twice * dy[part], conjugate=True)
        _matrix_gradient(grads.dB, dB, part, dstates, dtu[part], conjugate=False)
        _contract(dstates, _part(B, part).conj_physical(), ddtu[part], twice=False)
        # The gradient of delta * A at each step: dstates * conj(decay * state before).
        decay[0].mul_(start)
        decay[1:].mul_(states[:-1])
        ddecay = decay.conj_physical_().mul_(dstates)
        product = torch.mul(ddecay, scan.A.conj_physical(), out=states)  # the states are not needed any more
        ddt[part] = product.sum(-1).real if product.is_complex() else product.sum(-1)
        grads.dA.add_(ddecay.mul_(dt[part].unsqueeze(-1)).flatten(0, 1).sum(0))

    if y is not None:
        if scan.D is not None:
            y.addcmul_(inputs, scan.D)
        if gate is not None and z is not None and grads.dz is not None:
            scan.write(grads.dz, block, dout.mul_(y).mul_(gate).mul_(1 + z * (1 - gate)))
            y.mul_(gate.mul_(z))
        if grads.out is not None:
            scan.write(grads.out, block, y)
    for gradient, found in ((grads.dB, dB), (grads.dC, dC)):
        if found is not None:
            target = scan.matrix_view(gradient, block)
            found = torch.view_as_real(found) if found.is_complex() else found
            target.copy_(found.unflatten(1, target.shape[1:3]))
    ddt.addcmul_(ddtu, inputs)
    du = ddtu.mul_(dt)
    if scan.D is not None:
        assert grads.dD is not None
        du.addcmul_(dy, scan.D)
        grads.dD.add_((dy * inputs).sum((0, 1)))
    if scan.softplus:
        ddt.mul_(torch.sigmoid(raw))
    if grads.ddelta_bias is not None:
        grads.ddelta_bias.add_(ddt.sum((0, 1)))
    scan.write(grads.du, block, du)
    scan.write(grads.ddelta, block, ddt)
    return carry


def _matrix_gradient(
    total: torch.Tensor,
    columns: torch.Tensor | None,
    part: slice,
    states: torch.Tensor,
    weight: torch.Tensor,
    *,
    conjugate: bool,
) -> None:
    """Put sum(weight * states), the gradient of B or C, into its `columns` (variable) or add it to `total` (constant)."""
    if columns is None:
        found = (weight.unsqueeze(-1) * states).flatten(0, 1).sum(0)
        total.add_(found.conj_physical_() if conjugate else found)
    elif states.device.type == "cpu" and not states.is_complex():
        columns[part] = torch.matmul(weight.unsqueeze(-2), states).squeeze(-2)
    else:
        found = (weight.unsqueeze(-1) * states).sum(3)
        columns[part] = found.conj_physical_() if conjugate else found


def _contract(states: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor, *, twice: bool) -> None:
    """Put the real part of ``sum(states * matrix)`` over dstate into `out`; of complex states twice that if asked to."""
    if states.is_complex():
        out.copy_((states * matrix).sum(-1).real)
        if twice:
            out.mul_(2)
    elif states.device.type == "cpu" and matrix.dim() == 5:
        # A matrix product beats a product and a sum on CPU, but elsewhere may round to TF32.
        out.copy_(torch.matmul(states, matrix.transpose(-1, -2)).squeeze(-1))
    else:
        out.copy_((states * matrix).sum(-1))


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
    pieces: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence over a segment; return the state entering each piece (rows), and the one after the last."""
    if pieces == 1:
        return state, _loop(decay, states, state).clone()  # the buffer it lies in is about to be reused
    steps = list(zip(decay.unbind(0), states.unbind(0)))
    gained = steps[0][1]
    for a, x in steps[1:]:
        gained = torch.addcmul(x, a, gained)
    shape = (pieces, state.shape[0])
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
    pieces: int,
) -> torch.Tensor:
    """Turn `dstates` from each output's gradient into that of the state, in place; return the entering state's."""
    decays = decay.conj_physical().unbind(0)
    columns = dstates.unbind(0)
    last, batch = len(columns) - 1, carry.shape[0]
    if pieces > 1:
        gained = columns[last]
        for t in range(last - 1, -1, -1):
            gained = torch.addcmul(columns[t], decays[t + 1], gained)
        shape = (pieces, batch)
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
        {},
    )


def _step_size(u: torch.Tensor, A: torch.Tensor) -> int:
    """Return how many real numbers the states of one step are."""
    return max(1, u.shape[0] * A.numel() * (2 if A.is_complex() else 1))


def _blocks(u: torch.Tensor, A: torch.Tensor) -> list[_Block]:
    """Cut the sequence into blocks of one or more pieces of CHECKPOINT_LENGTH steps; the last one may be shorter."""
    seqlen, beside = u.shape[2], _pieces_beside(u.device, _step_size(u, A))
    blocks: list[_Block] = []
    start = 0
    while start < seqlen:
        pieces = max(1, min(beside, (seqlen - start) // CHECKPOINT_LENGTH))
        blocks.append(_Block(start, pieces, min(CHECKPOINT_LENGTH, seqlen - start)))
        start += pieces * CHECKPOINT_LENGTH
    return blocks


def _pieces_beside(device: torch.device, step: int) -> int:
    """Return how many pieces to run side by side: on CPU a step is cheap to start, and one pass is less work than two."""
    if device.type == "cpu":
        return 1
    return max(1, min(DEVICE_STEP // step, DEVICE_SEGMENT // (CHECKPOINT_LENGTH * step)))


def _segments(block: _Block, scan: _Scan, least: int = 1) -> list[slice]:
    """Cut a block's steps so that the states of a segment are at most SEGMENT numbers, but no fewer than `least` steps."""
    if block.pieces > 1:
        return [slice(0, block.steps)]
    limit = CPU_SEGMENT if scan.u.device.type == "cpu" else DEVICE_SEGMENT
    steps = max(least, limit // _step_size(scan.u, scan.A))
    return [slice(first, min(first + steps, block.steps)) for first in range(0, block.steps, steps)]


def _part(matrix: torch.Tensor, part: slice) -> torch.Tensor:
    """Return a segment's part of a block's B or C; a constant one serves every segment."""
    return matrix if matrix.dim() == 3 else matrix[part]


def _contiguous(view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous copy, cast on the way (`Tensor.to` of the same dtype would return the view itself)."""
    return torch.empty(view.shape, dtype=dtype, device=view.device).copy_(view)


def _full_precision(u: torch.Tensor) -> Any:
    """Return a context in which autocast leaves matrix products on CPU alone (elsewhere none are used)."""
    return torch.autocast("cpu", enabled=False) if u.device.type == "cpu" else contextlib.nullcontext()
