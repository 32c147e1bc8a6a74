"""Matrix products that work for half precision on CPU in every torch: before 2.2 there is none in float16 there."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

__all__ = ["einsum", "linear"]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` in the dtype of `x`; where torch has no product for it, computed in float32."""
    if x.dtype is torch.float16 and x.device.type == "cpu" and not _cpu_multiplies_half():
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    return F.linear(x, weight, bias)


def einsum(equation: str, *operands: torch.Tensor) -> torch.Tensor:
    """Return ``torch.einsum(equation, *operands)``; where torch has no product for their dtype, computed in float32."""
    first = operands[0]
    if first.dtype is torch.float16 and first.device.type == "cpu" and not _cpu_multiplies_half():
        found: torch.Tensor = torch.einsum(equation, *(operand.float() for operand in operands))
        return found.to(first.dtype)
    result: torch.Tensor = torch.einsum(equation, *operands)
    return result


@cache
def _cpu_multiplies_half() -> bool:
    one = torch.ones(1, 1, dtype=torch.float16)
    try:
        torch.mm(one, one)
    except RuntimeError:  # "addmm_impl_cpu_" not implemented for 'Half'
        return False
    return True
