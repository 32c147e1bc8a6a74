"""The ways to say that a sequence is sharded: for the code in a `with` block, or for a model wherever it runs."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from anymamba.distributed import causal_conv1d, selective_scan, ssd
from anymamba.distributed.ranks import Ranks, ranks_of
from anymamba.errors import OptionError
from anymamba.ops._sharding import Sharding, current

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ContextParallel", "context_parallel", "group_of", "parallelize"]


class ContextParallel:
    """A context in which the operators of `anymamba.ops` see each rank's tensors as a part of one sequence.

    Made by `context_parallel`; may be entered any number of times, also within itself.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._before: list[Sharding | None] = []

    def enter(self) -> Sharding | None:
        """Take effect; return what was in force before."""
        before = current.sharding
        if before is not self:
            self.ranks.unchecked = True
        current.sharding = self
        return before

    def __enter__(self) -> ContextParallel:
        self._before.append(self.enter())
        return self

    def __exit__(self, *_: object) -> None:
        current.sharding = self._before.pop()

    def causal_conv1d(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """See `anymamba.ops._sharding.Sharding`."""
        return causal_conv1d.causal_conv1d(self.ranks, *arguments)

    def selective_scan(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """See `anymamba.ops._sharding.Sharding`."""
        return selective_scan.selective_scan(self.ranks, *arguments)

    def ssd(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `anymamba.ops._sharding.Sharding`."""
        return ssd.ssd(self.ranks, *arguments)


def group_of(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup:
    """Return the process group that a user names: itself, a one-dimensional DeviceMesh's, or the default one for None.

    Raises
    ------
    OptionError
        Without an initialised process group, or for a mesh of more dimensions.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise OptionError(
            "There is no process group.",
            why="torch.distributed.init_process_group was not called in this process",
            next_step='torch.distributed.init_process_group("gloo"), or "nccl" on cards, under torchrun',
        )
    if group is None:
        return dist.group.WORLD  # type: ignore[return-value]
    if hasattr(group, "mesh_dim_names"):
        mesh: Any = group
        if mesh.ndim != 1:
            raise OptionError(
                f"group is a DeviceMesh of {mesh.ndim} dimensions, but must have one.",
                next_step='name the dimension: mesh["cp"]',
            )
        return mesh.get_group()  # type: ignore[no-any-return]
    return group


def context_parallel(group: ProcessGroup | DeviceMesh | None = None, *, check: str = "entry") -> ContextParallel:
    """Return a context in which the sequence is sharded over the ranks of a group.

    Rank r of the group holds the r-th part. In the context `causal_conv1d_fn`, `selective_scan_fn`,
    `mamba_chunk_scan_combined` and everything made of them (`mamba_inner_fn`, `mamba_split_conv1d_scan_combined`, upstream's
    `Mamba` and `Mamba2`) take and return this rank's part, with the values and gradients of the whole sequence. Layers that
    look at one token at a time need nothing. Everything each rank computes of parameters must be added up over the ranks, as
    DDP and FSDP do.

    Parameters
    ----------
    group : ProcessGroup or DeviceMesh, optional
        Of one dimension, as ``mesh["cp"]``. Default: all ranks.
    check : {"entry", "always", "never"}
        When the ranks compare shapes, dtypes and options (1 KiB, one step): at the first operator after the context was
        entered, at every operator, or not at all.

    Returns
    -------
    ContextParallel
        To be entered by ``with``. A backward may run outside, but activation checkpointing runs forwards again in it:
        keep the backward inside then, or use `parallelize`.

    Raises
    ------
    OptionError

    Notes
    -----
    States are local: `initial_states` is the state before the whole sequence and read on the first rank only; last and final
    states are those after this rank's part (on the last rank: of the whole). `seq_idx` is this rank's part; `cu_seqlens` the
    whole, the same on every rank, and varlen states are zero where a sequence does not end in this rank's part.
    """
    return ContextParallel(ranks_of(group_of(group), check))


def parallelize(
    model: torch.nn.Module, group: ProcessGroup | DeviceMesh | None = None, *, check: str = "entry"
) -> torch.nn.Module:
    """Let a model always see its input as this rank's part of a sequence, as if called in `context_parallel`.

    Every module that is not PyTorch's own enters the context around its forward, so that a part of the model that runs by
    itself does too: activation checkpointing in a backward, a pipeline stage, torch.compile of one block. Call it before
    wrapping in DDP, `fully_shard` or `torch.compile`. Parameters, their names and state dicts stay as they are.

    Parameters
    ----------
    model : Module
        Changed in place.
    group, check
        As in `context_parallel`.

    Returns
    -------
    Module
        The model.

    Raises
    ------
    OptionError
    """
    context = context_parallel(group, check=check)
    for module in model.modules():
        if not type(module).__module__.startswith("torch."):
            module.forward = _within(context, module.forward)
    return model


def _within(context: ContextParallel, forward: Any) -> Any:
    @functools.wraps(forward)
    def sharded(*arguments: Any, **options: Any) -> Any:
        before = context.enter()
        try:
            return forward(*arguments, **options)
        finally:
            current.sharding = before

    return sharded
