"""Where an operator's call goes while the sequence is sharded over ranks: `anymamba.distributed` sets it, the operators ask.

One attribute for the whole process, neither a context variable nor thread-local: activation checkpointing runs forwards again
from autograd's own threads, which see neither. torch.compile guards on the attribute as on any global.
"""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Sharding", "current"]


class Sharding(Protocol):
    """The operators over a sequence of which each rank holds a part; arguments as of the functions of `anymamba.ops`."""

    def causal_conv1d(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        seq_idx: torch.Tensor | None,
        initial_states: torch.Tensor | None,
        return_final_states: bool,
        final_states_out: torch.Tensor | None,
        activation: str | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and the states after this rank's part (to be ignored unless asked for)."""
        ...

    def selective_scan(
        self,
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
        """Return out and the state after this rank's part."""
        ...

    def ssd(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None,
        z: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        initial_states: torch.Tensor | None,
        seq_idx: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        dt_softplus: bool,
        dt_limit: tuple[float, float],
        return_final_states: bool,
        return_varlen_states: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return out, the states after this rank's part, and those of the packed sequences that end in it."""
        ...


class _Current:
    """Holds what is in force."""

    sharding: Sharding | None = None


current = _Current()
