"""Calls of the gated norm."""

from __future__ import annotations

from typing import Any

from anymamba.measure.cases import Case, Draw
from anymamba.ops.layernorm_gated import LAYERNORM_GATED, layernorm_fn


def _mamba2(draw: Draw) -> dict[str, Any]:
    return {
        "x": draw.normal(2, 7, 96),
        "weight": draw.normal(96, dtype=draw.wide),
        "bias": None,
        "z": draw.normal(2, 7, 96),
        "eps": 1e-5,
        "norm_before_gate": False,
        "is_rms_norm": True,
    }


def _groups(draw: Draw) -> dict[str, Any]:
    return {
        "x": draw.normal(2, 7, 96),
        "weight": draw.normal(96, dtype=draw.wide),
        "bias": draw.normal(96, dtype=draw.wide),
        "z": draw.normal(2, 7, 96),
        "group_size": 32,
    }


CASES = [
    Case(LAYERNORM_GATED, "RMS, as in a Mamba-2 block", layernorm_fn, _mamba2, quick=True),
    Case(LAYERNORM_GATED, "layer norm in groups, gate last", layernorm_fn, _groups),
]
