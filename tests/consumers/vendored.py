"""A small vendored `mamba_ssm`, written for the tests in the manner of Vim, VideoMamba and SegMamba.

Such a package brings its own interface over the two extension modules (with as many convolution arguments as the causal_conv1d
of its day took), a bidirectional block, and Triton norms under the name of its day.
"""

from __future__ import annotations

from pathlib import Path

from anymamba.upstream.port.build import write_extensions

__all__ = ["GENERATIONS", "NORMS", "write_extension_modules", "write_fork"]

GENERATIONS = {4: ("", "dx,"), 5: ("None,", "None, dx,"), 7: ("None, None, None,", "None, None, None, dx, False,")}
"""Number of causal_conv1d_fwd's arguments, and what stands between the first ones and the last, forward and backward."""

NORMS = ("layernorm", "layer_norm")
"""The names that the Triton module has had."""

_INTERFACE = """
import torch
import torch.nn.functional as F
import causal_conv1d_cuda
import selective_scan_cuda


class InnerNoOutProj(torch.autograd.Function):
    @staticmethod
    def forward(ctx, xz, conv_weight, conv_bias, x_proj, dt_proj, A, D, delta_bias):
        x, z = xz.chunk(2, dim=1)
        conv = causal_conv1d_cuda.causal_conv1d_fwd(x, conv_weight.squeeze(1), conv_bias, {forward} True)
        (batch, dim, length), states, rank = x.shape, A.shape[1], dt_proj.shape[1]
        mixed = conv.transpose(1, 2).reshape(-1, dim) @ x_proj.t()
        delta = (dt_proj @ mixed[:, :rank].t()).view(dim, batch, length).transpose(0, 1)
        B, C = (part.view(batch, length, states).transpose(1, 2).unsqueeze(1).contiguous()
                for part in mixed[:, rank:].split(states, dim=1))
        out, ends, out_z = selective_scan_cuda.fwd(conv, delta, A, B, C, D, z, delta_bias, True)
        ctx.save_for_backward(xz, conv_weight, conv_bias, x_proj, dt_proj, A, B, C, D, delta, delta_bias, mixed, ends, out)
        return out_z

    @staticmethod
    def backward(ctx, dout):
        xz, conv_weight, conv_bias, x_proj, dt_proj, A, B, C, D, delta, delta_bias, mixed, ends, out = ctx.saved_tensors
        x, z = xz.chunk(2, dim=1)
        weight = conv_weight.squeeze(1)
        conv = causal_conv1d_cuda.causal_conv1d_fwd(x, weight, conv_bias, {forward} True)
        (batch, dim, length), states, rank = x.shape, A.shape[1], dt_proj.shape[1]
        dxz = torch.empty_like(xz)
        dx, dz = dxz.chunk(2, dim=1)
        dconv, ddelta, dA, dB, dC, dD, ddelta_bias, dz, out_z = selective_scan_cuda.bwd(
            conv, delta, A, B, C, D, z, delta_bias, dout, ends, out, dz, True, True
        )
        assert out_z.shape == out.shape
        dmixed = torch.empty_like(mixed)
        dmixed[:, rank : rank + states] = dB.squeeze(1).transpose(1, 2).reshape(-1, states)
        dmixed[:, rank + states :] = dC.squeeze(1).transpose(1, 2).reshape(-1, states)
        steps = ddelta.transpose(0, 1).reshape(dim, -1)
        dmixed[:, :rank] = steps.t() @ dt_proj
        dconv = dconv + (dmixed @ x_proj).view(batch, length, dim).transpose(1, 2)
        dx, dweight, dbias, *_ = causal_conv1d_cuda.causal_conv1d_bwd(x, weight, conv_bias, dconv, {backward} True)
        return (dxz, dweight.unsqueeze(1), dbias, dmixed.t() @ conv.transpose(1, 2).reshape(-1, dim),
                steps @ mixed[:, :rank], dA, dD, ddelta_bias)


def mamba_inner_fn_no_out_proj(*inputs):
    return InnerNoOutProj.apply(*inputs)


def bimamba_inner_fn(xz, conv_weight, conv_bias, x_proj, dt_proj, out_proj, A, A_b, D, delta_bias):
    shared = (conv_weight, conv_bias, x_proj, dt_proj)
    there = InnerNoOutProj.apply(xz, *shared, A, D, delta_bias)
    back = InnerNoOutProj.apply(xz.flip([-1]), *shared, A_b, D, delta_bias)
    return F.linear((there + back.flip([-1])).transpose(1, 2), out_proj)
"""

