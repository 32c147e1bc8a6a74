"""Operators over the last dimension work on rows: (..., dim) seen as (rows, dim)."""

from __future__ import annotations

import torch

from anymamba.errors import ShapeError

__all__ = ["as_rows", "check_columns"]


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x (..., dim) as (rows, dim): a view where its strides allow one."""
    return x.unsqueeze(0) if x.dim() == 1 else x if x.dim() == 2 else x.flatten(0, -2)


def check_columns(name: str, x: torch.Tensor) -> int:
    """Return the size of the last dimension; raise ShapeError unless there is one and it is not empty."""
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ShapeError(f"{name} has shape {tuple(x.shape)}, but must be (..., dim) with dim at least 1.")
    return x.shape[-1]
