"""Dropout, residual addition and norm in whole-tensor passes, with the backward written out.

The sum is built in place in float32 (float64 for float64) and is the stored residual wherever the dtypes agree. The norm
itself is PyTorch's fused one; an RMS norm is a vector norm and one scaled copy. The backward reads the stored sum only.
"""

from __future__ import annotations

import torch

from anymamba.backends.torch._norm import compute_dtype, normalise
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
    compute = compute_dtype(x, weight, residual)
    v = x.to(compute)
    if rowscale is not None:
        v = v * rowscale.to(compute).unsqueeze(1)
    if keep is not None:
        v = _dropped(v, keep, dropout_p)
    if x1 is not None:
        v = v + (x1.to(compute) if keep1 is None else _dropped(x1.to(compute), keep1, dropout_p))
    if residual is not None:
        v = v + residual
    residual_out = None
    if residual_dtype is not None:
        residual_out = _rows(v, residual_dtype, not_this=x)
    w, b = weight.to(compute), None if bias is None else bias.to(compute)
    out1: torch.Tensor | None = None
    mean: torch.Tensor | None
    if weight1 is None and not is_rms_norm:
        y, means, rstds = torch.native_layer_norm(v, v.shape[1:], w, b, eps)
        mean, rstd = means.squeeze(1), rstds.squeeze(1)
    else:
        y, mean, rstd = normalise(v, eps, is_rms_norm)
        if weight1 is not None:
            y1 = y * weight1.to(compute)
            out1 = _like(x, y1 if bias1 is None else y1.add_(bias1), out_dtype)
        y.mul_(w)
        if b is not None:
            y.add_(b)
    return LayerNormForward(_like(x, y, out_dtype), out1, residual_out, mean, rstd)


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
    compute = compute_dtype(v, weight, rstd)
    w, scale = weight.to(compute), rstd.to(compute).unsqueeze(1)
    wide, dy = v.to(compute), dout.to(compute)
    xhat = wide * scale if mean is None else (wide - mean.unsqueeze(1)).mul_(scale)
    products = dy * xhat
    dweight, dbias = products.sum(0), None if bias is None else dy.sum(0)
    # dv = (g - xhat mean(g xhat) - mean(g)) rstd, where g = dy w + dy1 w1; an RMS norm lacks the last mean
    dweight1 = dbias1 = None
    if weight1 is None or dout1 is None:
        mean_product = torch.mv(products, w).div_(v.shape[1]).unsqueeze(1)
        dv = torch.mul(dy, w, out=products)
    else:
        w1, dy1 = weight1.to(compute), dout1.to(compute)
        products1 = dy1 * xhat
        dweight1, dbias1 = products1.sum(0), None if bias1 is None else dy1.sum(0)
        mean_product = (torch.mv(products, w) + torch.mv(products1, w1)).div_(v.shape[1]).unsqueeze(1)
        dv = torch.mul(dy, w, out=products).addcmul_(dy1, w1)
    out = None
    if mean is not None:
        dv.sub_(dv.mean(1, keepdim=True))
    dv.addcmul_(xhat, mean_product, value=-1).mul_(scale)
    if dresidual_out is not None:
        dv.add_(dresidual_out)
    if recompute_out:
        y = xhat.mul_(w)
        out = _rows(y if bias is None else y.add_(bias), dout.dtype)
    dresidual = _rows(dv, v.dtype) if has_residual else None
    dx1 = None
    if has_x1:
        dx1 = _rows(dv if keep1 is None else _dropped(dv, keep1, dropout_p), x_dtype)
    dx = dv if keep is None else _dropped(dv, keep, dropout_p)
    if rowscale is not None:
        dx = dx * rowscale.unsqueeze(1)
    return LayerNormBackward(
        _rows(dx, x_dtype),
        _like(weight, dweight),
        None if bias is None or dbias is None else _like(bias, dbias),
        dresidual,
        dx1,
        None if weight1 is None or dweight1 is None else _like(weight1, dweight1),
        None if bias1 is None or dbias1 is None else _like(bias1, dbias1),
        out,
    )


def _dropped(x: torch.Tensor, keep: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Return x where it is kept, scaled up for what is dropped; zero elsewhere (also for an infinite x)."""
    return torch.where(keep, x, 0).mul_(1 / (1 - dropout_p))


def _like(tensor: torch.Tensor, value: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return `value` in the layout of `tensor`; itself where it is that already."""
    found = torch.empty_like(tensor, dtype=dtype)
    return value if (value.dtype, value.stride()) == (found.dtype, found.stride()) else found.copy_(value)


def _rows(value: torch.Tensor, dtype: torch.dtype, not_this: torch.Tensor | None = None) -> torch.Tensor:
    """Return `value` contiguous in `dtype`; itself where it is that already, unless it is an input."""
    if value is not not_this and value.dtype == dtype and value.is_contiguous():
        return value
    return torch.empty(value.shape, dtype=dtype, device=value.device).copy_(value)
