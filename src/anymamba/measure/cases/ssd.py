"""Calls of the state-space dual scan of Mamba-2."""

from __future__ import annotations

from typing import Any

import torch

from anymamba.measure.cases import Case, Draw
from anymamba.ops.mamba_split_conv1d_scan import mamba_split_conv1d_scan_combined
from anymamba.ops.ssd import SSD, mamba_chunk_scan_combined


def _inputs(draw: Draw, batch: int, seqlen: int, heads: int, headdim: int, groups: int, dstate: int) -> dict[str, Any]:
    return {
        "x": draw.normal(batch, seqlen, heads, headdim),
        "dt": draw.normal(batch, seqlen, heads, scale=0.5),
        "A": draw.uniform(heads, low=-8.0, high=-0.5, dtype=draw.wide),
        "B": draw.normal(batch, seqlen, groups, dstate),
        "C": draw.normal(batch, seqlen, groups, dstate),
        "chunk_size": 256,
        "dt_bias": draw.uniform(heads, low=-4.0, high=-1.0, dtype=draw.wide),
        "dt_softplus": True,
    }


def mamba2(
    draw: Draw, batch: int = 2, seqlen: int = 75, heads: int = 4, headdim: int = 16, dstate: int = 16
) -> dict[str, Any]:
    """Return the arguments of the call in a Mamba-2 block."""
    return _inputs(draw, batch, seqlen, heads, headdim, 1, dstate) | {"D": draw.normal(heads, dtype=draw.wide)}


def _everything(draw: Draw) -> dict[str, Any]:
    # three packed sequences, one longer than two chunks of any backend's, none as long as a whole number of them
    lengths = (5, 270, 64)
    boundaries = [0, *(sum(lengths[: i + 1]) for i in range(len(lengths)))]
    numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
    return _inputs(draw, 1, sum(lengths), 4, 8, 2, 12) | {
        "D": draw.normal(4, 8, dtype=draw.wide),
        "z": draw.normal(1, sum(lengths), 4, 8),
        "initial_states": draw.normal(1, 4, 8, 12, dtype=draw.wide),
        "seq_idx": draw.integers(*numbers).unsqueeze(0),
        "cu_seqlens": draw.integers(*boundaries),
        "dt_limit": (0.001, 0.6),
        "return_final_states": True,
        "return_varlen_states": True,
    }


def _inside(draw: Draw) -> dict[str, Any]:
    heads, headdim, groups, dstate, seqlen = 4, 8, 2, 8, 40
    dim = heads * headdim
    conv = dim + 2 * groups * dstate
    return {
        "zxbcdt": draw.normal(2, seqlen, dim + conv + heads),
        "conv1d_weight": draw.normal(conv, 4, scale=0.5, dtype=draw.wide),
        "conv1d_bias": draw.normal(conv, dtype=draw.wide),
        "dt_bias": draw.uniform(heads, low=-4.0, high=-1.0, dtype=draw.wide),
        "A": draw.uniform(heads, low=-8.0, high=-0.5, dtype=draw.wide),
        "D": draw.normal(heads, dtype=draw.wide),
        "chunk_size": 256,
        "rmsnorm_weight": draw.normal(dim, dtype=draw.wide),
        "outproj_weight": draw.normal(24, dim, scale=0.2),
        "headdim": headdim,
        "ngroups": groups,
        "norm_before_gate": False,
    }


# Between its steps it rounds to the dtype of zxbcdt, as upstream does: several roundings instead of one.
_STEPS = {torch.float16: 4e-3, torch.bfloat16: 3e-2}

CASES = [
    Case(SSD, "as in a Mamba-2 block", mamba_chunk_scan_combined, mamba2, quick=True),
    Case(SSD, "packed, gated, states in and out", mamba_chunk_scan_combined, _everything),
    Case(
        SSD,
        "the inside of a Mamba-2 block",
        mamba_split_conv1d_scan_combined,
        _inside,
        output_bounds=_STEPS,
        gradient_bounds=_STEPS,
    ),
]
