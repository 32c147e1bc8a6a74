"""Whole Mamba blocks as functions of plain tensors, so that every implementation runs on the same weights.

What is around the operators is done as upstream's modules do it, the same for all; the operators are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from anymamba.measure.cases import Draw

__all__ = [
    "DSTATE",
    "mamba2_arguments",
    "mamba2_block",
    "mamba2_step",
    "mamba2_step_arguments",
    "mamba_arguments",
    "mamba_block",
    "mamba_step",
    "mamba_step_arguments",
]

DSTATE, DSTATE2, HEADDIM, TAPS = 16, 128, 64, 4


def _linear(draw: Draw, rows: int, columns: int) -> torch.Tensor:
    bound = 1 / math.sqrt(columns)
    return draw.uniform(rows, columns, low=-bound, high=bound)


def mamba_arguments(draw: Draw, batch: int, length: int, width: int) -> dict[str, Any]:
    """Return the arguments of a block from `mamba_block`; `width` is d_model, expand is 2, weights as upstream draws them."""
    dim, rank = 2 * width, -(-width // 16)
    return {
        "hidden": draw.normal(batch, length, width),
        "in_proj": _linear(draw, 2 * dim, width),
        "conv_weight": draw.uniform(dim, 1, TAPS, low=-0.5, high=0.5),
        "conv_bias": draw.uniform(dim, low=-0.5, high=0.5),
        "x_proj": _linear(draw, rank + 2 * DSTATE, dim),
        "delta_proj": _linear(draw, dim, rank),
        "out_proj": _linear(draw, width, dim),
        # A from -1 to -16, delta from 0.001 to 0.1
        "A_log": draw.uniform(dim, DSTATE, low=0.0, high=math.log(16), dtype=draw.wide),
        "D": draw.uniform(dim, low=0.5, high=1.5, dtype=draw.wide),
        "delta_bias": draw.uniform(dim, low=-6.9, high=-2.2, dtype=draw.wide),
    }


def mamba_block(inner: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Return the Mamba block around `inner`, a function like `mamba_inner_fn`."""

    def block(
        hidden: torch.Tensor, in_proj: torch.Tensor, conv_weight: torch.Tensor, conv_bias: torch.Tensor,
        x_proj: torch.Tensor, delta_proj: torch.Tensor, out_proj: torch.Tensor, A_log: torch.Tensor, D: torch.Tensor,
        delta_bias: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        batch, length, width = hidden.shape
        xz = (in_proj @ hidden.reshape(batch * length, width).t()).view(-1, batch, length).transpose(0, 1)
        out: torch.Tensor = inner(
            xz, conv_weight, conv_bias, x_proj, delta_proj, out_proj, None, -torch.exp(A_log), None, None, D,
            delta_bias=delta_bias, delta_softplus=True,
        )  # fmt: skip
        return out

    return block


def mamba2_arguments(draw: Draw, batch: int, length: int, width: int) -> dict[str, Any]:
    """Return the arguments of a block from `mamba2_block`: heads of 64, 128 states."""
    dim = 2 * width
    heads, mixed = dim // HEADDIM, dim + 2 * DSTATE2
    return {
        "hidden": draw.normal(batch, length, width),
        "in_proj": _linear(draw, dim + mixed + heads, width),
        "conv_weight": draw.uniform(mixed, TAPS, low=-0.5, high=0.5),
        "conv_bias": draw.uniform(mixed, low=-0.5, high=0.5),
        "dt_bias": draw.uniform(heads, low=-6.9, high=-2.2, dtype=draw.wide),
        "A_log": draw.uniform(heads, low=0.0, high=math.log(16), dtype=draw.wide),
        "D": draw.uniform(heads, low=0.5, high=1.5, dtype=draw.wide),
        "norm_weight": draw.uniform(dim, low=0.5, high=1.5),
        "out_proj": _linear(draw, width, dim),
    }


def mamba2_block(split: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Return the Mamba-2 block around `split`, a function like `mamba_split_conv1d_scan_combined`."""

    def block(
        hidden: torch.Tensor, in_proj: torch.Tensor, conv_weight: torch.Tensor, conv_bias: torch.Tensor,
        dt_bias: torch.Tensor, A_log: torch.Tensor, D: torch.Tensor, norm_weight: torch.Tensor, out_proj: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        out: torch.Tensor = split(
            F.linear(hidden, in_proj), conv_weight, conv_bias, dt_bias, -torch.exp(A_log), D, chunk_size=256,
            activation="silu", rmsnorm_weight=norm_weight, rmsnorm_eps=1e-5, outproj_weight=out_proj, outproj_bias=None,
            headdim=HEADDIM, ngroups=1, norm_before_gate=False,
        )  # fmt: skip
        return out

    return block


def mamba_step_arguments(draw: Draw, batch: int, length: int, width: int) -> dict[str, Any]:
    """Return the arguments of a step from `mamba_step`: one token for each of `batch` sequences; `length` has no meaning."""
    given = mamba_arguments(draw, batch, 1, width)
    given["hidden"] = given["hidden"].detach()[:, 0]
    given["conv_weight"] = given["conv_weight"].detach()[:, 0]
    plain = {name: tensor.detach() for name, tensor in given.items()}
    dim = 2 * width
    return plain | {
        "conv_state": draw.normal(batch, dim, TAPS, grad=False),
        "ssm_state": draw.normal(batch, dim, DSTATE, grad=False),
    }


def mamba_step(convolve: Callable[..., Any], update: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Return one decoding step of a Mamba block around functions like `causal_conv1d_update`, `selective_state_update`."""

    def step(
        hidden: torch.Tensor, in_proj: torch.Tensor, conv_weight: torch.Tensor, conv_bias: torch.Tensor,
        x_proj: torch.Tensor, delta_proj: torch.Tensor, out_proj: torch.Tensor, A_log: torch.Tensor, D: torch.Tensor,
        delta_bias: torch.Tensor, conv_state: torch.Tensor, ssm_state: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        x, z = F.linear(hidden, in_proj).chunk(2, dim=-1)
        x = convolve(x, conv_state, conv_weight, conv_bias, "silu")
        delta, B, C = F.linear(x, x_proj).split([delta_proj.shape[1], DSTATE, DSTATE], dim=-1)
        y = update(
            ssm_state, x, F.linear(delta, delta_proj), -torch.exp(A_log), B, C, D, z=z, dt_bias=delta_bias,
            dt_softplus=True,
        )  # fmt: skip
        return F.linear(y, out_proj)

    return step


def mamba2_step_arguments(draw: Draw, batch: int, length: int, width: int) -> dict[str, Any]:
    """Return the arguments of a step from `mamba2_step`: one token for each of `batch` sequences; `length` has no meaning."""
    given = mamba2_arguments(draw, batch, 1, width)
    given["hidden"] = given["hidden"].detach()[:, 0]
    dim = 2 * width
    return {name: tensor.detach() for name, tensor in given.items()} | {
        "conv_state": draw.normal(batch, dim + 2 * DSTATE2, TAPS, grad=False),
        "ssm_state": draw.normal(batch, dim // HEADDIM, HEADDIM, DSTATE2, grad=False),
    }


def mamba2_step(
    convolve: Callable[..., Any], update: Callable[..., Any], norm: Callable[..., Any]
) -> Callable[..., torch.Tensor]:
    """Return one decoding step of a Mamba-2 block around functions like `causal_conv1d_update`, `selective_state_update` and
    `rmsnorm_fn` (the gated one); what belongs to a head alone is given to all its channels as views, as its caches want it.
    """

    def step(
        hidden: torch.Tensor, in_proj: torch.Tensor, conv_weight: torch.Tensor, conv_bias: torch.Tensor,
        dt_bias: torch.Tensor, A_log: torch.Tensor, D: torch.Tensor, norm_weight: torch.Tensor, out_proj: torch.Tensor,
        conv_state: torch.Tensor, ssm_state: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        batch, heads = hidden.shape[0], dt_bias.shape[0]
        dim = heads * HEADDIM
        z, mixed, dt = F.linear(hidden, in_proj).split([dim, dim + 2 * DSTATE2, heads], dim=-1)
        mixed = convolve(mixed, conv_state, conv_weight, conv_bias, "silu")
        x, B, C = mixed.split([dim, DSTATE2, DSTATE2], dim=-1)
        y = update(
            ssm_state, x.view(batch, heads, HEADDIM), dt[:, :, None].expand(batch, heads, HEADDIM),
            -torch.exp(A_log)[:, None, None].expand(heads, HEADDIM, DSTATE2), B[:, None], C[:, None],
            D[:, None].expand(heads, HEADDIM), z=None, dt_bias=dt_bias[:, None].expand(heads, HEADDIM), dt_softplus=True,
        )  # fmt: skip
        y = norm(y.reshape(batch, dim), norm_weight, None, z, 1e-5, None, False)
        return F.linear(y, out_proj)

    return step
