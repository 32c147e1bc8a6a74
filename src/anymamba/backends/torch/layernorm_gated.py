"""The gated norm, block by block of rows, with its backward written out.

Everything between is float32 (float64 for float64). The backward computes the normalised values again from the inputs and
the statistics.
"""

from __future__ import annotations

import torch

from anymamba.backends.torch._norm import compute_dtype, normalise, row_blocks, silu_gradient, widened
from anymamba.machine.memory import empty_like

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
    w, b = weight.to(compute), None if bias is None else bias.to(compute)
    out = empty_like(x)
    rstd = torch.empty(groups, rows, dtype=compute, device=x.device)
    mean = None if is_rms_norm else torch.empty_like(rstd)
    contiguous = x.dtype == compute and x.stride(1) == 1
    for block, (y, gate) in row_blocks(x, compute, 2):
        if z is not None:
            torch.ops.aten.silu.out(widened(z[block], gate), out=gate)
        if z is not None and not norm_before_gate:
            v = torch.mul(x[block], gate, out=y)
        else:
            v = x[block] if contiguous else y.copy_(x[block])
        by_group = y.view(-1, groups, group_size)
        block_mean, block_rstd = normalise(v.view(by_group.shape), eps, is_rms_norm, out=by_group)
        # The last step is written where it belongs
        last = out[block]
        gated = z is not None and norm_before_gate
        torch.mul(y, w, out=last if b is None and not gated else y)
        if b is not None:
            torch.add(y, b, out=y if gated else last)
        if gated:
            torch.mul(y, gate, out=last)
        rstd[:, block] = block_rstd.squeeze(2).t()
        if mean is not None and block_mean is not None:
            mean[:, block] = block_mean.squeeze(2).t()
    return out, None if mean is None else mean.view(-1), rstd.view(-1)


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
    compute = compute_dtype(x, weight, rstd)
    rows, dim = x.shape
    groups = dim // group_size
    w, b = weight.to(compute), None if bias is None else bias.to(compute)
    dx = empty_like(x)
    dz = None if z is None else empty_like(z) if dz_out is None else dz_out
    out = empty_like(x) if recompute_out else None
    dweight = torch.zeros_like(w)
    dbias = None if b is None else torch.zeros_like(b)
    by_group = (-1, groups, group_size)
    for block, (xhat, gate, slope, y, first, second) in row_blocks(x, compute, 6):
        columns, dy = widened(x[block], first), widened(dout[block], second)
        if z is not None:
            silu_gradient(widened(z[block], xhat), gate, slope)
        v = torch.mul(columns, gate, out=xhat) if z is not None and not norm_before_gate else columns
        scale = rstd.view(groups, rows)[:, block].t().unsqueeze(2)  # (rows, groups, 1)
        xhat3 = xhat.view(by_group)
        if mean is not None:
            v = torch.sub(v.reshape(by_group), mean.view(groups, rows)[:, block].t().unsqueeze(2), out=xhat3)
        torch.mul(v.reshape(by_group), scale, out=xhat3)
        if out is not None or (z is not None and norm_before_gate):
            _affine(y.copy_(xhat), w, b)
            if dz is not None and norm_before_gate:
                torch.mul(slope.mul_(dy), y, out=dz[block])
                y.mul_(gate)
                dy = torch.mul(dy, gate, out=second)
            if out is not None:
                out[block] = y
        products = torch.mul(dy, xhat, out=y)
        dweight += products.sum(0)
        if dbias is not None:
            dbias += dy.sum(0)
        # dv = (dy w - xhat mean(dy w xhat) - mean(dy w)) rstd, means over the group; an RMS norm lacks the last
        mean_product = products.mul_(w).view(by_group).mean(2, keepdim=True)
        dcolumns = torch.mul(dy, w, out=products)
        dv = dcolumns.view(by_group)
        if mean is not None:
            dv.sub_(dv.mean(2, keepdim=True))
        dv.addcmul_(xhat3, mean_product, value=-1).mul_(scale)
        if dz is not None and not norm_before_gate:
            torch.mul(slope.mul_(columns), dcolumns, out=dz[block])
            torch.mul(dcolumns, gate, out=dx[block])
        else:
            dx[block] = dcolumns
    return (
        dx,
        torch.empty_like(weight).copy_(dweight),
        None if bias is None or dbias is None else torch.empty_like(bias).copy_(dbias),
        dz,
        out,
    )


def _affine(xhat: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Make xhat * weight + bias of xhat."""
    xhat.mul_(weight)
    if bias is not None:
        xhat.add_(bias)
