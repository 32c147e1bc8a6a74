"""The state-space dual scan of one block of a sequence, as matrix products over chunks.

With a[t] = dt[t] * A, cs = cumsum(a) within a chunk, u = dt * x, and S the state that enters the chunk:

    L[i, j] = exp(cs[i] - cs[j]) for j <= i, else 0        w[i] = exp(cs[i])       v[j] = exp(cs[last] - cs[j])
    Y       = (C B^T * L) u + w * (C S^T)                   S'   = exp(cs[last]) * S + (v * u)^T B

L, w and v are zero between different sequences. For A <= 0 only non-positive numbers are exponentiated. cs is summed in
float64 and kept as two float32 numbers (`sums` and `rest`): the difference of two large sums then keeps its last digits, at
the price of one more subtraction, and the decay stays accurate where float32 sums alone would be off by 1e-5 and more.

Layouts. Chunks come first, so that "all states but the last" is contiguous. What is multiplied with B or C, which all
heads of a group share, is group-major (chunks, batch, groups, chunk, heads per group, headdim): one wide matrix product a
group. What is multiplied with L is head-major (chunks, batch, heads, chunk, headdim).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

__all__ = ["Block", "BlockGradients", "BlockInputs", "Ends"]


class BlockInputs(NamedTuple):
    """One block of the sequence: views of the caller's tensors, except where noted."""

    x: torch.Tensor  # (batch, length, nheads, headdim)
    step: torch.Tensor  # (batch, length, nheads): dt after bias, softplus and limit, in the compute dtype
    A: torch.Tensor  # (nheads), compute dtype
    B: torch.Tensor  # (batch, length, ngroups, dstate)
    C: torch.Tensor
    D: torch.Tensor | None  # (nheads, headdim), compute dtype, maybe expanded
    z: torch.Tensor | None
    state: torch.Tensor | None  # (batch, nheads, headdim, dstate), compute dtype: enters the block
    runs: torch.Tensor | None  # (batch, length): number of the sequence, changes exactly where a new one begins
    run_before: torch.Tensor | None  # (batch): number of the sequence that `state` belongs to


class Ends(NamedTuple):
    """The tokens of a block (batch 1) after which the state is wanted, and the gradients of those states."""

    chunk: torch.Tensor  # (count), int64: which chunk
    place: torch.Tensor  # (count), int64: which token of the chunk
    gradients: torch.Tensor | None  # (count, nheads, headdim, dstate), compute dtype


class BlockGradients(NamedTuple):
    """In the compute dtype; (batch, length, ...) as the inputs."""

    dx: torch.Tensor
    dstep: torch.Tensor
    dA: torch.Tensor
    dB: torch.Tensor
    dC: torch.Tensor
    dD: torch.Tensor | None  # (nheads, headdim)
    dz: torch.Tensor | None
    dstate: torch.Tensor
    out: torch.Tensor | None


