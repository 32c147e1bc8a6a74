"""The states that enter each rank: an exclusive scan over ranks of what each part of the sequence does to a state.

A part multiplies the state that enters it by a decay and adds what it gained from a zero state. Two neighbours together are
again such a part: gain = gain_right + decay_right * gain_left, decay = decay_right * decay_left. That is associative, so it
can be done in any order. Decays travel as logarithms or sums of time steps, whichever is smaller, and only ever underflow.
With packed sequences a part also carries the numbers of its first and last sequence: a state passes from one part to the next
only if they agree; a part with a boundary inside passes nothing through (log decay -inf).

Up to GATHER_UP_TO ranks one all-gather brings every part to every rank: (ranks - 1) messages' bytes, one step. Beyond, each
rank's part moves on by one, and then in ceil(log2(ranks - 1)) rounds by 1, 2, 4, ... ranks (Hillis and Steele, "Data parallel
algorithms", 1986): fewer bytes from 5 ranks on, more steps. The same scan from the end brings a backward's gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from anymamba.distributed.ranks import Pending, Ranks

__all__ = ["GATHER_UP_TO", "Part", "entering"]

GATHER_UP_TO = 4
"""Most ranks for which one all-gather moves no more bytes than the rounds."""


@dataclass
class Part:
    """What one part of the sequence does to a state.

    Attributes
    ----------
    gain : Tensor
        (batch, ...): the state after it from a zero state; its shape is the states'.
    decay : Tensor
        (batch, ...), real: sums that become the factor of the entering state through the `factor` of `entering`.
    first, last : Tensor, optional
        (batch), integer: numbers of its first and its last packed sequence, in the direction of the scan.
    """

    gain: torch.Tensor
    decay: torch.Tensor
    first: torch.Tensor | None = None
    last: torch.Tensor | None = None

    def after(self, left: Part, factor: Callable[[torch.Tensor], torch.Tensor]) -> Part:
        """Return `left` and then this part as one."""
        carried = factor(self.decay)
        decay = left.decay + self.decay
        if self.first is not None and left.last is not None:
            linked = left.last == self.first
            carried = carried * _for(linked, carried)
            decay = torch.where(_for(linked, decay).bool(), decay, -torch.inf)
        return Part(torch.addcmul(self.gain, carried, left.gain), decay, left.first, self.last)

    def pack(self) -> torch.Tensor:
        """Return everything as one flat tensor of real numbers; sequence numbers as they are, bit by bit."""
        gain = torch.view_as_real(self.gain) if self.gain.is_complex() else self.gain
        pieces = [gain, self.decay.to(gain.dtype)]
        integer = torch.int64 if gain.dtype == torch.float64 else torch.int32
        pieces += [ids.to(integer).view(gain.dtype) for ids in (self.first, self.last) if ids is not None]
        return torch.cat([piece.reshape(-1) for piece in pieces])

    def unpack(self, flat: torch.Tensor) -> Part:
        """Return the part that `pack` made flat; this one says the shapes."""
        real = flat.dtype
        numbers = self.gain.numel() * (2 if self.gain.is_complex() else 1)
        gain, decay, ids = flat.split([numbers, self.decay.numel(), flat.numel() - numbers - self.decay.numel()])
        state = torch.view_as_complex(gain.view(*self.gain.shape, 2)) if self.gain.is_complex() else gain
        first = last = None
        if self.first is not None:
            first, last = ids.view(torch.int64 if real == torch.float64 else torch.int32).chunk(2)
        return Part(state.view(self.gain.shape), decay.view(self.decay.shape), first, last)


def _for(flags: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return (batch) flags as numbers that broadcast over (batch, ...)."""
    return flags.to(like.dtype if like.is_floating_point() else torch.float32).view(-1, *[1] * (like.dim() - 1))


def entering(
    ranks: Ranks, part: Part, factor: Callable[[torch.Tensor], torch.Tensor], *, backward: bool = False
) -> Pending:
    """Start to combine the parts of all ranks; `wait` returns the state that enters this rank's part.

    Parameters
    ----------
    ranks : Ranks
    part : Part
        This rank's. Of the rank at the end only the shapes and the first sequence's number matter.
    factor : callable
        From `Part.decay` to the factor of the entering state, broadcastable to it.
    backward : bool
        From the last rank to the first instead.

    Returns
    -------
    Pending
        `wait` returns the state, zero where the neighbours' sequences differ; None on the rank at the start.
    """
    place = ranks.size - 1 - ranks.rank if backward else ranks.rank

    def rank_at(other: int) -> int | None:
        if not 0 <= other < ranks.size:
            return None
        return ranks.size - 1 - other if backward else other

    def state_of(before: Part) -> torch.Tensor:
        if part.first is None or before.last is None:
            return before.gain
        linked = before.last == part.first
        return torch.where(_for(linked, before.gain).bool(), before.gain, torch.zeros_like(before.gain))

    if ranks.size <= GATHER_UP_TO:
        gathering = ranks.gather(part.pack())

        def from_all() -> torch.Tensor | None:
            flats = gathering.wait()
            before: Part | None = None
            for other in range(place):
                rank = rank_at(other)
                assert rank is not None
                found = part.unpack(flats[rank])
                before = found if before is None else found.after(before, factor)
            return None if before is None else state_of(before)

        return Pending(from_all)

    moving = ranks.exchange([part.pack()], rank_at(place + 1), rank_at(place - 1))

    def in_rounds() -> torch.Tensor | None:
        received = moving.wait()
        before = None if received is None else part.unpack(received[0])
        distance = 1
        while distance < ranks.size - 1:
            # The rank at the start has nothing before it: it neither sends nor is anything sent to the one after it.
            to = rank_at(place + distance) if before is not None else None
            come_from = rank_at(place - distance) if place - distance >= 1 else None
            if to is not None or come_from is not None:
                got = ranks.exchange([(before or part).pack()], to, come_from).wait()
                if got is not None:
                    assert before is not None
                    before = before.after(part.unpack(got[0]), factor)
            distance *= 2
        return None if before is None else state_of(before)

    return Pending(in_rounds)
