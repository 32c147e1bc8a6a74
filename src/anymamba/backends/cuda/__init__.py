"""CUDA kernels compiled on this machine by the NVRTC that PyTorch carries."""

from __future__ import annotations

import functools

import torch

__all__ = ["PRIORITY", "SUMMARY", "unavailable", "warmup"]

PRIORITY = 10
SUMMARY = "CUDA kernels compiled on this machine by the NVRTC that PyTorch carries; no toolkit, no Triton"


def unavailable() -> str | None:
    """Return None, or why no kernel can run in this process. Touches neither the driver nor NVRTC without a card."""
    from anymamba.backends.cuda.runtime import kernel

    return None if kernel._replacement is not None else _unavailable()


@functools.cache
def _unavailable() -> str | None:
    if torch.version.cuda is None:
        other = getattr(torch.version, "hip", None)
        return (
            "this PyTorch is built for ROCm" if other else f"this PyTorch ({torch.__version__}) is built without CUDA"
        )
    if not torch.cuda.is_available():
        return (
            "PyTorch sees no NVIDIA card (torch.cuda.is_available() is False):"
            " there is none, or its driver is older than this PyTorch needs"
        )
    from anymamba.backends.cuda.runtime.kernel import why_no_runtime

    return why_no_runtime()


def device_refusal(device: torch.device) -> str | None:
    """Return None if kernels run on `device`, or why not: what every family's `refusal` asks first."""
    from anymamba.backends.cuda.runtime import runtime

    current = runtime()
    if device.type != current.driver.device_type:
        return f"tensors are on {device}, not on a CUDA device"
    index = device.index if device.index is not None else current.driver.current_device()
    return current.why_unsupported(index)
