"""How tests compare with the truth: the same inputs, upcast to float64, through the reference backend.

The measure is the relative error of the whole tensor, ||seen - wanted|| / ||wanted||; NaN never passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anymamba.backends import use_backend

# What rounding of inputs' dtype alone costs, with room for sums: fp16 and bf16 results are rounded once (2.1e-4, 1.7e-3).
OUTPUT_BOUND = {torch.float64: 1e-11, torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
GRADIENT_BOUND = {torch.float64: 1e-10, torch.float32: 6e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def relative_error(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return ||seen - wanted|| / ||wanted|| in float64 (absolute when wanted is zero; infinite for a NaN or wrong shape)."""
    if seen.shape != wanted.shape:
        return float("inf")
    if wanted.numel() == 0:
        return 0.0
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    seen, wanted = seen.detach().to(wide), wanted.detach().to(wide)
    scale = wanted.norm().item() or 1.0
    error = (seen - wanted).norm().item() / scale
    return error if error == error else float("inf")


def upcast(value: Any) -> Any:
    """Return a float64 (complex128) leaf with the same values; anything that is no floating tensor is returned as it is."""
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    wide = torch.complex128 if value.is_complex() else torch.float64
    return value.detach().to(wide).requires_grad_(value.requires_grad)


def outputs_and_gradients(
    function: Callable[..., Any], arguments: dict[str, Any], seed: int
) -> dict[str, torch.Tensor]:
    """Run forward and, where an argument requires grad, backward with fixed random output gradients."""
    results = function(**arguments)
    outputs = [
        out for out in (results if isinstance(results, (tuple, list)) else [results]) if isinstance(out, torch.Tensor)
    ]
    named = {f"output {i}": out for i, out in enumerate(outputs)}
    wanted = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    if wanted:
        generator = torch.Generator().manual_seed(seed)
        pairs = []
        for out in outputs:  # drawn for every output, so that both runs draw the same
            draw = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device)
            if out.requires_grad:
                pairs.append((out, draw.to(out.dtype)))
        found = torch.autograd.grad(
            [out for out, _ in pairs], list(wanted.values()), [gradient for _, gradient in pairs], allow_unused=True
        )
        for (name, leaf), gradient in zip(wanted.items(), found):
            named[f"gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return named


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
    with use_backend("reference"):
        wanted = outputs_and_gradients(function, {k: upcast(v) for k, v in arguments.items()}, seed)
    assert seen.keys() == wanted.keys()
    for name, value in seen.items():
        bound = (
            (output_bound or OUTPUT_BOUND[dtype])
            if name.startswith("output")
            else (gradient_bound or GRADIENT_BOUND[dtype])
        )
        error = relative_error(value, wanted[name])
        assert error <= bound, f"{name}: relative error {error:.3g} exceeds {bound:.3g} ({backend}, {dtype})"
