"""The gated norm on the CPU: a row at a time in one pass (_norm); narrow dtypes and other layouts by the torch backend."""

from __future__ import annotations

import torch

from anymamba.backends.cpu._device import refusal
from anymamba.backends.cpu._norm import backward, by_rows, forward
from anymamba.backends.cpu._tiles import like
from anymamba.backends.torch import layernorm_gated as fallback
from anymamba.backends.torch._norm import compute_dtype

__all__ = ["layernorm_gated_backward", "layernorm_gated_forward", "refusal"]


def layernorm_gated_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    is_rms_norm: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """See `anymamba.ops.layernorm_gated.LayerNormGatedBackend`."""
    if x.dtype != compute_dtype(x, weight) or not by_rows(x, z):
        return fallback.layernorm_gated_forward(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm)
    out, _, mean, rstd = forward(x, weight, bias, None, z, eps, group_size, norm_before_gate, is_rms_norm, False)
    return like(x, out), mean, rstd


def layernorm_gated_backward(
    dout: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    is_rms_norm: bool,
    recompute_out: bool,
    dz_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """See `anymamba.ops.layernorm_gated.LayerNormGatedBackend`."""
    if recompute_out or x.dtype != compute_dtype(x, weight, rstd) or not by_rows(x, z, dout):
        return fallback.layernorm_gated_backward(
            dout, x, weight, bias, z, mean, rstd, eps, group_size, norm_before_gate, is_rms_norm, recompute_out,
            dz_out,
        )  # fmt: skip
    dx, dweight, dbias, dz = backward(
        dout, x, weight, bias, z, None, None if is_rms_norm else mean, rstd, group_size, norm_before_gate
    )
    return (
        like(x, dx),
        like(weight, dweight),
        None if bias is None or dbias is None else like(bias, dbias),
        None if z is None or dz is None else like(z, dz) if dz_out is None else dz_out.copy_(dz),
        None,
    )
