"""The gated norm in whole-tensor passes, with its backward written out.

The normalised values come from PyTorch's own layer norm (one fused pass) or, for an RMS norm, from a vector norm; all in
float32 (float64 for float64). The backward needs xhat and the statistics only, and writes in place where it may.
"""

from __future__ import annotations

import torch

from anymamba.backends.torch._norm import compute_dtype, normalise, silu_gradient

__all__ = ["layernorm_gated_backward", "layernorm_gated_forward"]


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
    compute = compute_dtype(x, weight)
    rows, dim = x.shape
    groups = dim // group_size
    gate = None if z is None else torch.nn.functional.silu(z.to(compute))
    v = x.to(compute)
    if gate is not None and not norm_before_gate:
        v = gate.mul_(v)
    xhat, mean, rstd = normalise(v.reshape(rows, groups, group_size), eps, is_rms_norm)
    y = _affine(xhat.view(rows, dim), weight.to(compute), None if bias is None else bias.to(compute))
    if gate is not None and norm_before_gate:
        y.mul_(gate)
    out = torch.empty_like(x)
    out = y if y.dtype == out.dtype and y.stride() == out.stride() else out.copy_(y)
    return out, None if mean is None else _flat(mean), _flat(rstd)


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """See `anymamba.ops.layernorm_gated.LayerNormGatedBackend`."""
    compute = compute_dtype(x, weight)
    rows, dim = x.shape
    groups = dim // group_size
    w, b = weight.to(compute), None if bias is None else bias.to(compute)
    gate = slope = out = dz = None
    if z is not None:
        gate, slope = silu_gradient(z.to(compute))
    columns = x.to(compute)
    v = columns if gate is None or norm_before_gate else columns * gate
    by_group = (rows, groups, 1)
    scale = rstd.view(groups, rows).t().reshape(by_group)
    xhat = v.reshape(rows, groups, group_size)
    if mean is not None:
        xhat = xhat - mean.view(groups, rows).t().reshape(by_group)
    xhat = (xhat * scale).view(rows, dim)
    dy = dout.to(compute)
    if gate is not None and slope is not None and norm_before_gate:
        y = _affine(xhat.clone(), w, b)
        dz = slope.mul_(dy).mul_(y)
        dy = dy * gate
        if recompute_out:
            out = torch.empty_like(x).copy_(y.mul_(gate))
    elif recompute_out:
        out = torch.empty_like(x).copy_(_affine(xhat.clone(), w, b))
    products = dy * xhat
    dweight = products.sum(0)
    dbias = dy.sum(0) if b is not None else None
    # dx = (dy w - xhat mean(dy w xhat) - mean(dy w)) rstd, means over the group; an RMS norm lacks the last
    mean_product = products.mul_(w).view(rows, groups, group_size).mean(-1, keepdim=True)
    dv = torch.mul(dy, w, out=products).view(rows, groups, group_size)
    if mean is not None:
        dv.sub_(dv.mean(-1, keepdim=True))
    dv.addcmul_(xhat.view(rows, groups, group_size), mean_product, value=-1).mul_(scale)
    dx = dv.view(rows, dim)
    if gate is not None and slope is not None and not norm_before_gate:
        dz = slope.mul_(columns).mul_(dx)
        dx = dx.mul_(gate)
    return (
        torch.empty_like(x).copy_(dx),
        torch.empty_like(weight).copy_(dweight),
        None if bias is None or dbias is None else torch.empty_like(bias).copy_(dbias),
        None if z is None or dz is None else torch.empty_like(z).copy_(dz),
        out,
    )


def _affine(xhat: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return xhat * weight + bias, in xhat's memory."""
    xhat.mul_(weight)
    return xhat if bias is None else xhat.add_(bias)


def _flat(statistic: torch.Tensor) -> torch.Tensor:
    """Return a (rows, groups) statistic as (groups * rows,)."""
    return statistic.t().reshape(-1)
