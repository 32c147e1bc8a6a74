"""A call of the inside of a Mamba block: convolution, projections and scan together."""

from __future__ import annotations

from typing import Any

import torch

from anymamba.measure.cases import Case, Draw
from anymamba.ops.mamba_inner import mamba_inner_fn
from anymamba.ops.selective_scan import SELECTIVE_SCAN


def _block(draw: Draw) -> dict[str, Any]:
    dim, rank, dstate, out_dim = 16, 2, 8, 8
    return {
        "xz": draw.normal(2, 2 * dim, 37),
        "conv1d_weight": draw.normal(dim, 1, 4, scale=0.5),
        "conv1d_bias": draw.normal(dim),
        "x_proj_weight": draw.normal(rank + 2 * dstate, dim, scale=0.25),
        "delta_proj_weight": draw.normal(dim, rank, scale=0.5),
        "out_proj_weight": draw.normal(out_dim, dim, scale=0.25),
        "out_proj_bias": None,
        "A": draw.uniform(dim, dstate, low=-4.0, high=-0.5, dtype=draw.wide),
        "D": draw.normal(dim, dtype=draw.wide),
        "delta_bias": draw.uniform(dim, low=-4.0, high=-1.0, dtype=draw.wide),
        "delta_softplus": True,
    }


# Three roundings of 16-bit values stand between input and output: convolution, projections, scan
_ROUNDED = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}

CASES = [
    Case(SELECTIVE_SCAN, "mamba_inner_fn, the whole block", mamba_inner_fn, _block, quick=True, output_bounds=_ROUNDED),
]
