"""The ranks that share a sequence, as the operators see them: where this one stands, and the messages between them.

Rank r holds the r-th part of the sequence. Every message is started here and waited for here, so this is where bytes are
counted and where a rank that died becomes a `RankLostError`. Messages between neighbours are point to point: nothing is sent
that the receiver does not need. Gloo moves only CPU tensors point to point; where it is the group's backend, tensors of a card
travel through copies on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from anymamba.distributed.traffic import count
from anymamba.errors import OptionError, RankLostError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["CHECKS", "Pending", "Ranks", "by_key", "ranks_of"]

CHECKS = ("entry", "always", "never")
"""When the ranks compare what they were called with; see `context_parallel`."""

Result = TypeVar("Result")


class Pending:
    """A message on its way; `wait` returns what came with it."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._wait = wait

    def wait(self) -> Any:
        """Return what was received, once it is there."""
        return self._wait()


@dataclass(eq=False)
class Ranks:
    """A process group in the order of the sequence.

    Attributes
    ----------
    group : ProcessGroup
    key : str
        The name under which `by_key` finds this object again; operators of a compiled graph carry it.
    check : str
        One of `CHECKS`.
    rank, size : int
        This process's place in the group, and how many there are.
    unchecked : bool
        Nothing was compared since the context was entered.
    """

    group: ProcessGroup
    key: str
    check: str
    rank: int
    size: int
    unchecked: bool = True

    @property
    def first(self) -> bool:
        """Whether this rank holds the start of the sequence."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether this rank holds the end of the sequence."""
        return self.rank == self.size - 1

    def exchange(self, tensors: Sequence[torch.Tensor], to: int | None, come_from: int | None) -> Pending:
        """Send tensors to one rank and receive as many of the same shapes from another; None: do not.

        `wait` returns the received tensors, or None.
        """
        outgoing = [self._on_wire(tensor) for tensor in tensors]
        incoming = [torch.empty_like(tensor) for tensor in outgoing]
        operations: list[Any] = []
        for sent, received in zip(outgoing, incoming):
            if not sent.numel():
                continue
            if to is not None:
                operations.append(dist.P2POp(dist.isend, sent, self._global(to), self.group))
                count(sent=sent)
            if come_from is not None:
                operations.append(dist.P2POp(dist.irecv, received, self._global(come_from), self.group))
                count(received=received)
        with self._speaking():
            works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> list[torch.Tensor] | None:
            with self._speaking():
                for work in works:
                    work.wait()
            outgoing.clear()  # kept until now: it may not be freed while it is being sent
            return None if come_from is None else [got.to(like.device) for got, like in zip(incoming, tensors)]

        return Pending(wait)

    def shift(self, tensors: Sequence[torch.Tensor], *, forward: bool) -> Pending:
        """Send tensors to the next rank (or, not `forward`, to the one before); the ends send or receive nothing."""
        step = 1 if forward else -1
        to, come_from = self.rank + step, self.rank - step
        return self.exchange(
            tensors,
            to if 0 <= to < self.size else None,
            come_from if 0 <= come_from < self.size else None,
        )

    def gather(self, tensor: torch.Tensor) -> Pending:
        """Bring the tensors of all ranks, which have one shape, to each of them; `wait` returns them in order."""
        mine = self._on_wire(tensor)
        if not mine.numel():
            return Pending(lambda: [tensor] * self.size)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        count(sent=mine, received=mine, times=self.size - 1)
        with self._speaking():
            work = dist.all_gather(parts, mine, group=self.group, async_op=True)

        def wait() -> list[torch.Tensor]:
            with self._speaking():
                work.wait()
            return [part.to(tensor.device) for part in parts]

        return Pending(wait)

    def _global(self, rank: int) -> int:
        return int(dist.get_global_rank(self.group, rank))

    def _on_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        by_gloo = tensor.device.type != "cpu" and "gloo" in _backend(self.group, tensor.device)
        return tensor.detach().to("cpu" if by_gloo else tensor.device).contiguous()

    @contextlib.contextmanager
    def _speaking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what every backend raises for a closed connection and for its timeout
            raise RankLostError(
                f"Rank {self.rank} of {self.size} lost another rank of its sequence, or the way to it: a rank died, hangs, "
                "or does something else.",
                why=" ".join(str(error).split())[:400],  # NCCL says what went wrong in its last line
                next_step="read the output of the rank that failed first; under torchrun --max-restarts N all ranks start "
                "again, from your last checkpoint",
            ) from error


def _backend(group: ProcessGroup, device: torch.device) -> str:
    """Return the name of what moves this device's tensors: a group may have a backend for each kind of device."""
    name = str(dist.get_backend(group))
    for part in name.split(","):
        kind, _, backend = part.partition(":")
        if backend and kind == device.type:
            return backend
    return name


_known: dict[tuple[Any, str], Ranks] = {}
_keys: dict[str, Ranks] = {}


def ranks_of(group: ProcessGroup, check: str) -> Ranks:
    """Return the one object for this group and check; a compiled graph stays valid each time a context is entered."""
    if check not in CHECKS:
        raise OptionError(f"check is {check!r}, but must be one of {', '.join(map(repr, CHECKS))}.")
    found = _known.get((group, check))
    if found is None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise OptionError("This process is not a member of the group that was given.")
        found = Ranks(group, f"{len(_known)}", check, rank, size)
        _known[group, check] = _keys[found.key] = found
    return found


def by_key(key: str) -> Ranks:
    """Return the ranks that an operator was called with."""
    return _keys[key]
