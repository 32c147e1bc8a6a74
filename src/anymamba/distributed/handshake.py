"""The ranks compare what they were called with before they compute: a difference is an error on every rank, not a hang.

One all-gather of 1 KiB. What must agree is written down as text: the operator, shapes without the length, dtypes, options,
and which tensors want gradients (a rank whose backward does not run would leave the others waiting).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from anymamba.distributed.ranks import Ranks
from anymamba.errors import AnymambaError, ShapeError

__all__ = ["check_agreement", "refuse"]

SIZE = 1024
_REFUSED = "refused: "


def check_agreement(
    ranks: Ranks,
    operator: str,
    length: int,
    like: torch.Tensor,
    tensors: Mapping[str, torch.Tensor | None],
    options: object,
    time: Mapping[str, int],
    least: int = 1,
) -> None:
    """Raise ShapeError on every rank unless all ranks were called alike.

    Parameters
    ----------
    ranks : Ranks
    operator : str
        Its name.
    length : int
        Of this rank's part of the sequence; may differ.
    like : Tensor
        On the device that the messages travel from.
    tensors : mapping
        The arguments.
    options : object
        What else must agree.
    time : mapping
        For each tensor with one, the dimension of time, which may differ.
    least : int
        The shortest part allowed.

    Raises
    ------
    ShapeError, RankLostError
    """
    if ranks.size == 1:
        return
    if ranks.check == "never" or (ranks.check == "entry" and not ranks.unchecked):
        if length < least:
            raise ShapeError(_too_short(operator, least, f"this one (rank {ranks.rank}) has {length}"))
        return
    ranks.unchecked = False
    described = ", ".join(
        f"{name} {_shape(tensor, time.get(name))} {str(tensor.dtype).removeprefix('torch.')}"
        + ("*" if tensor.requires_grad else "")
        for name, tensor in tensors.items()
        if tensor is not None
    )
    _compare(ranks, like, f"{length}|{operator}({described}) {options}", operator, least)


def refuse(ranks: Ranks, like: torch.Tensor, error: AnymambaError) -> None:
    """Tell the other ranks, which are about to compare, that this one refuses its arguments."""
    if ranks.size > 1 and (ranks.check == "always" or (ranks.check == "entry" and ranks.unchecked)):
        ranks.unchecked = False
        _gathered(ranks, like, f"0|{_REFUSED}{error.what}")


def _shape(tensor: torch.Tensor, time: int | None) -> str:
    sizes = ["L" if time is not None and i == time % tensor.dim() else str(size) for i, size in enumerate(tensor.shape)]
    return f"({', '.join(sizes)})"


def _compare(ranks: Ranks, like: torch.Tensor, mine: str, operator: str, least: int) -> None:
    texts = _gathered(ranks, like, mine)
    lengths = [text.partition("|")[0] for text in texts]
    calls = [text.partition("|")[2] for text in texts]
    if len(set(calls)) > 1:
        told = "\n".join(f"  rank {rank}: length {lengths[rank]}, {call}" for rank, call in enumerate(calls))
        raise ShapeError(
            f"The ranks of one sequence were called differently:\n{told}",
            why="each rank must be given the same arguments but for its own part of the sequence "
            "(L: that length may differ; *: wants a gradient)",
            next_step="look at how the batch is split over the ranks; anymamba.distributed.shard_sequence does it",
        )
    if min(map(int, lengths)) < least:
        told = ", ".join(f"rank {rank} has {length}" for rank, length in enumerate(lengths))
        raise ShapeError(_too_short(operator, least, told))


def _too_short(operator: str, least: int, told: str) -> str:
    return f"{operator}: every rank must hold at least {least} columns of the sequence, but {told}."


def _gathered(ranks: Ranks, like: torch.Tensor, mine: str) -> list[str]:
    data = mine.encode()[:SIZE]
    message = torch.zeros(SIZE, dtype=torch.uint8)
    message[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    answers = ranks.gather(message.to(like.device)).wait()
    return [bytes(answer.tolist()).rstrip(b"\0").decode(errors="replace") for answer in answers]
