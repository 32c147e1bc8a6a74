"""What the patched `mamba_ssm.utils.generation` uses in place of transformers' containers and CUDA's events."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["DecoderOutput", "decoder_output", "device_timer"]


@dataclass
class DecoderOutput:
    """The result of generation where transformers is not installed."""

    sequences: torch.Tensor
    scores: tuple[torch.Tensor, ...] | None = None

    def __getitem__(self, key: str | int) -> Any:
        """Return a field by name or position, as transformers' containers do."""
        fields = (self.sequences, self.scores)
        return fields[key] if isinstance(key, int) else getattr(self, key)


def decoder_output(sequences: torch.Tensor, scores: tuple[torch.Tensor, ...] | None = None) -> Any:
    """Return transformers' container if transformers works here (4 and 5 have this name), else our own."""
    try:
        from transformers.generation import GenerateDecoderOnlyOutput
    except Exception:  # absent, too old, or broken: a container is not worth failing for
        return DecoderOutput(sequences=sequences, scores=scores)
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores)


class _WallClock:
    """`torch.cuda.Event`'s interface for devices that run in step with Python."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._time = 0.0

    def record(self) -> None:
        """Take the time once the device is done."""
        self.synchronize()
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        """Wait for the device."""
        module = getattr(torch, self._device.type, None)
        synchronize = getattr(module, "synchronize", None)
        if self._device.type != "cpu" and synchronize is not None:
            synchronize()

    def elapsed_time(self, end: _WallClock) -> float:
        """Return milliseconds from this record to `end`'s."""
        return (end._time - self._time) * 1e3


def device_timer(device: torch.device, enable_timing: bool = False) -> Any:
    """Return a CUDA event on CUDA, a wall clock elsewhere."""
    return torch.cuda.Event(enable_timing=enable_timing) if device.type == "cuda" else _WallClock(device)
