"""How tests compare with the truth: the measure of `anymamba verify`, as an assertion."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from anymamba.backends import names, use_backend
from anymamba.measure.accuracy import (
    GRADIENT_BOUND,
    OUTPUT_BOUND,
    deviations,
    outputs_and_gradients,
    reference_results,
    relative_error,
    upcast,
)

__all__ = [
    "CPU_BACKENDS",
    "GRADIENT_BOUND",
    "OUTPUT_BOUND",
    "assert_matches_reference",
    "outputs_and_gradients",
    "relative_error",
    "upcast",
]

CPU_BACKENDS = [
    name
    for name in names()
    if name not in ("cuda", "reference") and importlib.import_module(f"anymamba.backends.{name}").unavailable() is None
]
"""What a test compares with the reference on a CPU: torch, and cpu where numba is installed."""


def assert_matches_reference(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    *,
    backend: str = "torch",
    dtype: torch.dtype | None = None,
    output_bound: float | None = None,
    gradient_bound: float | None = None,
    seed: int = 0,
) -> None:
    """Check outputs and gradients of `function(**arguments)` on `backend` against the float64 reference.

    `dtype` picks the bounds (default: the least precise floating dtype among the arguments).
    """
    if dtype is None:
        floats = [v.dtype for v in arguments.values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
        dtype = max(floats, key=lambda d: OUTPUT_BOUND[d])
    with use_backend(backend):
        seen = outputs_and_gradients(function, arguments, seed)
    wanted = reference_results(function, arguments, seed)
    assert seen.keys() == wanted.keys()
    for name, error, bound in deviations(
        seen, wanted, output_bound or OUTPUT_BOUND[dtype], gradient_bound or GRADIENT_BOUND[dtype]
    ):
        assert error <= bound, f"{name}: relative error {error:.3g} exceeds {bound:.3g} ({backend}, {dtype})"
