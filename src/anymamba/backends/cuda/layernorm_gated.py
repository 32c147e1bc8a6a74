"""The gated norm on the GPU: which variant of the kernels, and the launch, settled once for tensors alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from anymamba.backends import Operator
from anymamba.backends.cuda import _tuning
from anymamba.backends.cuda._rows import (
    BACKWARD_MEANING,
    CHECKS_ALIGNMENT,
    FORWARD_MEANING,
    NAMES,
    SIZES,
    Split,
    alignment,
    backward_split,
    bits_that_must_be_zero,
    forward_split,
    in_place,
    known,
    refusal_of,
    rows_of,
    sizes_and_options,
    sum_parts,
    tuned_split,
    walkers,
    writable,
)
from anymamba.backends.cuda.runtime import Plan, Variant, cached, runtime
from anymamba.ops._rows import as_rows

__all__ = [
    "CHECKS_ALIGNMENT", "layernorm_gated_backward", "layernorm_gated_forward", "prepare", "refusal", "variants",
]  # fmt: skip


TUNED = _tuning.tunable("layernorm_gated forward", "layernorm_gated_forward.cu", **FORWARD_MEANING)
TUNED_BACKWARD = _tuning.tunable("layernorm_gated backward", "layernorm_gated_backward.cu", **BACKWARD_MEANING)


def refusal(operator: Operator, call: Any) -> str | None:
    """Return None, or why these kernels cannot do the call."""
    return refusal_of(call.device, call.group_size, x=call.dtype, weight=call.weight_dtype)


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
    rows, dim = x.shape
    groups = dim // group_size
    out = torch.empty_like(x)
    rstd = torch.empty(groups * rows, dtype=torch.float32, device=x.device)
    mean = None if is_rms_norm else torch.empty_like(rstd)
    if rows == 0:
        return out, mean, rstd
    read, weight, bias, gate = rows_of(x), weight.contiguous(), _vector(bias), _gate(z)
    written = writable(out)
    cut = forward_split(group_size, SIZES[x.dtype], alignment(read, weight, bias, gate, written))
    plan = _forward_plan(
        x.dtype, weight.dtype, None if bias is None else bias.dtype, None if gate is None else gate.dtype,
        norm_before_gate, is_rms_norm, cut, read.stride(0), 0 if gate is None else gate.stride(0), written.stride(0),
        rows, groups, group_size, eps, x.get_device(),
    )  # fmt: skip
    plan(
        read.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), 0 if gate is None else gate.data_ptr(),
        written.data_ptr(), 0 if mean is None else mean.data_ptr(), rstd.data_ptr(),
    )  # fmt: skip
    return out if written is out else out.copy_(written), mean, rstd


def prepare(operator: Operator, arguments: tuple[Any, ...]) -> Callable[..., torch.Tensor | None] | None:
    """Return a function that does norms of tensors alike, or None; see `anymamba.ops._prepared`. x has its own shape."""
    x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm = arguments
    out = torch.empty_like(x)
    if x.numel() == 0 or not all(t is None or in_place(t) for t in (x, weight, bias, z, out)):
        return None
    read, gate, written = as_rows(x), None if z is None else as_rows(z), as_rows(out)
    cut = forward_split(group_size, SIZES[x.dtype], alignment(read, weight, bias, gate, written))
    plan = _forward_plan(
        x.dtype, weight.dtype, None if bias is None else bias.dtype, None if z is None else z.dtype, norm_before_gate,
        is_rms_norm, cut, read.stride(0), 0 if gate is None else gate.stride(0), written.stride(0), read.shape[0],
        read.shape[1] // group_size, group_size, eps, x.get_device(),
    )  # fmt: skip
    beyond = bits_that_must_be_zero(x, weight, bias, z)

    def call(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, z: torch.Tensor | None
    ) -> torch.Tensor | None:
        x_at, weight_at = x.data_ptr(), weight.data_ptr()
        bias_at, z_at = 0 if bias is None else bias.data_ptr(), 0 if z is None else z.data_ptr()
        if (x_at | weight_at | bias_at | z_at) & beyond:
            return None
        out = torch.empty_like(x)
        plan(x_at, weight_at, bias_at, z_at, out.data_ptr(), 0, 0)  # nobody wants the statistics
        return out

    return call


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
    rows, dim = x.shape
    groups = dim // group_size
    dx = torch.empty_like(x)
    dz = None if z is None else torch.empty_like(z) if dz_out is None else dz_out
    out = torch.empty_like(x) if recompute_out else None
    if rows == 0:
        return dx, torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias), dz, out
    given = rows_of(known(dout))
    read, w, b, gate = rows_of(x), weight.contiguous(), _vector(bias), _gate(z)
    to_x, to_z, to_out = (None if t is None else writable(t) for t in (dx, dz, out))
    if to_z is not None and gate is not None and to_z.dtype != gate.dtype:
        to_z = torch.empty_like(gate)
    aligned = alignment(given, read, w, b, gate, to_x, to_z, to_out)
    cut = _backward_cut(x.dtype, group_size, aligned, b is not None, is_rms_norm)
    strides = tuple(0 if t is None else t.stride(0) for t in (given, read, gate, to_x, to_z, to_out))
    plan, count = _backward_plan(
        given.dtype, x.dtype, w.dtype, None if b is None else b.dtype, None if gate is None else gate.dtype,
        norm_before_gate, is_rms_norm, recompute_out, cut, strides, rows, groups, group_size, x.get_device(),
    )  # fmt: skip
    parts = torch.empty(1 if b is None else 2, count, dim, dtype=torch.float32, device=x.device)
    plan(*(0 if t is None else t.data_ptr() for t in (given, read, w, b, gate, mean, rstd, to_x, to_z, to_out, parts)))
    for wanted, written in ((dx, to_x), (dz, to_z), (out, to_out)):
        if wanted is not None and written is not None and wanted is not written:
            wanted.copy_(written)
    dweight = sum_parts(parts[0], weight)
    return dx, dweight, None if bias is None else sum_parts(parts[1], bias), dz, out


def variants(every: bool = False) -> Iterator[Variant]:
    """Yield the kernels that Mamba-2's modules use; with `every`, the other options, lengths and accesses."""
    f32, f16, bf16 = NAMES
    for x, w in [(bf16, bf16), (bf16, f32), (f32, f32)] + ([(f16, f16)] if every else []):
        for size, aligned, (before, rms, has_bias, has_z) in sizes_and_options(_OPTIONS, every):
            bias, z = w if has_bias else None, x if has_z else None
            yield _forward_variant(x, w, bias, z, before, rms, forward_split(size, SIZES[x], aligned))
            cut = _backward_cut(x, size, aligned, has_bias, rms)
            yield _backward_variant(x, x, w, bias, z, before, rms, False, cut)
        yield Variant.of("norm_sum_parts.cu", "norm_sum_parts", W=NAMES[w])


