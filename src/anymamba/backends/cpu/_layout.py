"""Which layout each CPU kernel reads fastest, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["path"]

_TIME = {"causal_conv1d": ("x",), "selective_scan": ("u", "delta", "z", "B", "C")}


def path(operator: str, tensors: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the path in words and what to change for a faster one; see the CUDA backend's."""
    if operator == "causal_conv1d" and "x" in tensors:
        x = tensors["x"]
        if "seq_idx" in tensors:
            return "tiles of channels and steps, for sequences packed into rows", []
        if x.strides[-1] == 1:
            return "rows: lanes are steps, read where they lie", []
        return "tiles: lanes are channels, read where they lie", _scattered(operator, tensors)
    if operator == "selective_scan":
        return "tiles of channels and steps, brought into the cache from any strides", _scattered(operator, tensors)
    return "a kernel that takes any strides", []


def _scattered(operator: str, tensors: Mapping[str, Any]) -> list[str]:
    """Name the tensors in which neither channels nor steps lie side by side: each number costs a cache line of its own."""
    return [
        f"{name}: strides {tensors[name].strides}: neither its channels nor its steps lie side by side; "
        f"{name}.contiguous() is read faster"
        for name in _TIME[operator]
        if name in tensors
        and len(tensors[name].shape) >= 3
        and 1 not in tensors[name].strides[1:]
        and any(tensors[name].strides)
    ]
