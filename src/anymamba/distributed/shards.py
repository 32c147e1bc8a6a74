"""A rank's part of a tensor, and the whole from the parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from anymamba.distributed.context import group_of
from anymamba.distributed.ranks import ranks_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["gather_sequence", "shard_sequence"]


def shard_sequence(
    tensor: torch.Tensor, group: ProcessGroup | DeviceMesh | None = None, *, dim: int = 1
) -> torch.Tensor:
    """Return this rank's part of a tensor that every rank has whole.

    Parameters
    ----------
    tensor : Tensor
        Any shape and dtype: tokens, labels (shift them by one first), `seq_idx`.
    group : ProcessGroup or DeviceMesh, optional
        As in `context_parallel`.
    dim : int
        The dimension of time.

    Returns
    -------
    Tensor
        A view. The first ranks hold one more where the length is no multiple of their number.
    """
    ranks = ranks_of(group_of(group), "never")
    return tensor.tensor_split(ranks.size, dim=dim)[ranks.rank]


def gather_sequence(
    tensor: torch.Tensor, group: ProcessGroup | DeviceMesh | None = None, *, dim: int = 1
) -> torch.Tensor:
    """Return the whole from every rank's part, on every rank; without gradients.

    Parameters
    ----------
    tensor : Tensor
        This rank's part; of one shape on all ranks but for the dimension of time.
    group : ProcessGroup or DeviceMesh, optional
        As in `context_parallel`.
    dim : int
        The dimension of time.

    Returns
    -------
    Tensor
    """
    owners = group_of(group)
    ranks = ranks_of(owners, "never")
    length = torch.tensor([tensor.shape[dim]], dtype=torch.int64, device=tensor.device)
    lengths = [int(found) for found in ranks.gather(length).wait()]
    if max(lengths) == 0 or dist.get_world_size(owners) == 1:
        return tensor.detach()
    rest = [0, 0] * (tensor.dim() - 1 - dim % tensor.dim()) + [0, max(lengths) - tensor.shape[dim]]
    parts = ranks.gather(torch.nn.functional.pad(tensor.detach(), rest)).wait()
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, lengths)], dim=dim)
