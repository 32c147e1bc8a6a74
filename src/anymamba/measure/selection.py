"""Devices and dtypes as people type them."""

from __future__ import annotations

import torch

from anymamba.errors import MachineError, OptionError

__all__ = ["DTYPES", "parse_device", "parse_dtype", "present_devices"]

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


def present_devices() -> list[torch.device]:
    """Return the CPU and, where there is one, the NVIDIA (or ROCm) card."""
    return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]


def parse_device(name: str) -> torch.device:
    """Return the device of that name; "" is the best one here.

    Raises
    ------
    OptionError
        If it is no device's name.
    MachineError
        If this machine does not have it.
    """
    if not name:
        return present_devices()[-1]
    try:
        device = torch.device(name)
    except RuntimeError:
        raise OptionError(f"--device is {name!r}, but must be like cpu, cuda, cuda:1, mps or xpu.") from None
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise MachineError(
            f"This machine has no {device} that PyTorch can use.",
            why=(str(error).splitlines() or [type(error).__name__])[0],
            next_step="anymamba doctor",
        ) from None
    return device


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name, or raise OptionError."""
    if name not in DTYPES:
        raise OptionError(f"--dtype is {name!r}, but must be one of {', '.join(DTYPES)}.")
    return DTYPES[name]
