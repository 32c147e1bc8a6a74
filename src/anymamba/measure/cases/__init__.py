"""The calls that `anymamba verify` makes: small, typical, as data; one module an operator family, each with `CASES`.

`anymamba backends` makes the same calls to ask every backend whether it can. A new family is a new file here.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from anymamba.backends import Operator

__all__ = ["ALL_DTYPES", "Case", "Draw", "all_cases"]

ALL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Draw:
    """Draws a case's tensors: reproducible, the same values on every device."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.dtype, self.device = dtype, device
        self._generator = torch.Generator().manual_seed(seed)

    def normal(
        self, *shape: int, scale: float = 1.0, grad: bool = True, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return normal numbers as a leaf, in the case's dtype unless another is named."""
        values = torch.randn(shape, generator=self._generator, dtype=torch.float64) * scale
        return values.to(self.device, dtype or self.dtype).requires_grad_(grad)

    def uniform(
        self, *shape: int, low: float = 0.0, high: float = 1.0, grad: bool = True, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return uniform numbers as a leaf."""
        values = torch.rand(shape, generator=self._generator, dtype=torch.float64) * (high - low) + low
        return values.to(self.device, dtype or self.dtype).requires_grad_(grad)

    def integers(self, *values: int) -> torch.Tensor:
        """Return these integers as int32."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of parameters that stay precise: float32, or float64 with float64."""
        return torch.promote_types(self.dtype, torch.float32)


@dataclass(frozen=True)
class Case:
    """One call of an operator's public function.

    Parameters
    ----------
    operator : Operator
        What the call is about (it may use others too).
    name : str
        What is special about this call.
    function : callable
        Called with the arguments by name.
    arguments : callable
        Makes them from a Draw; tensors that require grad are differentiated.
    dtypes : tuple of dtype
        What the operator promises.
    changed : tuple of str
        Arguments updated in place.
    quick : bool
        Whether `--quick` makes this call.
    output_bounds, gradient_bounds : mapping
        Bounds other than those of `anymamba.measure.accuracy`, by dtype.
    """

    operator: Operator
    name: str
    function: Callable[..., Any]
    arguments: Callable[[Draw], dict[str, Any]]
    dtypes: tuple[torch.dtype, ...] = ALL_DTYPES
    changed: tuple[str, ...] = ()
    quick: bool = False
    output_bounds: Mapping[torch.dtype, float] = field(default_factory=dict)
    gradient_bounds: Mapping[torch.dtype, float] = field(default_factory=dict)


def all_cases() -> list[Case]:
    """Return every case of every module in this folder, in the modules' order."""
    found: list[Case] = []
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        found += importlib.import_module(f"{__name__}.{module.name}").CASES
    return found