class Block:
    """The chunks of one block: what forward and backward both need."""

    def __init__(self, inputs: BlockInputs, chunk: int) -> None:
        x, B = inputs.x, inputs.B
        self.inputs, self.chunk = inputs, chunk
        self.batch, self.length, self.heads, self.headdim = x.shape
        self.groups, self.dstate = B.shape[2], B.shape[3]
        self.per_group = self.heads // self.groups
        self.chunks = -(-self.length // chunk)
        self.dtype = inputs.step.dtype
        self.x = self._cut(x)  # (chunks, batch, chunk, heads, headdim), a view where it can be
        self.step = self._cut(inputs.step).transpose(2, 3).contiguous()  # (chunks, batch, heads, chunk)
        self.B, self.C = self._shared(B), self._shared(inputs.C)  # (chunks * batch * groups, chunk, dstate)
        self._decays()

    # --- layouts

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, ...) as (chunks, batch, chunk, ...) in the compute dtype, padded with zeros."""
        padded = self.chunks * self.chunk
        if padded != self.length:
            whole = tensor.new_zeros((self.batch, padded, *tensor.shape[2:]), dtype=self.dtype)
            whole[:, : self.length] = tensor
        else:
            whole = tensor.to(self.dtype)
        cut: torch.Tensor = whole.unflatten(1, (self.chunks, self.chunk))
        return cut.transpose(0, 1)

    def _shared(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return B or C as (chunks * batch * groups, chunk, dstate), contiguous."""
        return self._cut(tensor).transpose(2, 3).reshape(-1, self.chunk, self.dstate)

    def _grouped(self, tensor: torch.Tensor) -> torch.Tensor:
        """View (chunks, batch, chunk, heads, ...) as (chunks, batch, groups, chunk, heads per group, ...)."""
        split: torch.Tensor = tensor.unflatten(3, (self.groups, self.per_group))
        return split.transpose(2, 3)

    def _per_head(self, tensor: torch.Tensor) -> torch.Tensor:
        """View group-major (chunks, batch, groups, chunk, heads per group, headdim) as head-major, 5-dimensional."""
        return tensor.transpose(3, 4).flatten(2, 3)

    def _per_token(self, scalars: torch.Tensor) -> torch.Tensor:
        """View (chunks, batch, heads, chunk) so that it scales a group-major tensor."""
        split: torch.Tensor = scalars.unflatten(2, (self.groups, self.per_group))
        return split.transpose(3, 4).unsqueeze(-1)

    def _joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return group-major (chunks, batch, groups, chunk, ...) as (batch, length, groups, ...)."""
        return tensor.permute(1, 0, 3, 2, *range(4, tensor.dim())).flatten(1, 2)[:, : self.length]

    def _wide(self, tensor: torch.Tensor) -> torch.Tensor:
        """Flatten group-major to one matrix (chunk, heads per group * headdim) a group."""
        return tensor.reshape(-1, self.chunk, self.per_group * self.headdim)

    def _square(self, tensor: torch.Tensor) -> torch.Tensor:
        """View one (chunk, chunk) matrix a group so that it scales those of its heads."""
        return tensor.view(self.chunks, self.batch, self.groups, 1, self.chunk, self.chunk)

    # --- what the decays are

    def _decays(self) -> None:
        """Set sums and rest (cs), entering (w), leaving (v), passing (a whole chunk's decay), same (the sequences' mask)."""
        inputs = self.inputs
        wide = self.dtype if inputs.x.device.type == "mps" else torch.float64  # MPS has no float64
        sums = (self.step.to(wide) * inputs.A.to(wide)[:, None]).cumsum(-1)
        last = sums[..., -1:]
        self.entering = sums.exp().to(self.dtype)
        self.leaving = (last - sums).exp().to(self.dtype)
        self.passing = last.exp().to(self.dtype)  # (chunks, batch, heads, 1)
        self.sums = sums.to(self.dtype)
        self.rest = None if wide == self.dtype else (sums - self.sums.to(wide)).to(self.dtype)
        self.same: torch.Tensor | None = None  # (chunks, batch, 1, chunk, chunk)
        if inputs.runs is not None:
            assert inputs.run_before is not None
            runs = inputs.runs
            if self.chunks * self.chunk != self.length:  # padding goes on with the last sequence
                fill = runs[:, -1:].expand(-1, self.chunks * self.chunk - self.length)
                runs = torch.cat([runs, fill], dim=1)
            runs = runs.unflatten(1, (self.chunks, self.chunk)).transpose(0, 1)  # (chunks, batch, chunk)
            ends = runs[..., -1]
            before = torch.cat([inputs.run_before.unsqueeze(0), ends[:-1]])
            self.same = (runs.unsqueeze(-1) == runs.unsqueeze(-2)).unsqueeze(2)
            self.entering = self.entering * (runs == before.unsqueeze(-1)).unsqueeze(2)
            self.leaving = self.leaving * (runs == ends.unsqueeze(-1)).unsqueeze(2)
            self.passing = self.passing * (ends == before)[..., None, None]

    def _mask(self) -> torch.Tensor:
        """Return the matrix of decays L, (chunks, batch, heads, chunk, chunk)."""
        decay = self.sums.unsqueeze(-1) - self.sums.unsqueeze(-2)
        if self.rest is not None:
            decay += self.rest.unsqueeze(-1) - self.rest.unsqueeze(-2)
        future = torch.ones(self.chunk, self.chunk, dtype=torch.bool, device=decay.device).triu_(1)
        decay.masked_fill_(future if self.same is None else future | ~self.same, float("-inf"))
        return decay.exp_()

    def _scores(self, within: torch.Tensor) -> torch.Tensor:
        """Return C B^T times the decays L, one matrix a head: (chunks, batch, heads, chunk, chunk)."""
        scores = self._mask()
        scores.unflatten(2, (self.groups, self.per_group)).mul_(self._square(within))
        return scores

    # --- forward

    def states(self) -> torch.Tensor:
        """Return the states before each chunk and after the last, (chunks + 1, batch, heads, headdim, dstate)."""
        x, state = self.x, self.inputs.state
        states = x.new_empty((self.chunks + 1, self.batch, self.heads, self.headdim, self.dstate), dtype=self.dtype)
        torch.bmm(
            self._wide(self._driven(self.step * self.leaving)).transpose(1, 2),
            self.B,
            out=states[1:].view(-1, self.per_group * self.headdim, self.dstate),
        )
        states[0] = 0 if state is None else state
        passing = self.passing.unsqueeze(-1)
        for i in range(1 if state is None else 0, self.chunks):
            states[i + 1].addcmul_(states[i], passing[i])
        return states

    def _driven(self, scale: torch.Tensor) -> torch.Tensor:
        """Return x scaled by (chunks, batch, heads, chunk), group-major and contiguous."""
        return torch.mul(self._grouped(self.x), self._per_token(scale), out=self._new())

    def _new(self) -> torch.Tensor:
        shape = (self.chunks, self.batch, self.groups, self.chunk, self.per_group, self.headdim)
        return self.x.new_empty(shape)

    def _inner(self) -> torch.Tensor:
        """Return u = dt * x, one matrix (chunk, headdim) a head."""
        u = self.x.new_empty((self.chunks, self.batch, self.heads, self.chunk, self.headdim))
        torch.mul(self.x.transpose(2, 3), self.step.unsqueeze(-1), out=u)
        return u.flatten(0, 2)

    def _within(self) -> torch.Tensor:
        """Return C B^T, one matrix (chunk, chunk) a group."""
        return torch.bmm(self.C, self.B.transpose(1, 2))

    def _from_state(self, states: torch.Tensor) -> torch.Tensor:
        """Return C S^T of the states before each chunk, group-major."""
        before = states[:-1].view(-1, self.per_group * self.headdim, self.dstate)
        return torch.bmm(self.C, before.transpose(1, 2)).view_as(self._grouped(self.x))

    def outputs(self, states: torch.Tensor) -> torch.Tensor:
        """Return out (batch, length, heads, headdim) in the compute dtype."""
        y = self._outputs(
            self._scores(self._within()), self._inner(), None if self._stateless() else self._from_state(states)
        )
        if self.inputs.z is not None:
            y.mul_(F.silu(self._grouped(self._cut(self.inputs.z))))
        return self._joined(y).flatten(2, 3)

    def _stateless(self) -> bool:
        return self.inputs.state is None and self.chunks == 1

    def _outputs(self, scores: torch.Tensor, u: torch.Tensor, from_state: torch.Tensor | None) -> torch.Tensor:
        """Return y = scores u + w * from_state + D x, group-major."""
        y = torch.bmm(scores.flatten(0, 2), u).view(self.chunks, self.batch, self.heads, self.chunk, self.headdim)
        y = y.unflatten(2, (self.groups, self.per_group)).transpose(3, 4)
        if from_state is not None:
            y = torch.addcmul(y, from_state, self._per_token(self.entering), out=self._new())
        if self.inputs.D is not None:
            y.addcmul_(self._grouped(self.x), self._skip())
        return y

    def _skip(self) -> torch.Tensor:
        assert self.inputs.D is not None
        skip: torch.Tensor = self.inputs.D.unflatten(0, (self.groups, 1, self.per_group))
        return skip

    def states_at(self, ends: Ends, states: torch.Tensor) -> torch.Tensor:
        """Return the states after the tokens `ends`, (count, heads, headdim, dstate). Batch 1."""
        chunk, place = ends.chunk, ends.place
        reach, entering = self._reach(ends)
        driven = self.x[chunk, 0] * (reach * self.step[chunk, 0]).transpose(1, 2).unsqueeze(-1)
        grouped = driven.unflatten(2, (self.groups, self.per_group)).permute(0, 2, 3, 4, 1)
        b = self.B.view(self.chunks, self.groups, self.chunk, self.dstate)[chunk]
        found = torch.matmul(grouped.flatten(2, 3), b).view(-1, self.heads, self.headdim, self.dstate)
        return found.addcmul_(states[chunk, 0], entering[..., None, None]) if place.numel() else found

    def _reach(self, ends: Ends) -> tuple[torch.Tensor, torch.Tensor]:
        """Return how much of each token of its chunk, and of the state before, is left at each end: L and w there."""
        chunk, place = ends.chunk, ends.place
        place_of = place[:, None, None].expand(-1, self.heads, 1)
        sums = self.sums[chunk, 0]  # (count, heads, chunk)
        decay = sums.gather(2, place_of) - sums
        if self.rest is not None:
            rest = self.rest[chunk, 0]
            decay += rest.gather(2, place_of) - rest
        tokens = torch.arange(self.chunk, device=place.device)
        hidden = (tokens > place.unsqueeze(1)).unsqueeze(1)  # (count, 1, chunk)
        if self.same is not None:
            hidden = hidden | ~self.same[chunk, 0, :, place]
        decay.masked_fill_(hidden, float("-inf"))
        return decay.exp_(), self.entering[chunk, 0].gather(2, place_of).squeeze(-1)

    # --- backward

    def gradients(
        self,
        dout: torch.Tensor | None,
        dstate: torch.Tensor | None,
        ends: Ends | None,
        recompute_out: bool,
    ) -> BlockGradients:
        """Return the gradients, given those of out, of the state after the block, and of the states at `ends`."""
        states = self.states()
        mask, within, u = self._mask(), self._within(), self._inner()
        from_state = self._from_state(states)
        square = self._square(within)
        scores = mask.unflatten(2, (self.groups, self.per_group)) * square
        x = self._grouped(self.x)
        dz = out = None
        dy = self._new().zero_() if dout is None else self._grouped(self._cut(dout))
        if self.inputs.z is not None or recompute_out:
            y = self._outputs(scores.flatten(2, 3), u, from_state)
            if self.inputs.z is not None:
                z = self._grouped(self._cut(self.inputs.z))
                gate = torch.sigmoid(z)
                slope = gate * (1 + z * (1 - gate))
                dz = self._joined(dy * y * slope).flatten(2, 3)
                gate *= z
                dy = dy * gate
                y = y * gate
            if recompute_out:
                out = self._joined(y).flatten(2, 3)

        # Through the states: dstates[i + 1] is the gradient of the state after chunk i.
        dy_entering = torch.mul(dy, self._per_token(self.entering), out=self._new())
        dstates = torch.empty_like(states)
        wide_dy = self._wide(dy_entering)
        torch.bmm(
            wide_dy.transpose(1, 2), self.C, out=dstates[:-1].view(-1, self.per_group * self.headdim, self.dstate)
        )
        dstates[-1] = 0 if dstate is None else dstate
        if ends is not None:
            reach, entering = self._reach(ends)
            assert ends.gradients is not None
            dstates.select(1, 0).index_add_(0, ends.chunk, ends.gradients * entering[..., None, None])
        passing = self.passing.unsqueeze(-1)
        for i in range(self.chunks - 1, -1, -1):
            dstates[i].addcmul_(dstates[i + 1], passing[i])

        # Within the chunks.
        dy_head = x.new_empty((self.chunks, self.batch, self.heads, self.chunk, self.headdim))
        dy_head.copy_(self._per_head(dy))
        dy_head = dy_head.flatten(0, 2)
        du = torch.bmm(scores.flatten(0, 3).transpose(1, 2), dy_head)
        del scores
        dscores = torch.bmm(dy_head, u.transpose(1, 2)).view_as(mask)
        del dy_head
        dscores *= mask
        del mask
        grouped = dscores.unflatten(2, (self.groups, self.per_group))
        dwithin = grouped.sum(3).flatten(0, 2)
        grouped *= square
        dlog = self._across(dscores)  # gradient of a, (chunks, batch, heads, chunk)
        del dscores, grouped

        # Between the chunks.
        after = dstates[1:].view(-1, self.per_group * self.headdim, self.dstate)
        before = states[:-1].view(-1, self.per_group * self.headdim, self.dstate)
        dC = torch.bmm(wide_dy, before).baddbmm_(dwithin, self.B)
        driven = self._driven(self.step * self.leaving)
        dB = torch.bmm(self._wide(driven), after).baddbmm_(dwithin.transpose(1, 2), self.C)
        du_leaving = torch.bmm(self.B, after.transpose(1, 2)).view_as(x)
        dlog += _from_here_on(self._dot(dy_entering, from_state))
        dlog += _before_here(self._dot(driven, du_leaving))
        dlog += (states[:-1] * dstates[1:]).sum((-1, -2)).unsqueeze(-1) * self.passing
        du = du.view(self.chunks, self.batch, self.heads, self.chunk, self.headdim)
        du = du.unflatten(2, (self.groups, self.per_group)).transpose(3, 4)  # group-major
        du = torch.addcmul(du, du_leaving, self._per_token(self.leaving), out=self._new())
        del du_leaving, driven, dy_entering, wide_dy, from_state
        if ends is not None:
            self._end_gradients(ends, reach, entering, states, du, dB, dlog)

        dA = (dlog * self.step).sum((0, 1, 3))
        dstep = torch.addcmul(self._dot(du, x), dlog, self.inputs.A[:, None])
        dx = du.mul_(self._per_token(self.step))
        dD = None
        if self.inputs.D is not None:
            dx.addcmul_(dy, self._skip())
            dD = (dy * x).sum((0, 1, 3)).flatten(0, 1)
        return BlockGradients(
            self._joined(dx).flatten(2, 3),
            dstep.permute(1, 0, 3, 2).flatten(1, 2)[:, : self.length],
            dA,
            self._joined(dB.view(self.chunks, self.batch, self.groups, self.chunk, self.dstate)),
            self._joined(dC.view(self.chunks, self.batch, self.groups, self.chunk, self.dstate)),
            dD,
            dz,
            dstates[0],
            out,
        )

    def _across(self, pairs: torch.Tensor) -> torch.Tensor:
        """Return, for each token t, the sum of pairs[i, j] over j < t <= i: what a[t] lies between.

        Sums of rows minus sums of columns, then summed from the end, would be the same number with fewer operations, but
        as a small difference of large ones: 20 times the error of dA where the decay is strong.
        """
        earlier = torch.ones(self.chunk, self.chunk, dtype=self.dtype, device=pairs.device)
        return torch.matmul(pairs, earlier.triu(1)).mul_(earlier.tril_()).sum(-2)

    def _dot(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return the dot products over headdim of two group-major tensors, (chunks, batch, heads, chunk)."""
        return (left * right).sum(-1).transpose(3, 4).flatten(2, 3)

    def _end_gradients(
        self,
        ends: Ends,
        reach: torch.Tensor,
        entering: torch.Tensor,
        states: torch.Tensor,
        du: torch.Tensor,
        dB: torch.Tensor,
        dlog: torch.Tensor,
    ) -> None:
        """Add what the states at `ends` hand to u, B and the decays of their chunks. Batch 1."""
        assert ends.gradients is not None
        chunk, count = ends.chunk, ends.chunk.shape[0]
        given = ends.gradients.view(count, self.groups, self.per_group * self.headdim, self.dstate)
        b = self.B.view(self.chunks, self.groups, self.chunk, self.dstate)[chunk]
        back = torch.matmul(b, given.transpose(2, 3))  # (count, groups, chunk, heads per group * headdim)
        back = back.view(count, self.groups, self.chunk, self.per_group, self.headdim)
        weight = reach.unflatten(1, (self.groups, self.per_group)).transpose(2, 3).unsqueeze(-1)
        back *= weight
        du.select(1, 0).index_add_(0, chunk, back)
        u = self._driven(self.step)[chunk, 0]
        share = (back * u).sum(-1).transpose(2, 3).flatten(1, 2)  # (count, heads, chunk)
        u *= weight
        found = torch.matmul(u.flatten(3, 4), given)  # (count, groups, chunk, dstate)
        dB.view(self.chunks, self.groups, self.chunk, self.dstate).index_add_(0, chunk, found)
        kept = (ends.gradients * states[chunk, 0]).sum((-1, -2)) * entering
        tokens = torch.arange(self.chunk, device=chunk.device)
        until_end = (tokens <= ends.place.unsqueeze(1)).unsqueeze(1)  # (count, 1, chunk)
        dlog.select(1, 0).index_add_(0, chunk, (_before_here(share) + kept.unsqueeze(-1)) * until_end)


def _from_here_on(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of each entry and all after it, along the last dimension."""
    return tensor.flip(-1).cumsum(-1).flip(-1)


def _before_here(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of all entries before each, along the last dimension."""
    return F.pad(tensor[..., :-1].cumsum(-1), (1, 0))
