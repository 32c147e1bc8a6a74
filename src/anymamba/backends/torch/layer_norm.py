"""Dropout, residual addition and norm, block by block of rows, with the backward written out.

Sums and statistics are float32 (float64 for float64). The backward reads the stored sum only.
"""

from __future__ import annotations

import torch

from anymamba.backends.torch._norm import compute_dtype, normalise, row_blocks, widened
from anymamba.machine.memory import empty, empty_like
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
    plain = x1 is None and rowscale is None and keep is None and weight1 is None
    if plain and x.dtype == out_dtype == compute and residual_dtype in (None, compute):
        w = weight if weight.dtype == compute else weight.to(compute)
        return _fused_forward(x, w, bias, residual, eps, is_rms_norm, residual_dtype is not None)
    w, b = weight.to(compute), None if bias is None else bias.to(compute)
    w1, b1 = None if weight1 is None else weight1.to(compute), None if bias1 is None else bias1.to(compute)
    out = empty_like(x, out_dtype)
    out1 = None if w1 is None else empty_like(out)
    residual_out = None if residual_dtype is None else empty(x, *x.shape, dtype=residual_dtype)
    rstd = x.new_empty(x.shape[0], dtype=compute)
    mean = None if is_rms_norm else torch.empty_like(rstd)
    for block, (y, y1) in row_blocks(x, compute, 2):
        v = y.copy_(x[block])
        if rowscale is not None:
            v.mul_(rowscale[block].unsqueeze(1))
        if keep is not None:
            _drop(v, keep[block], dropout_p)
        if x1 is not None:
            branch = y1.copy_(x1[block])
            v.add_(branch if keep1 is None else _drop(branch, keep1[block], dropout_p))
        if residual is not None:
            v.add_(residual[block])
        if residual_out is not None:
            residual_out[block] = v
        block_mean, block_rstd = normalise(v, eps, is_rms_norm, out=y)
        rstd[block] = block_rstd.squeeze(1)
        if mean is not None and block_mean is not None:
            mean[block] = block_mean.squeeze(1)
        if out1 is not None and w1 is not None:
            torch.mul(y, w1, out=y1)
            out1[block] = y1 if b1 is None else y1.add_(b1)
        y.mul_(w)
        out[block] = y if b is None else y.add_(b)
    return LayerNormForward(out, out1, residual_out, mean, rstd)


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
    plain = not has_x1 and rowscale is None and keep is None and weight1 is None and not recompute_out
    if plain and mean is not None and v.dtype == x_dtype == dout.dtype == compute:
        return _fused_backward(dout, v, weight, bias, dresidual_out, mean, rstd, has_residual)
    dim = v.shape[1]
    w, b = weight.to(compute), None if bias is None else bias.to(compute)
    w1 = None if weight1 is None else weight1.to(compute)
    dweight, dbias = torch.zeros_like(w), torch.zeros_like(w)
    dweight1, dbias1 = torch.zeros_like(w), torch.zeros_like(w)
    dx = empty(v, *v.shape, dtype=x_dtype)
    # Where nothing stands between the sum and an input, their gradients are one tensor
    same = keep is None and rowscale is None
    dresidual = None
    if has_residual:
        dresidual = dx if same and v.dtype == x_dtype else empty(v, *v.shape)
    dx1 = None
    if has_x1:
        dx1 = dx if same and keep1 is None else empty_like(dx)
    out = empty(v, *v.shape, dtype=dout.dtype) if recompute_out else None
    for block, (xhat, products, first, second) in row_blocks(v, compute, 4):
        scale = rstd[block].to(compute).unsqueeze(1)
        wide, dy = widened(v[block], first), widened(dout[block], second)
        if mean is not None:
            wide = torch.sub(wide, mean[block].unsqueeze(1), out=xhat)
        torch.mul(wide, scale, out=xhat)
        torch.mul(dy, xhat, out=products)
        dweight += products.sum(0)
        if b is not None:
            dbias += dy.sum(0)
        # dv = (g - xhat mean(g xhat) - mean(g)) rstd, where g = dy w + dy1 w1; an RMS norm lacks the last mean
        mean_product = torch.mv(products, w)
        dv = torch.mul(dy, w, out=products)
        if w1 is not None and dout1 is not None:
            dy1 = dout1[block].to(compute)
            products1 = dy1 * xhat
            dweight1 += products1.sum(0)
            if bias1 is not None:
                dbias1 += dy1.sum(0)
            mean_product += torch.mv(products1, w1)
            dv.addcmul_(dy1, w1)
        if mean is not None:
            dv.sub_(dv.mean(1, keepdim=True))
        dv.addcmul_(xhat, mean_product.div_(dim).unsqueeze(1), value=-1).mul_(scale)
        if dresidual_out is not None:
            dv.add_(dresidual_out[block])
        if out is not None:
            y = xhat.mul_(w)
            out[block] = y if b is None else y.add_(b)
        if dresidual is not None and dresidual is not dx:
            dresidual[block] = dv
        if dx1 is not None and dx1 is not dx:
            dx1[block] = dv if keep1 is None else _drop(xhat.copy_(dv), keep1[block], dropout_p)
        if keep is not None:
            _drop(dv, keep[block], dropout_p)
        if rowscale is not None:
            dv.mul_(rowscale[block].unsqueeze(1))
        dx[block] = dv
    return LayerNormBackward(
        dx,
        torch.empty_like(weight).copy_(dweight),
        None if bias is None else torch.empty_like(bias).copy_(dbias),
        dresidual,
        dx1,
        None if weight1 is None else torch.empty_like(weight1).copy_(dweight1),
        None if bias1 is None else torch.empty_like(bias1).copy_(dbias1),
        out,
    )


