"""SwiGLU on the CPU: the torch backend's; two passes at memory speed leave nothing to gain."""

from __future__ import annotations

from anymamba.backends.cpu._device import refusal
from anymamba.backends.torch.swiglu import swiglu_backward, swiglu_forward

__all__ = ["refusal", "swiglu_backward", "swiglu_forward"]
