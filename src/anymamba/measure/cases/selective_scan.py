"""Calls of the selective scan of Mamba-1."""

from __future__ import annotations

from typing import Any

import torch

from anymamba.measure.cases import Case, Draw
from anymamba.ops.selective_scan import SELECTIVE_SCAN, selective_scan_fn


def mamba(draw: Draw, batch: int = 2, dim: int = 12, dstate: int = 16, seqlen: int = 37) -> dict[str, Any]:
    """Return the arguments of the call in a Mamba block."""
    return {
        "u": draw.normal(batch, dim, seqlen),
        "delta": draw.normal(batch, dim, seqlen, scale=0.5),
        "A": draw.uniform(dim, dstate, low=-4.0, high=-0.5, dtype=draw.wide),
        "B": draw.normal(batch, 1, dstate, seqlen),
        "C": draw.normal(batch, 1, dstate, seqlen),
        "D": draw.normal(dim, dtype=draw.wide),
        "z": draw.normal(batch, dim, seqlen),
        "delta_bias": draw.uniform(dim, low=-4.0, high=-1.0, dtype=draw.wide),
        "delta_softplus": True,
        "return_last_state": True,
    }


def _continued(draw: Draw) -> dict[str, Any]:
    # 300 steps: more than one piece between two kept states
    batch, dim, dstate, seqlen = 1, 4, 8, 300
    return {
        "u": draw.normal(batch, dim, seqlen),
        "delta": draw.uniform(batch, dim, seqlen, low=0.01, high=0.2),
        "A": draw.uniform(dim, dstate, low=-2.0, high=-0.2, dtype=draw.wide),
        "B": draw.normal(batch, 2, dstate, seqlen),
        "C": draw.normal(batch, 2, dstate, seqlen),
        "initial_state": draw.normal(batch, dim, dstate, dtype=draw.wide),
        "return_last_state": True,
    }


def _complex(draw: Draw) -> dict[str, Any]:
    batch, dim, dstate, seqlen = 2, 6, 8, 37
    real = draw.uniform(dim, dstate, low=-2.0, high=-0.2, dtype=draw.wide, grad=False)
    imaginary = draw.normal(dim, dstate, dtype=draw.wide, grad=False)
    return {
        "u": draw.normal(batch, dim, seqlen),
        "delta": draw.normal(batch, dim, seqlen, scale=0.5),
        "A": torch.complex(real, imaginary).requires_grad_(),
        "B": draw.normal(batch, dstate, 2 * seqlen),
        "C": draw.normal(batch, dstate, 2 * seqlen),
        "D": draw.normal(dim, dtype=draw.wide),
        "delta_softplus": True,
    }


CASES = [
    Case(SELECTIVE_SCAN, "as in a Mamba block", selective_scan_fn, mamba, quick=True),
    Case(SELECTIVE_SCAN, "groups, states in and out, 300 steps", selective_scan_fn, _continued),
    Case(SELECTIVE_SCAN, "complex A", selective_scan_fn, _complex),
]
