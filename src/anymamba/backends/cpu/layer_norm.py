"""Layer norm on the CPU: the torch backend's, which already works in cache-sized blocks of rows at memory speed."""

from __future__ import annotations

from anymamba.backends.cpu._device import refusal
from anymamba.backends.torch.layer_norm import layer_norm_backward, layer_norm_forward

__all__ = ["layer_norm_backward", "layer_norm_forward", "refusal"]
