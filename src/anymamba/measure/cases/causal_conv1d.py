"""Calls of the causal convolution, its decoding step and the states of packed sequences."""

from __future__ import annotations

from typing import Any

from anymamba.measure.cases import Case, Draw
from anymamba.ops.causal_conv1d import (
    CAUSAL_CONV1D,
    CAUSAL_CONV1D_UPDATE,
    CAUSAL_CONV1D_VARLEN_STATES,
    causal_conv1d_fn,
    causal_conv1d_update,
    causal_conv1d_varlen_states,
)


def mamba(draw: Draw, batch: int = 2, dim: int = 24, seqlen: int = 37) -> dict[str, Any]:
    """Return the arguments of the call in a Mamba block."""
    return {
        "x": draw.normal(batch, dim, seqlen),
        "weight": draw.normal(dim, 4),
        "bias": draw.normal(dim),
        "activation": "silu",
    }


def _states(draw: Draw) -> dict[str, Any]:
    channel_last = draw.normal(2, 37, 24, grad=False).transpose(1, 2).requires_grad_()
    return {
        "x": channel_last,
        "weight": draw.normal(24, 3),
        "initial_states": draw.normal(2, 24, 2),
        "return_final_states": True,
    }


def _packed(draw: Draw) -> dict[str, Any]:
    lengths = draw.integers(5, 1, 20, 11)
    seq_idx = draw.integers(0, 1, 2, 3).repeat_interleave(lengths)
    return {
        "x": draw.normal(1, 37, 24, grad=False).transpose(1, 2).requires_grad_(),
        "weight": draw.normal(24, 4),
        "bias": draw.normal(24),
        "seq_idx": seq_idx.unsqueeze(0),
        "activation": "silu",
    }


def step(draw: Draw, batch: int = 3, dim: int = 24) -> dict[str, Any]:
    """Return the arguments of a decoding step."""
    return {
        "x": draw.normal(batch, dim, grad=False),
        "conv_state": draw.normal(batch, dim, 4, grad=False),
        "weight": draw.normal(dim, 4, grad=False),
        "bias": draw.normal(dim, grad=False),
        "activation": "silu",
    }


def _circular(draw: Draw) -> dict[str, Any]:
    return {
        "x": draw.normal(3, 24, 2, grad=False),
        "conv_state": draw.normal(5, 24, 6, grad=False),
        "weight": draw.normal(24, 4, grad=False),
        "cache_seqlens": draw.integers(0, 5, 17),
        "conv_state_indices": draw.integers(4, 0, 2),
    }


def _varlen(draw: Draw) -> dict[str, Any]:
    return {"x": draw.normal(30, 24, grad=False), "cu_seqlens": draw.integers(0, 2, 2, 30), "state_len": 4}


CASES = [
    Case(CAUSAL_CONV1D, "as in a Mamba block", causal_conv1d_fn, mamba, quick=True),
    Case(CAUSAL_CONV1D, "channel last, states in and out", causal_conv1d_fn, _states),
    Case(CAUSAL_CONV1D, "packed sequences", causal_conv1d_fn, _packed),
    Case(CAUSAL_CONV1D_UPDATE, "one step", causal_conv1d_update, step, changed=("conv_state",), quick=True),
    Case(CAUSAL_CONV1D_UPDATE, "circular, indexed", causal_conv1d_update, _circular, changed=("conv_state",)),
    Case(CAUSAL_CONV1D_VARLEN_STATES, "three sequences", causal_conv1d_varlen_states, _varlen, quick=True),
]
