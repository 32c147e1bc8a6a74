"""The gated norm, written as its formula."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from anymamba.backends.reference._autograd import gradients

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
    compute = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    gate = None if z is None else F.silu(z.to(compute))
    v = x.to(compute)
    if gate is not None and not norm_before_gate:
        v = v * gate
    groups = v.unflatten(1, (v.shape[1] // group_size, group_size))  # (rows, groups, group_size)
    mean = None
    if not is_rms_norm:
        mean = groups.mean(-1)
        groups = groups - mean.unsqueeze(-1)
    rstd = 1 / torch.sqrt(groups.square().mean(-1) + eps)  # (rows, groups)
    y = (groups * rstd.unsqueeze(-1)).flatten(1) * weight.to(compute)
    if bias is not None:
        y = y + bias.to(compute)
    if gate is not None and norm_before_gate:
        y = y * gate
    out = torch.empty_like(x).copy_(y)
    return out, None if mean is None else mean.t().reshape(-1), rstd.t().reshape(-1)


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

    def formula(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, z: torch.Tensor | None
    ) -> torch.Tensor:
        return layernorm_gated_forward(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm)[0]

    dx, dweight, dbias, dz = gradients(formula, (x, weight, bias, z), (dout,))
    assert dx is not None and dweight is not None
    if dz_out is not None and dz is not None:
        dz = dz_out.copy_(dz)
    return dx, dweight, dbias, dz, formula(x, weight, bias, z) if recompute_out else None
