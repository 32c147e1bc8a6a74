"""What autocast asks for on a device, on every torch from 2.1 on."""

from __future__ import annotations

import torch

__all__ = ["autocast_dtype"]


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype that autocast gives matrix products on this kind of device, or None where it is off."""
    if hasattr(torch, "get_autocast_dtype"):  # torch >= 2.4
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if device_type == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
