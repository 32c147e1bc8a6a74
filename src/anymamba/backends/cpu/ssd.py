"""The chunked scan on the CPU: the torch backend's, because matrix products over chunks are what it spends its time on."""

from __future__ import annotations

from anymamba.backends.cpu._device import refusal
from anymamba.backends.torch.ssd import ssd_backward, ssd_forward

__all__ = ["refusal", "ssd_backward", "ssd_forward"]