_BLOCK = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from mamba_ssm.ops.selective_scan_interface import bimamba_inner_fn, mamba_inner_fn_no_out_proj


class Direction(nn.Module):
    def __init__(self, dim, states, rank):
        super().__init__()
        self.conv1d = nn.Conv1d(dim, dim, 4, groups=dim)
        self.x_proj = nn.Linear(dim, rank + 2 * states, bias=False)
        self.dt_proj = nn.Linear(rank, dim)
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(dim, 1))
        self.D = nn.Parameter(torch.ones(dim))

    def parts(self):
        return (self.conv1d.weight, self.conv1d.bias, self.x_proj.weight, self.dt_proj.weight,
                -self.A_log.float().exp(), self.D.float(), self.dt_proj.bias.float())


class Mamba(nn.Module):
    def __init__(self, d_model, d_state=4, bimamba_type="none", nslices=3):
        super().__init__()
        self.kind, self.nslices, dim = bimamba_type, nslices, 2 * d_model
        self.in_proj = nn.Linear(d_model, 2 * dim, bias=False)
        self.out_proj = nn.Linear(dim, d_model, bias=False)
        self.directions = nn.ModuleList(Direction(dim, d_state, 2) for _ in range({"v2": 2, "v3": 3}.get(bimamba_type, 1)))
        self.A_b_log = nn.Parameter(torch.zeros(dim, d_state))

    def forward(self, hidden):
        xz = self.in_proj(hidden).transpose(1, 2)
        parts = [direction.parts() for direction in self.directions]
        if self.kind == "v1":
            *shared, A, D, bias = parts[0]
            return bimamba_inner_fn(xz, *shared, self.out_proj.weight, A, -self.A_b_log.float().exp(), D, bias)
        out = mamba_inner_fn_no_out_proj(xz, *parts[0])
        if self.kind in ("v2", "v3"):
            out = out + mamba_inner_fn_no_out_proj(xz.flip([-1]), *parts[1]).flip([-1])
        if self.kind == "v3":
            slices = torch.stack(xz.chunk(self.nslices, dim=-1), dim=-1).flatten(-2)
            across = mamba_inner_fn_no_out_proj(slices, *parts[2])
            across = across.unflatten(-1, (-1, self.nslices)).transpose(-1, -2).flatten(-2)
            out = out + across
        return F.linear(out.transpose(1, 2), self.out_proj.weight)
"""

_NORM = """
import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(X, N: tl.constexpr):
    pass


def layer_norm_fn(x, weight, bias, residual=None, eps=1e-6, prenorm=False, residual_in_fp32=False, is_rms_norm=False):
    return "the fork's own kernel"


rms_norm_fn = layer_norm_fn


class RMSNorm(torch.nn.Module):
    pass
"""


def write_fork(folder: Path, generation: int = 7) -> Path:
    """Write the vendored package into a project's folder; return what has to be on the path."""
    forward, backward = GENERATIONS[generation]
    texts = {
        "__init__.py": "from mamba_ssm.ops.selective_scan_interface import bimamba_inner_fn\n"
        "from mamba_ssm.modules.mamba_simple import Mamba\n",
        "ops/__init__.py": "",
        "ops/selective_scan_interface.py": _INTERFACE.format(forward=forward, backward=backward),
        "ops/triton/__init__.py": "",
        "modules/__init__.py": "",
        "modules/mamba_simple.py": _BLOCK,
        **{f"ops/triton/{name}.py": _NORM for name in NORMS},
    }
    for name, text in texts.items():
        path = folder / "mamba_ssm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def write_extension_modules(folder: Path) -> Path:
    """Write the two extension modules as an installed port has them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("mamba_ssm", "causal_conv1d"):
        write_extensions(name, folder)
    return folder
