"""Dropout, residual addition and norm, written as their formulas."""

from __future__ import annotations

import torch

from anymamba.backends.reference._autograd import gradients
from anymamba.ops.layer_norm import LayerNormBackward, LayerNormForward

__all__ = ["layer_norm_backward", "layer_norm_forward"]


def layer_norm_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    x1: torch.Tensor | None,
    weight1: torch.Tensor | None,
    bias1: torch.Tensor | None,
    rowscale: torch.Tensor | None,
    keep: torch.Tensor | None,
    keep1: torch.Tensor | None,
    dropout_p: float,
    eps: float,
    is_rms_norm: bool,
    out_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
) -> LayerNormForward:
    """See `anymamba.ops.layer_norm.LayerNormBackend`."""
    compute = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    if residual is not None:
        compute = torch.promote_types(compute, residual.dtype)
    v = x.to(compute)
    if rowscale is not None:
        v = v * rowscale.to(compute).unsqueeze(1)
    if keep is not None:
        v = v * keep / (1 - dropout_p)
    if x1 is not None:
        v = v + (x1.to(compute) if keep1 is None else x1.to(compute) * keep1 / (1 - dropout_p))
    if residual is not None:
        v = v + residual.to(compute)
    mean = None if is_rms_norm else v.mean(1)
    centred = v if mean is None else v - mean.unsqueeze(1)
    rstd = 1 / torch.sqrt(centred.square().mean(1) + eps)
    xhat = centred * rstd.unsqueeze(1)

    def affine(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = xhat * weight.to(compute)
        return torch.empty_like(x, dtype=out_dtype).copy_(y if bias is None else y + bias.to(compute))

    residual_out = None
    if residual_dtype is not None:
        residual_out = torch.empty(x.shape, dtype=residual_dtype, device=x.device).copy_(v)
    out1 = None if weight1 is None else affine(weight1, bias1)
    return LayerNormForward(affine(weight, bias), out1, residual_out, mean, rstd)


def layer_norm_backward(
    dout: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight1: torch.Tensor | None,
    bias1: torch.Tensor | None,
    dout1: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    rowscale: torch.Tensor | None,
    keep: torch.Tensor | None,
    keep1: torch.Tensor | None,
    dropout_p: float,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    eps: float,
    is_rms_norm: bool,
    x_dtype: torch.dtype,
    has_residual: bool,
    has_x1: bool,
    recompute_out: bool,
) -> LayerNormBackward:
    """See `anymamba.ops.layer_norm.LayerNormBackend`."""

    def formula(
        v: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        weight1: torch.Tensor | None,
        bias1: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        found = layer_norm_forward(
            v, weight, bias, None, None, weight1, bias1, None, None, None, 0.0, eps, is_rms_norm, rstd.dtype, None
        )
        return found.out, found.out1

    wide = v.to(rstd.dtype)
    dv, dweight, dbias, dweight1, dbias1 = gradients(formula, (wide, weight, bias, weight1, bias1), (dout, dout1))
    assert dv is not None and dweight is not None
    if dresidual_out is not None:
        dv = dv + dresidual_out
    dx = dv if keep is None else dv * keep / (1 - dropout_p)
    if rowscale is not None:
        dx = dx * rowscale.unsqueeze(1)
    dx1 = dv if keep1 is None else dv * keep1 / (1 - dropout_p)

    def rows(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(v.shape, dtype=dtype, device=v.device).copy_(gradient)

    out = None
    if recompute_out:
        value = formula(wide, weight, bias, weight1, bias1)[0]
        assert value is not None
        out = rows(value, dout.dtype)
    return LayerNormBackward(
        rows(dx, x_dtype),
        dweight,
        dbias,
        rows(dv, v.dtype) if has_residual else None,
        rows(dx1, x_dtype) if has_x1 else None,
        dweight1,
        dbias1,
        out,
    )
