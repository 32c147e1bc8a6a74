"""Dropout, residual addition and norm on the GPU: which variant of the kernels, and the launch, settled once."""

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
from anymamba.ops.layer_norm import LayerNormBackward, LayerNormForward

__all__ = ["CHECKS_ALIGNMENT", "layer_norm_backward", "layer_norm_forward", "prepare", "refusal", "variants"]

# Of an absent tensor: what its macro says does not matter.
Dtype = torch.dtype | None


TUNED = _tuning.tunable("layer_norm forward", "layer_norm_forward.cu", **FORWARD_MEANING)
TUNED_BACKWARD = _tuning.tunable("layer_norm backward", "layer_norm_backward.cu", **BACKWARD_MEANING)


def refusal(operator: Operator, call: Any) -> str | None:
    """Return None, or why these kernels cannot do the call."""
    return refusal_of(call.device, call.dim, x=call.dtype, weight=call.weight_dtype)


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
    rows, dim = x.shape
    out = torch.empty_like(x, dtype=out_dtype)
    out1 = None if weight1 is None else torch.empty_like(out)
    total = None if residual_dtype is None else torch.empty(rows, dim, dtype=residual_dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = None if is_rms_norm else torch.empty_like(rstd)
    if rows == 0:
        return LayerNormForward(out, out1, total, mean, rstd)
    w, b, w1, b1 = _vectors(weight, bias, weight1, bias1)
    read, added, other = rows_of(x), _rows(residual), _rows(x1)
    kept, kept1 = (None if t is None else rows_of(t) for t in (keep, keep1))
    scales = None if rowscale is None else rowscale.float().contiguous()
    to, to1 = writable(out), None if out1 is None else writable(out1)
    aligned = alignment(read, w, b, added, other, w1, b1, kept, kept1, to, to1, total)
    cut = forward_split(dim, _widest(read, added, other, total), aligned)
    strided = (read, added, other, kept, kept1, to, to1, total)
    plan = _forward_plan(
        x.dtype, w.dtype, _dtype(b if b is not None else w1), b is not None, _dtype(added), _dtype(other),
        weight1 is not None, rowscale is not None, keep is not None, out_dtype, residual_dtype, is_rms_norm, cut,
        tuple(0 if t is None else t.stride(0) for t in strided), rows, dim, eps, 1 / (1 - dropout_p), x.get_device(),
    )  # fmt: skip
    pointers = (read, w, b, added, other, w1, b1, scales, kept, kept1, to, to1, total, mean, rstd)
    plan(*(0 if t is None else t.data_ptr() for t in pointers))
    if to is not out:
        out.copy_(to)
    if out1 is not None and to1 is not None and to1 is not out1:
        out1.copy_(to1)
    return LayerNormForward(out, out1, total, mean, rstd)


def prepare(operator: Operator, arguments: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return a function that does plain norms of tensors alike, or None; see `anymamba.ops._prepared`.

    `arguments` are x (in its own shape), weight, bias, residual, eps, is_rms_norm, the dtype in which the sum is stored (or
    None) and whether it is returned.
    """
    x, weight, bias, residual, eps, is_rms_norm, stored, prenorm = arguments
    out = torch.empty_like(x)
    if x.numel() == 0 or not all(t is None or in_place(t) for t in (x, weight, bias, residual, out)):
        return None
    read, added, written = as_rows(x), None if residual is None else as_rows(residual), as_rows(out)
    rows, dim = read.shape
    stored = stored if prenorm else None
    total = None if stored is None else torch.empty(rows, dim, dtype=stored, device=x.device)
    cut = forward_split(dim, _widest(read, added, total), alignment(read, weight, bias, added, written, total))
    strides = tuple(0 if t is None else t.stride(0) for t in (read, added, None, None, None, written, None, total))
    plan = _forward_plan(
        x.dtype, weight.dtype, _dtype(bias), bias is not None, _dtype(residual), None, False, False, False, x.dtype,
        stored, is_rms_norm, cut, strides, rows, dim, eps, 1.0, x.get_device(),
    )  # fmt: skip
    beyond, shape = bits_that_must_be_zero(x, weight, bias, residual), x.shape

    def call(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> Any:  # out, or (out, the sum)
        x_at, weight_at = x.data_ptr(), weight.data_ptr()
        bias_at, residual_at = 0 if bias is None else bias.data_ptr(), 0 if residual is None else residual.data_ptr()
        if (x_at | weight_at | bias_at | residual_at) & beyond:
            return None
        out = torch.empty_like(x)
        if stored is None:
            plan(x_at, weight_at, bias_at, residual_at, 0, 0, 0, 0, 0, 0, out.data_ptr(), 0, 0, 0, 0)
            return (out, x) if prenorm else out
        total = torch.empty(shape, dtype=stored, device=x.device)
        plan(x_at, weight_at, bias_at, residual_at, 0, 0, 0, 0, 0, 0, out.data_ptr(), 0, total.data_ptr(), 0, 0)
        return out, total

    return call


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
    rows, dim = v.shape

    def fresh(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, dim, dtype=dtype, device=v.device)

    dx = fresh(x_dtype)
    # Where nothing stands between the sum and an input, their gradients are one tensor.
    same = keep is None and rowscale is None
    own_residual = fresh(v.dtype) if has_residual and not (same and v.dtype == x_dtype) else None
    own_x1 = fresh(x_dtype) if has_x1 and not (same and keep1 is None) else None
    out = fresh(dout.dtype) if recompute_out else None
    vectors = [t for t in (weight, bias, weight1, bias1) if t is not None]
    if rows:
        w, b, w1, _ = _vectors(weight, bias, weight1, bias1)
        given, read, given1 = _rows(dout), rows_of(v), _rows(dout1)
        assert given is not None
        if given1 is not None and given1.dtype != given.dtype:
            given, given1 = given.float(), given1.float()
        if out is not None and out.dtype != given.dtype:
            out = fresh(given.dtype)
        onward = _rows(dresidual_out)
        kept, kept1 = (None if t is None else rows_of(t) for t in (keep, keep1))
        scales = None if rowscale is None else rowscale.float().contiguous()
        written = (dx, own_residual, own_x1, out)
        aligned = alignment(given, read, w, b, w1, given1, onward, kept, kept1, *written)
        cut = _backward_cut(v.dtype, dim, aligned, b is not None or w1 is not None, is_rms_norm)
        strided = (given, read, given1, onward, kept, kept1)
        plan, count = _backward_plan(
            given.dtype, v.dtype, x_dtype, w.dtype, _dtype(b if b is not None else w1), b is not None, weight1 is not None,
            bias1 is not None, _dtype(onward), rowscale is not None, keep is not None, is_rms_norm, recompute_out, cut,
            tuple(0 if t is None else t.stride(0) for t in strided), rows, dim, 1 / (1 - dropout_p), v.get_device(),
        )  # fmt: skip
        parts = torch.empty(len(vectors), count, dim, dtype=torch.float32, device=v.device)
        pointers = (given, read, w, b, w1, given1, onward, scales, kept, kept1, mean, rstd, *written, parts)
        plan(*(0 if t is None else t.data_ptr() for t in pointers))
        sums = iter([sum_parts(part, vector) for part, vector in zip(parts, vectors)])
    else:
        sums = iter([torch.zeros_like(vector) for vector in vectors])
    dweight, dbias, dweight1, dbias1 = (None if t is None else next(sums) for t in (weight, bias, weight1, bias1))
    assert dweight is not None
    return LayerNormBackward(
        dx,
        dweight,
        dbias,
        (own_residual if own_residual is not None else dx) if has_residual else None,
        (own_x1 if own_x1 is not None else dx) if has_x1 else None,
        dweight1,
        dbias1,
        None if out is None else out.to(dout.dtype),
    )


def variants(every: bool = False) -> Iterator[Variant]:
    """Yield the kernels that models use; with `every`, the other options, lengths and accesses."""
    f32, f16, bf16 = NAMES
    for x, w, total in [(bf16, bf16, f32), (bf16, f32, f32), (f32, f32, f32)] + ([(f16, f16, f16)] if every else []):
        for size, aligned, (rms, bias, second, scaled, kept) in sizes_and_options(_OPTIONS, every):
            other = x if second else None
            cut = forward_split(size, max(SIZES[x], SIZES[total]), aligned)
            yield _forward_variant(x, w, w, bias, total, other, second, scaled, kept, x, total, rms, cut)
            cut = _backward_cut(total, size, aligned, bias or second, rms)
            yield _backward_variant(
                x, total, x, w, w, bias, second, bias and second, total, scaled, kept, rms, False, cut
            )
        yield Variant.of("norm_sum_parts.cu", "norm_sum_parts", W=NAMES[w])


_OPTIONS = [  # RMS, bias, second branch and weight, row scale, dropout
    (True, False, False, False, False), (False, True, False, False, False), (False, True, True, False, True),
    (True, False, True, False, False), (False, True, False, True, True),
]  # fmt: skip


def _rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else rows_of(known(tensor))


def _dtype(tensor: torch.Tensor | None) -> Dtype:
    return None if tensor is None else tensor.dtype


def _vectors(
    weight: torch.Tensor, *others: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return bias, weight1 and bias1 in one dtype (float32 where they differ), all contiguous."""
    dtypes = {t.dtype for t in others if t is not None}
    dtype = dtypes.pop() if len(dtypes) == 1 and dtypes <= set(NAMES) else torch.float32
    bias, weight1, bias1 = (None if t is None else t.to(dtype).contiguous() for t in others)
    return weight.contiguous(), bias, weight1, bias1


def _widest(*tensors: torch.Tensor | None) -> int:
    return max(tensor.element_size() for tensor in tensors if tensor is not None)


def _backward_cut(v: torch.dtype, dim: int, aligned: bool, more: bool, rms: bool) -> Split:
    return backward_split(dim, SIZES[v], aligned, rms and not more, threads=768)


def _defines(cut: Split, **dtypes: Dtype) -> dict[str, object]:
    return {
        **{name: NAMES[dtype or torch.float32] for name, dtype in dtypes.items()},
        **cut.defines(),
    }  # fmt: skip


def _forward_variant(
    x: torch.dtype, w: torch.dtype, b: Dtype, has_bias: bool, residual: Dtype, x1: Dtype, second: bool, scaled: bool,
    kept: bool, out: torch.dtype, total: Dtype, rms: bool, cut: Split,
) -> Variant:  # fmt: skip
    return Variant.of(
        "layer_norm_forward.cu", "layer_norm_forward", HAS_BIAS=has_bias, HAS_RESIDUAL=residual is not None,
        HAS_X1=x1 is not None, HAS_W1=second, HAS_ROWSCALE=scaled, HAS_KEEP=kept, STORE=total is not None, RMS=rms,
        **_defines(cut, X=x, W=w, B=b, R=residual, X1=x1, OUT=out, SUM=total),
    )  # fmt: skip


def _backward_variant(
    dout: torch.dtype, v: torch.dtype, x: torch.dtype, w: torch.dtype, b: Dtype, has_bias: bool, second: bool,
    has_bias1: bool, dsum: Dtype, scaled: bool, kept: bool, rms: bool, recompute: bool, cut: Split,
) -> Variant:  # fmt: skip
    return Variant.of(
        "layer_norm_backward.cu", "layer_norm_backward", HAS_BIAS=has_bias, HAS_W1=second, HAS_BIAS1=has_bias1,
        HAS_DSUM=dsum is not None, HAS_ROWSCALE=scaled, HAS_KEEP=kept, RMS=rms, RECOMPUTE=recompute,
        AHEAD=cut.ahead,
        **_defines(cut, DOUT=dout, SUM=v, X=x, W=w, B=b, DSUM=dsum),
    )  # fmt: skip


@cached
def _forward_plan(
    x: torch.dtype, w: torch.dtype, b: Dtype, has_bias: bool, residual: Dtype, x1: Dtype, second: bool, scaled: bool,
    kept: bool, out: torch.dtype, total: Dtype, rms: bool, cut: Split, strides: tuple[int, ...], rows: int, dim: int,
    eps: float, scale: float, device: int,
) -> Plan:  # fmt: skip
    cut = tuned_split(TUNED, cut, rows, dim, device)
    variant = _forward_variant(x, w, b, has_bias, residual, x1, second, scaled, kept, out, total, rms, cut)
    kernel = runtime().load(variant, device)
    geometry = (-(-rows // cut.units), 1, 1), (cut.threads, 1, 1)
    return kernel.plan(*geometry, 0, *strides, rows, dim, eps, 1 / dim, scale)


@cached
def _backward_plan(
    dout: torch.dtype, v: torch.dtype, x: torch.dtype, w: torch.dtype, b: Dtype, has_bias: bool, second: bool,
    has_bias1: bool, dsum: Dtype, scaled: bool, kept: bool, rms: bool, recompute: bool, cut: Split,
    strides: tuple[int, ...], rows: int, dim: int, scale: float, device: int,
) -> tuple[Plan, int]:  # fmt: skip
    """Return the launch, and how many sums of the parameters' gradients it leaves."""
    cut = tuned_split(TUNED_BACKWARD, cut, rows, dim, device)
    variant = _backward_variant(dout, v, x, w, b, has_bias, second, has_bias1, dsum, scaled, kept, rms, recompute, cut)
    kernel = runtime().load(variant, device)
    along = walkers(kernel, rows, 1, cut)
    geometry = (along, 1, 1), (cut.threads, 1, 1)
    return kernel.plan(*geometry, 0, *strides, rows, dim, along, 1 / dim, scale), along * cut.units
