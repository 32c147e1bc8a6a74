"""Normalising rows on the CPU, plain, after a residual's addition or gated by SiLU: one kernel forward, one backward.

A work item is a row, lanes are its columns. A row (of a group of columns) is brought into a buffer of the first-level cache
once, and everything is done to it there: bytes moved are the inputs once and the outputs once, where whole-tensor operations
move them again for every step. Gradients of the parameters are sums over rows: a fixed number of parts of the rows, each summed
in order, then added in order, so that the number of threads changes no bit.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from anymamba.backends.cpu._compile import kernel
from anymamba.backends.cpu._math import sigmoid
from anymamba.backends.cpu._scratch import begin, buffer, end
from anymamba.backends.cpu._tuning import tunable
from anymamba.machine.memory import empty, empty_like

__all__ = ["backward", "by_rows", "forward"]

PARTS = 16
ELEMENTS_A_THREAD = 1 << 15  # 10 us of work
FORWARD = tunable("norm forward", __name__, sizes=("rows", "columns"))
BACKWARD = tunable("norm backward", __name__, sizes=("rows", "columns"))


def by_rows(*tensors: torch.Tensor | None) -> bool:
    """Return whether all are of one dtype that kernels compute in, with the columns of a row side by side."""
    first = tensors[0]
    assert first is not None
    return first.dtype in (torch.float32, torch.float64) and all(
        t is None or (t.dtype == first.dtype and t.stride(1) == 1) for t in tensors
    )


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    z: torch.Tensor | None,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    is_rms_norm: bool,
    store: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Return out like x, the sum x + residual (if it is to be stored), mean (None for an RMS norm) and rstd.

    Statistics are (groups, rows), flattened.
    """
    rows, dim = x.shape
    out = empty_like(x)
    if out.stride(1) != 1:  # a single row may have any strides
        out = empty(x, rows, dim)
    sums = empty(x, rows, dim) if store else None
    rstd = x.new_empty(rows * (dim // group_size))
    mean = None if is_rms_norm else torch.empty_like(rstd)
    w = weight.to(x.dtype).contiguous()
    b = w if bias is None else bias.to(x.dtype).contiguous()
    arguments: list[Any] = [rows, dim, group_size, float(eps), is_rms_norm, norm_before_gate]
    for tensor in (x, residual, z):
        arguments += [*_rows(tensor, x), tensor is not None]
    arguments += [w, b, bias is not None, *_rows(out, x), *_rows(sums, x), store]
    arguments += [rstd if mean is None else mean, rstd]
    how = FORWARD.settings(x.element_size(), rows, dim)
    _forward.over(rows, *arguments, at_least=how.at_least(_rows_a_thread(dim)), most=how.threads)
    return out, sums, mean, rstd


def backward(
    dout: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None,
    dsums: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    group_size: int,
    norm_before_gate: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of v (contiguous), weight, bias and z.

    Parameters
    ----------
    v : Tensor
        (rows, dim): what was normalised; with z and not `norm_before_gate`, before its gate.
    dsums : Tensor, optional
        Joins the gradient of v. Not with z.
    """
    rows, dim = v.shape
    dx = empty(v, rows, dim)
    dz = None if z is None else empty(v, rows, dim)
    w = weight.to(v.dtype).contiguous()
    b = w if bias is None else bias.to(v.dtype).contiguous()
    parts = max(1, min(PARTS, rows))
    dweight, dbias = v.new_zeros(parts, dim), v.new_zeros(parts, dim)
    arguments: list[Any] = [parts, rows, dim, group_size, mean is None, norm_before_gate]
    for tensor in (v, z, dout, dsums):
        arguments += [*_rows(tensor, v), tensor is not None]
    arguments += [w, b, bias is not None, rstd if mean is None else mean.contiguous()]
    arguments += [rstd.contiguous(), dx, dx if dz is None else dz, dweight, dbias]
    how = BACKWARD.settings(v.element_size(), rows, dim)
    at_least = how.at_least(max(1, _rows_a_thread(dim) * parts // max(rows, 1)))
    _backward.over(parts, *arguments, at_least=at_least, most=how.threads)
    return dx, dweight.sum(0), None if bias is None else dbias.sum(0), dz


def _rows_a_thread(dim: int) -> int:
    return -(-ELEMENTS_A_THREAD // dim)


def _rows(tensor: torch.Tensor | None, stand_in: torch.Tensor) -> tuple[Any, int]:
    """Return a tensor's memory and the stride of its rows."""
    tensor = stand_in if tensor is None else tensor
    return tensor, tensor.stride(0)


@kernel
def _forward(
    first, after, rows, dim, size, eps, is_rms_norm, norm_before_gate, x, x_r, _always, residual, residual_r, has_residual,
    z, z_r, has_z, weight, bias, has_bias, out, out_r, sums, sums_r, store, mean, rstd,
):  # fmt: skip
    """Compute the rows first <= row < after."""
    kind = x.dtype
    scratch = begin()
    v = buffer(scratch, size, x)
    gate_first = has_z and not norm_before_gate
    for r in range(first, after):
        for g in range(dim // size):
            c = g * size
            xs = x[r * x_r + c : r * x_r + c + size]
            zs = z[r * z_r + c : r * z_r + c + size]
            y = out[r * out_r + c : r * out_r + c + size]
            w, b = weight[c : c + size], bias[c : c + size]
            total = kind.type(0)
            if has_residual and store:
                rs = residual[r * residual_r + c : r * residual_r + c + size]
                kept = sums[r * sums_r + c : r * sums_r + c + size]
                for i in range(size):
                    value = xs[i] + rs[i]
                    kept[i] = value
                    v[i] = value
                    total += value
            elif has_residual:
                rs = residual[r * residual_r + c : r * residual_r + c + size]
                for i in range(size):
                    v[i] = xs[i] + rs[i]
                    total += v[i]
            elif gate_first:
                for i in range(size):
                    v[i] = xs[i] * zs[i] * sigmoid(zs[i])
                    total += v[i]
            else:
                for i in range(size):
                    v[i] = xs[i]
                    total += v[i]
                if store:
                    kept = sums[r * sums_r + c : r * sums_r + c + size]
                    for i in range(size):
                        kept[i] = v[i]
            square = kind.type(0)
            if is_rms_norm:
                for i in range(size):
                    square += v[i] * v[i]
            else:
                average = kind.type(total / size)
                mean[g * rows + r] = average
                for i in range(size):
                    v[i] -= average
                    square += v[i] * v[i]
            scale = kind.type(1.0 / math.sqrt(square / size + eps))
            rstd[g * rows + r] = scale
            if has_bias:
                for i in range(size):
                    y[i] = v[i] * scale * w[i] + b[i]
            else:
                for i in range(size):
                    y[i] = v[i] * scale * w[i]
            if has_z and norm_before_gate:
                for i in range(size):
                    y[i] *= zs[i] * sigmoid(zs[i])
    end(scratch)


@kernel
def _backward(
    first, after, parts, rows, dim, size, is_rms_norm, norm_before_gate, v, v_r, _always, z, z_r, has_z,
    dout, dout_r, _too, dsums, dsums_r, has_dsums, weight, bias, has_bias, mean, rstd, dx, dz, dweight, dbias,
):  # fmt: skip
    """Compute the parts first <= part < after of the rows."""
    kind = v.dtype
    scratch = begin()
    xhat = buffer(scratch, size, v)
    dy = buffer(scratch, size, v)
    for part in range(first, after):
        for r in range(rows * part // parts, rows * (part + 1) // parts):
            for g in range(dim // size):
                c = g * size
                vs = v[r * v_r + c : r * v_r + c + size]
                zs = z[r * z_r + c : r * z_r + c + size]
                given = dout[r * dout_r + c : r * dout_r + c + size]
                to_x, to_z = dx[r * dim + c : r * dim + c + size], dz[r * dim + c : r * dim + c + size]
                w, b = weight[c : c + size], bias[c : c + size]
                dw = dweight[part * dim + c : part * dim + c + size]
                db = dbias[part * dim + c : part * dim + c + size]
                scale = rstd[g * rows + r]
                average = kind.type(0) if is_rms_norm else mean[g * rows + r]
                along = kind.type(0)
                total = kind.type(0)
                # dv = (g - xhat mean(g xhat) - mean(g)) rstd, g = dy w; an RMS norm lacks the last
                if not has_z:  # nothing is worth keeping in a buffer
                    for i in range(size):
                        normal = (vs[i] - average) * scale
                        gradient = given[i]
                        dw[i] += gradient * normal
                        db[i] += gradient
                        gradient *= w[i]
                        along += gradient * normal
                        total += gradient
                    along = kind.type(along / size)
                    total = kind.type(0) if is_rms_norm else kind.type(total / size)
                    if has_dsums:
                        joins = dsums[r * dsums_r + c : r * dsums_r + c + size]
                        for i in range(size):
                            to_x[i] = (given[i] * w[i] - (vs[i] - average) * scale * along - total) * scale + joins[i]
                    else:
                        for i in range(size):
                            to_x[i] = (given[i] * w[i] - (vs[i] - average) * scale * along - total) * scale
                    continue
                if norm_before_gate:
                    for i in range(size):
                        normal = (vs[i] - average) * scale
                        gate = sigmoid(zs[i])
                        y = normal * w[i] + b[i] if has_bias else normal * w[i]
                        to_z[i] = given[i] * y * gate * (1 + zs[i] * (1 - gate))
                        xhat[i] = normal
                        dy[i] = given[i] * zs[i] * gate
                    for i in range(size):
                        dw[i] += dy[i] * xhat[i]
                        db[i] += dy[i]
                        dy[i] *= w[i]
                        along += dy[i] * xhat[i]
                        total += dy[i]
                else:
                    for i in range(size):
                        xhat[i] = (vs[i] * zs[i] * sigmoid(zs[i]) - average) * scale
                    for i in range(size):
                        normal = xhat[i]
                        gradient = given[i]
                        dw[i] += gradient * normal
                        db[i] += gradient
                        gradient *= w[i]
                        dy[i] = gradient
                        along += gradient * normal
                        total += gradient
                along = kind.type(along / size)
                total = kind.type(0) if is_rms_norm else kind.type(total / size)
                if norm_before_gate:
                    for i in range(size):
                        to_x[i] = (dy[i] - xhat[i] * along - total) * scale
                else:
                    for i in range(size):
                        dv = (dy[i] - xhat[i] * along - total) * scale
                        gate = sigmoid(zs[i])
                        to_x[i] = dv * zs[i] * gate
                        to_z[i] = dv * vs[i] * gate * (1 + zs[i] * (1 - gate))
    end(scratch)
