"""What autocast asks for on a device, on every torch from 2.1 on."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

__all__ = ["autocast_dtype", "without_autocast"]


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype that autocast gives matrix products on this kind of device, or None where it is off."""
    if hasattr(torch, "get_autocast_dtype"):  # torch >= 2.4
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if device_type == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


def without_autocast(device_type: str) -> Any:
    """Return a context in which matrix products keep the dtype of what they are given."""
    # Where autocast is off nothing is to be done, and not every kind of device has an autocast to switch off.
    if autocast_dtype(device_type) is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)
