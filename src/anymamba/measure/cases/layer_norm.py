"""Calls of the norm with residual, and of the norm with projection."""

from __future__ import annotations

from typing import Any

from anymamba.measure.cases import Case, Draw
from anymamba.ops.layer_norm import LAYER_NORM, layer_norm_fn, layer_norm_linear_fn


def _block(draw: Draw) -> dict[str, Any]:
    return {
        "x": draw.normal(2, 7, 96),
        "weight": draw.normal(96, dtype=draw.wide),
        "bias": None,
        "residual": draw.normal(2, 7, 96, dtype=draw.wide),
        "prenorm": True,
        "residual_in_fp32": True,
        "is_rms_norm": True,
    }


def _two_branches(draw: Draw) -> dict[str, Any]:
    return {
        "x": draw.normal(2, 7, 96),
        "weight": draw.normal(96, dtype=draw.wide),
        "bias": draw.normal(96, dtype=draw.wide),
        "residual": draw.normal(2, 7, 96, dtype=draw.wide),
        "x1": draw.normal(2, 7, 96),
        "weight1": draw.normal(96, dtype=draw.wide),
        "bias1": draw.normal(96, dtype=draw.wide),
        "prenorm": True,
    }


def _linear(draw: Draw) -> dict[str, Any]:
    return {
        "x": draw.normal(2, 7, 96),
        "norm_weight": draw.normal(96),
        "norm_bias": draw.normal(96),
        "linear_weight": draw.normal(32, 96, scale=0.1),
        "linear_bias": draw.normal(32),
    }


CASES = [
    Case(LAYER_NORM, "RMS with residual, as before a block", layer_norm_fn, _block, quick=True),
    Case(LAYER_NORM, "two branches, two weights", layer_norm_fn, _two_branches),
    Case(LAYER_NORM, "norm and projection", layer_norm_linear_fn, _linear),
]
