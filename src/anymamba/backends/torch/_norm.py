"""What the norms of this backend share: the precision, the normalised values and SiLU with its slope."""

from __future__ import annotations

import torch

__all__ = ["compute_dtype", "normalise", "silu_gradient"]


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """Return float32, or float64 where a tensor is float64."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def normalise(x: torch.Tensor, eps: float, is_rms_norm: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return (x - mean) * rstd over the last dimension in fresh memory, the mean (None for an RMS norm) and rstd."""
    size = x.shape[-1]
    if is_rms_norm:
        rstd = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()
        return x * rstd, None, rstd.squeeze(-1)
    xhat, mean, rstd = torch.native_layer_norm(x, (size,), None, None, eps)
    return xhat, mean.squeeze(-1), rstd.squeeze(-1)


def silu_gradient(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return silu(z) and its derivative sigmoid(z) * (1 + z * (1 - sigmoid(z))), in fresh memory."""
    sigmoid = torch.sigmoid(z)
    gate = z * sigmoid
    # silu' = sigmoid + gate - gate * sigmoid
    slope = torch.addcmul(gate, gate, sigmoid, value=-1).add_(sigmoid)
    return gate, slope
