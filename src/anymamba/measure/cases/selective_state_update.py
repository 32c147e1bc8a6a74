"""Calls of the decoding step."""

from __future__ import annotations

from typing import Any

from anymamba.measure.cases import Case, Draw
from anymamba.ops.selective_state_update import SELECTIVE_STATE_UPDATE, selective_state_update


def mamba(draw: Draw, batch: int = 2, dim: int = 24, dstate: int = 16) -> dict[str, Any]:
    """Return the arguments of the call in Mamba.step."""
    return {
        "state": draw.normal(batch, dim, dstate, grad=False),
        "x": draw.normal(batch, dim, grad=False),
        "dt": draw.normal(batch, dim, grad=False),
        "A": draw.uniform(dim, dstate, low=-4.0, high=-0.5, grad=False, dtype=draw.wide),
        "B": draw.normal(batch, dstate, grad=False),
        "C": draw.normal(batch, dstate, grad=False),
        "D": draw.normal(dim, grad=False, dtype=draw.wide),
        "z": draw.normal(batch, dim, grad=False),
        "dt_bias": draw.uniform(dim, low=-4.0, high=-1.0, grad=False, dtype=draw.wide),
        "dt_softplus": True,
    }


def _mamba2(draw: Draw) -> dict[str, Any]:
    # One A, D and dt a head, tied over headdim and dstate, as Mamba2.step passes them
    batch, heads, groups, headdim, dstate = 2, 4, 2, 8, 16
    return {
        "state": draw.normal(5, heads, headdim, dstate, grad=False, dtype=draw.wide),
        "x": draw.normal(batch, heads, headdim, grad=False),
        "dt": draw.normal(batch, heads, 1, grad=False).expand(-1, -1, headdim),
        "A": draw.uniform(heads, 1, 1, low=-4.0, high=-0.5, grad=False, dtype=draw.wide).expand(-1, headdim, dstate),
        "B": draw.normal(batch, groups, dstate, grad=False),
        "C": draw.normal(batch, groups, dstate, grad=False),
        "D": draw.normal(heads, 1, grad=False, dtype=draw.wide).expand(-1, headdim),
        "dt_bias": draw.uniform(heads, 1, low=-4.0, high=-1.0, grad=False, dtype=draw.wide).expand(-1, headdim),
        "dt_softplus": True,
        "state_batch_indices": draw.integers(3, 0),
    }


CASES = [
    Case(
        SELECTIVE_STATE_UPDATE,
        "as in Mamba.step",
        selective_state_update,
        mamba,
        changed=("state",),
        quick=True,
    ),
    Case(
        SELECTIVE_STATE_UPDATE,
        "heads in groups, indexed, as in Mamba2.step",
        selective_state_update,
        _mamba2,
        changed=("state",),
    ),
]
