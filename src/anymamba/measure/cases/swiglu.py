"""Calls of SwiGLU."""

from __future__ import annotations

from anymamba.measure.cases import Case
from anymamba.ops.swiglu import SWIGLU, swiglu

CASES = [
    Case(SWIGLU, "as in a gated MLP", swiglu, lambda draw: {"xy": draw.normal(2, 7, 96)}, quick=True),
]