_OPTIONS = [  # before gate, RMS, bias, z
    (False, True, False, True), (True, True, False, True), (True, False, True, True), (False, False, True, True),
    (True, True, False, False), (True, False, True, False),
]  # fmt: skip


def _gate(z: torch.Tensor | None) -> torch.Tensor | None:
    return None if z is None else rows_of(known(z))


def _vector(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else known(bias).contiguous()


def _backward_cut(x: torch.dtype, group_size: int, aligned: bool, has_bias: bool, rms: bool) -> Split:
    return backward_split(group_size, SIZES[x], aligned, rms and not has_bias, threads=512)


def _defines(cut: Split, W: torch.dtype, bias: torch.dtype | None, z: torch.dtype | None) -> dict[str, object]:
    return {
        "W": NAMES[W], "BIAS": NAMES[bias or W], "Z": NAMES[z or W], "HAS_BIAS": bias is not None, "HAS_Z": z is not None,
        **cut.defines(),
    }  # fmt: skip


def _forward_variant(
    x: torch.dtype, w: torch.dtype, bias: torch.dtype | None, z: torch.dtype | None, before: bool, rms: bool, cut: Split
) -> Variant:
    return Variant.of(
        "layernorm_gated_forward.cu", "layernorm_gated_forward", X=NAMES[x], BEFORE_GATE=before or z is None, RMS=rms,
        **_defines(cut, w, bias, z),
    )  # fmt: skip


def _backward_variant(
    dout: torch.dtype, x: torch.dtype, w: torch.dtype, bias: torch.dtype | None, z: torch.dtype | None, before: bool,
    rms: bool, recompute: bool, cut: Split,
) -> Variant:  # fmt: skip
    return Variant.of(
        "layernorm_gated_backward.cu", "layernorm_gated_backward", DOUT=NAMES[dout], X=NAMES[x],
        BEFORE_GATE=before or z is None, RMS=rms, RECOMPUTE=recompute, AHEAD=cut.ahead,
        **_defines(cut, w, bias, z),
    )  # fmt: skip


@cached
def _forward_plan(
    x: torch.dtype, w: torch.dtype, bias: torch.dtype | None, z: torch.dtype | None, before: bool, rms: bool, cut: Split,
    x_stride: int, z_stride: int, out_stride: int, rows: int, groups: int, size: int, eps: float, device: int,
) -> Plan:  # fmt: skip
    cut = tuned_split(TUNED, cut, rows, size, device)
    kernel = runtime().load(_forward_variant(x, w, bias, z, before, rms, cut), device)
    blocks = (-(-rows // cut.units), min(groups, 65535), -(-groups // 65535))
    return kernel.plan(
        blocks, (cut.threads, 1, 1), 0, x_stride, z_stride, out_stride, rows, groups, size, eps, 1 / size
    )


@cached
def _backward_plan(
    dout: torch.dtype, x: torch.dtype, w: torch.dtype, bias: torch.dtype | None, z: torch.dtype | None, before: bool,
    rms: bool, recompute: bool, cut: Split, strides: tuple[int, ...], rows: int, groups: int, size: int, device: int,
) -> tuple[Plan, int]:  # fmt: skip
    """Return the launch, and how many sums of the parameters' gradients it leaves."""
    cut = tuned_split(TUNED_BACKWARD, cut, rows, size, device)
    kernel = runtime().load(_backward_variant(dout, x, w, bias, z, before, rms, recompute, cut), device)
    along = walkers(kernel, rows, groups, cut)
    geometry = (along * groups, 1, 1), (cut.threads, 1, 1)
    return kernel.plan(*geometry, 0, *strides, rows, groups, size, along, 1 / size), along * cut.units
