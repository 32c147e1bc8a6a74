"""What this machine can do at best: bytes copied and matrix products a second, measured, and what a call must move at least."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from anymamba.measure.bench.timing import Stopwatch

__all__ = ["copy_rate", "least_bytes", "matrix_rate"]

COPIED = {"cuda": 2**28, "cpu": 2**25}
"""Floats that are copied: several times any cache of the device."""


def copy_rate(device: torch.device, watch: Stopwatch) -> float:
    """Return what a large copy moves, bytes read and written, in bytes a second (the fastest of 5)."""
    count = COPIED["cuda" if device.type == "cuda" else "cpu"]
    source = torch.ones(count, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.numel() * source.element_size() / min(watch(lambda: target.copy_(source), 1) for _ in range(5))


def matrix_rate(device: torch.device, dtype: torch.dtype, watch: Stopwatch) -> float:
    """Return the multiplications and additions a second of a large matrix product (the fastest of 3)."""
    size = 4096 if device.type == "cuda" else 512
    one = torch.ones(size, size, device=device, dtype=dtype)
    one @ one
    return 2 * size**3 / min(watch(lambda: one @ one, 1) for _ in range(3))


def least_bytes(arguments: Mapping[str, Any], outputs: list[torch.Tensor], backward: bool) -> int:
    """Return what any implementation moves at least: every argument read once and every result written once.

    With backward: the arguments and the results' gradients read once more, the arguments' gradients written.
    """
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    read, written = sum(map(_bytes, tensors)), sum(map(_bytes, outputs))
    if not backward:
        return read + written
    return 2 * (read + written) + sum(_bytes(tensor) for tensor in tensors if tensor.requires_grad)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
