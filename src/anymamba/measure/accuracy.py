"""How a result is compared with the truth: the same inputs, upcast to float64, through the reference backend on the CPU.

The measure is the relative error of a whole tensor, ||seen - wanted|| / ||wanted||; NaN never passes. `anymamba verify` and
the tests share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from anymamba.backends import use_backend

__all__ = [
    "GRADIENT_BOUND",
    "OUTPUT_BOUND",
    "Deviation",
    "deviations",
    "outputs_and_gradients",
    "reference_results",
    "relative_error",
    "upcast",
]

# What rounding of the inputs' dtype alone costs, with room for sums: fp16 and bf16 results are rounded once (2.1e-4, 1.7e-3).
OUTPUT_BOUND = {torch.float64: 1e-11, torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
GRADIENT_BOUND = {torch.float64: 1e-10, torch.float32: 6e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


class Deviation(NamedTuple):
    """How far one output or gradient is from the truth, and how far it may be."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound."""
        return self.error <= self.bound


def relative_error(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return ||seen - wanted|| / ||wanted|| in float64 (absolute when wanted is zero; infinite for a NaN or wrong shape)."""
    if seen.shape != wanted.shape:
        return float("inf")
    if wanted.numel() == 0:
        return 0.0
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    seen, wanted = seen.detach().cpu().to(wide), wanted.detach().cpu().to(wide)
    scale = wanted.norm().item() or 1.0
    error = (seen - wanted).norm().item() / scale
    return float("inf") if math.isnan(error) else error


def upcast(value: Any) -> Any:
    """Return a float64 (complex128) leaf on the CPU with the same values; other tensors on the CPU; the rest as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if not (value.is_floating_point() or value.is_complex()):
        return value.cpu()
    wide = torch.complex128 if value.is_complex() else torch.float64
    return value.detach().cpu().to(wide).clone().requires_grad_(value.requires_grad)


def outputs_and_gradients(
    function: Callable[..., Any], arguments: Mapping[str, Any], seed: int, changed: Sequence[str] = ()
) -> dict[str, torch.Tensor]:
    """Run forward and, where an argument requires grad, backward with fixed random output gradients.

    Parameters
    ----------
    function : callable
        Called with `arguments` by name; returns a tensor or a tuple of tensors and None.
    arguments : mapping
        Tensors that require grad are differentiated.
    seed : int
        Of the output gradients.
    changed : sequence of str
        Arguments that the function updates in place: their values count among the results.
    """
    results = function(**arguments)
    outputs = [
        out for out in (results if isinstance(results, (tuple, list)) else [results]) if isinstance(out, torch.Tensor)
    ]
    named = {f"output {i}": out for i, out in enumerate(outputs)}
    named |= {f"output {name}": arguments[name] for name in changed}
    wanted = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    if wanted:
        generator = torch.Generator().manual_seed(seed)
        pairs = []
        for out in outputs:  # drawn for every output, so that both runs draw the same
            # Rounded to bfloat16, so that it is exact in every dtype: both runs get the same gradient.
            draw = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(torch.bfloat16)
            if out.requires_grad:
                pairs.append((out, draw.to(device=out.device, dtype=out.dtype)))
        found = torch.autograd.grad(
            [out for out, _ in pairs], list(wanted.values()), [gradient for _, gradient in pairs], allow_unused=True
        )
        for (name, leaf), gradient in zip(wanted.items(), found):
            named[f"gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return named


def reference_results(
    function: Callable[..., Any], arguments: Mapping[str, Any], seed: int, changed: Sequence[str] = ()
) -> dict[str, torch.Tensor]:
    """Return what the float64 reference makes of the same values."""
    with use_backend("reference"):
        return outputs_and_gradients(function, {k: upcast(v) for k, v in arguments.items()}, seed, changed)


def deviations(
    seen: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], output_bound: float, gradient_bound: float
) -> list[Deviation]:
    """Compare two results of `outputs_and_gradients`, tensor by tensor; one that is missing is infinitely wrong."""
    found = []
    for name in [*wanted, *(name for name in seen if name not in wanted)]:
        bound = output_bound if name.startswith("output") else gradient_bound
        both = name in seen and name in wanted
        found.append(Deviation(name, relative_error(seen[name], wanted[name]) if both else float("inf"), bound))
    return found
