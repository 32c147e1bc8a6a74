"""The gated norm on the CPU: the torch backend's, which already works in cache-sized blocks of rows."""

from __future__ import annotations

from anymamba.backends.cpu._device import refusal
from anymamba.backends.torch.layernorm_gated import layernorm_gated_backward, layernorm_gated_forward

__all__ = ["layernorm_gated_backward", "layernorm_gated_forward", "refusal"]