def _fused_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    is_rms_norm: bool,
    store: bool,
) -> LayerNormForward:
    """All of one dtype, without dropout and second branch: the sum and the output are all the fresh memory there is."""
    b = bias if bias is None or bias.dtype == weight.dtype else bias.to(weight.dtype)
    if is_rms_norm:
        out = empty_like(x)
        v = x if residual is None and not store else empty(x, *x.shape)
        rstd = x.new_empty(x.shape[0])
        for block, (y,) in row_blocks(x, x.dtype, 1):
            if residual is not None:
                torch.add(x[block], residual[block], out=v[block])
            elif store:
                v[block] = x[block]
            rstd[block] = normalise(v[block], eps, True, out=y)[1].squeeze(1)
            torch.mul(y, weight, out=out[block])
            if b is not None:
                out[block] += b
        return LayerNormForward(out, None, v if store else None, None, rstd)
    # PyTorch's own memory: its two passes are all there is to this, and advice to the system costs where memory is reused.
    v = x
    if residual is not None:
        v = torch.add(x, residual) if x.is_contiguous() else torch.add(x, residual, out=empty(x, *x.shape))
    y, mean, rstd = torch.native_layer_norm(v, v.shape[1:], weight, b, eps)
    out = y if x.is_contiguous() else torch.empty_like(x).copy_(y)
    residual_out = None
    if store:
        residual_out = v if v is not x else x.clone(memory_format=torch.contiguous_format)
    return LayerNormForward(out, None, residual_out, mean.view(-1), rstd.view(-1))


def _fused_backward(
    dout: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    has_residual: bool,
) -> LayerNormBackward:
    """The backward of `_fused_forward`."""
    w = weight.to(v.dtype)
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dout.contiguous(), v.contiguous(), v.shape[1:], mean.unsqueeze(1), rstd.unsqueeze(1), w,
        None if bias is None else w, [True, True, bias is not None],
    )  # fmt: skip
    if dresidual_out is not None:
        dx.add_(dresidual_out)
    dx = dx.contiguous()
    return LayerNormBackward(
        dx,
        torch.empty_like(weight).copy_(dweight),
        None if bias is None else torch.empty_like(bias).copy_(dbias),
        dx if has_residual else None,
        None,
        None,
        None,
        None,
    )


def _drop(x: torch.Tensor, keep: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Zero x in place where it is not kept (also an infinite one), scale it up for that where it is."""
    return x.masked_fill_(~keep, 0).mul_(1 / (1 - dropout_p))
