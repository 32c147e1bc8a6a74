"""Keep PyTorch's autocast out of a backend: it would round the operands of every matrix product to half precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

__all__ = ["without_autocast"]

_is_available: Callable[[str], bool] = getattr(torch.amp, "is_autocast_available", None) or (
    lambda device_type: device_type in ("cpu", "cuda", "xpu")  # torch < 2.4
)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context in which matrix products on `device` run in the dtype of their operands."""
    if not _is_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
