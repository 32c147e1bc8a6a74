"""Dropout, residual addition and layer norm or RMS norm in one operator: what stands before every mixer of a model.

v = drop(x * rowscale) + drop(x1) + residual;  out = norm(v) * weight + bias,  out1 = norm(v) * weight1 + bias1;
norm(v) = (v - mean) * rstd over the last dimension, rstd = 1 / sqrt(mean((v - mean)^2) + eps); an RMS norm has no mean.
v itself is the next block's residual. Names, arguments and return conventions are those of
mamba_ssm.ops.triton.layer_norm (2.2.2 to 2.3.2).

Dropout masks are drawn here, from PyTorch's generator of x's device, and handed to the backend: every backend drops the
same elements, and activation checkpointing, which restores the generator, recomputes with the same masks.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from anymamba.backends import Operator, choose
from anymamba.errors import OptionError
from anymamba.ops._autocast import autocast_dtype
from anymamba.ops._checks import FLOATING, check_device, check_dtype, check_shape
from anymamba.ops._library import (
    backward_where_forward_ran,
    below_autograd,
    define,
    differentiated,
    placeholder,
    traced,
)
from anymamba.ops._linear import linear
from anymamba.ops._prepared import DEVICES, Prepared
from anymamba.ops._rows import as_rows, check_columns

__all__ = [
    "LayerNormFn",
    "LayerNormLinearFn",
    "RMSNorm",
    "_layer_norm_bwd",
    "_layer_norm_fwd",
    "layer_norm_fn",
    "layer_norm_linear_fn",
    "layer_norm_ref",
    "rms_norm_fn",
    "rms_norm_ref",
]

LAYER_NORM = Operator("layer_norm", family="layer_norm", functions=("layer_norm_forward", "layer_norm_backward"))


_prepared = Prepared()


class LayerNormCall(NamedTuple):
    """What a backend may look at to accept or refuse a norm."""

    device: torch.device
    dtype: torch.dtype
    weight_dtype: torch.dtype
    dim: int


class LayerNormForward(NamedTuple):
    """What a backend's forward returns."""

    out: torch.Tensor
    out1: torch.Tensor | None
    residual_out: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor


class LayerNormBackward(NamedTuple):
    """What a backend's backward returns: a gradient like its input, None where there is no such input."""

    dx: torch.Tensor
    dweight: torch.Tensor
    dbias: torch.Tensor | None
    dresidual: torch.Tensor | None
    dx1: torch.Tensor | None
    dweight1: torch.Tensor | None
    dbias1: torch.Tensor | None
    out: torch.Tensor | None


class LayerNormBackend(Protocol):
    """What a backend's module `layer_norm` provides. Inputs are already checked; any strides may come.

    Statistics are one entry a row, in float32 (float64 where x, weight or residual is float64).
    """

    def layer_norm_forward(
        self,
        x: torch.Tensor,  # (rows, dim)
        weight: torch.Tensor,  # (dim)
        bias: torch.Tensor | None,  # (dim)
        residual: torch.Tensor | None,  # (rows, dim)
        x1: torch.Tensor | None,  # (rows, dim)
        weight1: torch.Tensor | None,  # (dim)
        bias1: torch.Tensor | None,  # (dim)
        rowscale: torch.Tensor | None,  # (rows); scales x
        keep: torch.Tensor | None,  # (rows, dim), bool: what dropout leaves of x, scaled by 1 / (1 - dropout_p)
        keep1: torch.Tensor | None,  # (rows, dim), bool: the same for x1
        dropout_p: float,
        eps: float,
        is_rms_norm: bool,
        out_dtype: torch.dtype,
        residual_dtype: torch.dtype | None,  # of residual_out; None: not wanted
    ) -> LayerNormForward:
        """Return out and out1 (None without weight1) in the layout of x, residual_out contiguous, mean and rstd (rows).

        `mean` is None for an RMS norm. No result may share memory with an input.
        """
        ...

    def layer_norm_backward(
        self,
        dout: torch.Tensor,  # (rows, dim)
        v: torch.Tensor,  # (rows, dim): what was normalised, as the forward rounded it
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        weight1: torch.Tensor | None,
        bias1: torch.Tensor | None,
        dout1: torch.Tensor | None,  # (rows, dim); None exactly where weight1 is
        dresidual_out: torch.Tensor | None,  # (rows, dim): joins the gradient of v
        rowscale: torch.Tensor | None,
        keep: torch.Tensor | None,
        keep1: torch.Tensor | None,
        dropout_p: float,
        mean: torch.Tensor | None,
        rstd: torch.Tensor,
        eps: float,
        is_rms_norm: bool,
        x_dtype: torch.dtype,  # of dx and dx1; dresidual has that of v
        has_residual: bool,
        has_x1: bool,
        recompute_out: bool,  # return out again, in dout's dtype
    ) -> LayerNormBackward:
        """Return the gradients, those of rows contiguous; dx, dx1 and dresidual may be one tensor where they are equal."""
        ...


def layer_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """Drop, add and normalise.

    Parameters
    ----------
    x : Tensor
        (..., dim); fp32, fp16, bf16 or fp64; any strides. Everything between is float32 (float64 for float64).
    weight, bias : Tensor
        (dim); bias may be None.
    residual : Tensor, optional
        Like x, of any dtype: added before the norm.
    x1 : Tensor, optional
        Like x: a second branch, dropped on its own and added.
    weight1, bias1 : Tensor, optional
        (dim): a second affine map of the same normalised values.
    eps : float
    dropout_p : float
        Probability of dropping an element of x (and of x1); 0 <= dropout_p < 1. There is no training switch here.
    rowscale : Tensor, optional
        (...): scales each row of x before dropout (not with x1). Gets no gradient, as upstream's.
    prenorm : bool
        Return the sum before the norm too: the next block's residual.
    residual_in_fp32 : bool
        Without a residual: keep that sum in float32. With one it keeps the residual's dtype.
    is_rms_norm : bool
        Leave the mean where it is.
    return_dropout_mask : bool
        Return the two masks of kept elements too (None without dropout, without x1).

    Returns
    -------
    Tensor or tuple
        ``out[, out1 if weight1][, residual_out if prenorm][, mask, mask1 if return_dropout_mask]``; a single result
        is no tuple. out and out1 have x's dtype.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, OptionError
        Before any work, naming the argument.
    """
    tensors, options, key = (x, weight, bias, residual), (eps, prenorm, residual_in_fp32, is_rms_norm), None
    tracing, differentiable = traced(x), differentiated(x, weight, bias, residual, x1, weight1, bias1)
    plain = x1 is None and weight1 is None and bias1 is None and rowscale is None
    plain = plain and dropout_p == 0.0 and not return_dropout_mask
    if plain and not tracing and not differentiable and (x.is_cuda or x.device.type in DEVICES):
        prepared = _prepared.alike(tensors, *options)
        if prepared is not None:
            known = prepared(*tensors)
            if known is not None:
                return known
        key = _prepared.key(tensors, *options)
        prepared = _prepared.find(key)
        if prepared is not None:
            return prepared(*tensors)
    dim = _check_input(x, residual)
    _check_vectors(x, dim, weight=weight, bias=bias, weight1=weight1, bias1=bias1)
    if bias1 is not None and weight1 is None:
        raise OptionError("bias1 is given, but weight1 is None.")
    if x1 is not None:
        check_shape("x1", x1, x.shape, "the shape of x")
        check_dtype("x1", x1, FLOATING)
        check_device("x1", x1, x, "x")
        if rowscale is not None:
            raise OptionError("rowscale is given together with x1, but upstream defines it for x alone.")
    if rowscale is not None:
        check_shape("rowscale", rowscale, x.shape[:-1], "x's shape without its last dimension")
        check_device("rowscale", rowscale, x, "x")
    if not 0.0 <= dropout_p < 1.0:
        raise OptionError(f"dropout_p is {dropout_p}, but must be at least 0 and less than 1.")
    keep = keep1 = None
    if dropout_p > 0.0:
        keep = _keep(x, dropout_p)
        keep1 = None if x1 is None else _keep(x, dropout_p)
    residual_dtype = _residual_dtype(x, residual, residual_in_fp32)
    changed = residual is not None or x1 is not None or rowscale is not None or dropout_p > 0.0
    rows = as_rows(x)
    arguments = (
        rows,
        weight,
        bias,
        None if residual is None else as_rows(residual),
        None if x1 is None else as_rows(x1),
        weight1,
        bias1,
        None if rowscale is None else rowscale.reshape(rows.shape[0]),
        None if keep is None else as_rows(keep),
        None if keep1 is None else as_rows(keep1),
        float(dropout_p),
        float(eps),
        is_rms_norm,
        x.dtype,
        # A plain x is its own sum: nothing to store.
        residual_dtype if changed or residual_dtype != x.dtype else None,
    )
    if tracing:
        out, out1, residual_out, _, _ = torch.ops.anymamba.layer_norm(*arguments)
    elif differentiable:
        out, out1, residual_out, _, _ = _LayerNorm.apply(*arguments)
    else:
        out, out1, residual_out, _, _ = _forward_op(*arguments)
    if key is not None:
        wanted = (*tensors, float(eps), is_rms_norm, arguments[-1], prenorm)
        _prepared.remember(
            key, choose(LAYER_NORM, _call(rows, weight, residual)), LAYER_NORM, wanted, tensors, *options
        )
    flat = x.dim() == 2
    results: list[torch.Tensor | None] = [out if flat else out.reshape(x.shape)]
    if weight1 is not None:
        results.append(out1 if flat else out1.reshape(x.shape))
    if prenorm:
        results.append(x if arguments[-1] is None else residual_out if flat else residual_out.reshape(x.shape))
    if return_dropout_mask:
        results += [keep, keep1]
    return results[0] if len(results) == 1 else tuple(results)


def rms_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """`layer_norm_fn` without the mean: see there."""
    return layer_norm_fn(
        x,
        weight,
        bias,
        residual,
        x1,
        weight1,
        bias1,
        eps,
        dropout_p,
        rowscale,
        prenorm,
        residual_in_fp32,
        is_rms_norm=True,
        return_dropout_mask=return_dropout_mask,
    )


def layer_norm_linear_fn(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Any:
    """Normalise and project: ``linear(norm(x + residual))``; the backward computes the normalised values again.

    Parameters
    ----------
    x : Tensor
        (..., dim).
    norm_weight, norm_bias : Tensor
        (dim); norm_bias may be None.
    linear_weight, linear_bias : Tensor
        (out_dim, dim) and (out_dim); linear_bias may be None. Used in autocast's dtype where autocast is on, else in x's.
    residual, eps, prenorm, residual_in_fp32, is_rms_norm
        As in `layer_norm_fn`.

    Returns
    -------
    Tensor, or (Tensor, Tensor) with `prenorm`
        (..., out_dim), and the sum before the norm.
    """
    dim = _check_input(x, residual)
    _check_vectors(x, dim, norm_weight=norm_weight, norm_bias=norm_bias)
    check_shape("linear_weight", linear_weight, (linear_weight.shape[0], dim), "(out_dim, dim)")
    check_dtype("linear_weight", linear_weight, FLOATING)
    check_device("linear_weight", linear_weight, x, "x")
    if linear_bias is not None:
        check_shape("linear_bias", linear_bias, (linear_weight.shape[0],), "(out_dim,)")
        check_dtype("linear_bias", linear_bias, FLOATING)
        check_device("linear_bias", linear_bias, x, "x")
    out_dtype = autocast_dtype(x.device.type) or x.dtype
    residual_dtype = _residual_dtype(x, residual, residual_in_fp32)
    stored = residual_dtype if residual is not None or residual_dtype != x.dtype else None
    rows, residual_rows = as_rows(x), None if residual is None else as_rows(residual)
    if traced(x):
        # The compiler decides itself what to keep for the backward.
        out, _, residual_out, _, _ = torch.ops.anymamba.layer_norm(
            rows, norm_weight, norm_bias, residual_rows, None, None, None, None, None, None,
            0.0, float(eps), is_rms_norm, out_dtype, stored,
        )  # fmt: skip
        out = linear(out, linear_weight.to(out_dtype), None if linear_bias is None else linear_bias.to(out_dtype))
    else:
        out, residual_out = _LayerNormLinear.apply(
            rows, norm_weight, norm_bias, linear_weight, linear_bias, residual_rows, float(eps), is_rms_norm,
            out_dtype, stored,
        )  # fmt: skip
    out = out.reshape(*x.shape[:-1], linear_weight.shape[0])
    if not prenorm:
        return out
    return out, x if stored is None else residual_out.reshape(x.shape)


def layer_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: bool = False,
    dropout_mask: torch.Tensor | None = None,
    dropout_mask1: torch.Tensor | None = None,
    upcast: bool = False,
) -> Any:
    """Compute `layer_norm_fn` by plain differentiable PyTorch; with `upcast` in float32."""
    return _plain(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, dropout_mask, dropout_mask1,
        upcast, is_rms_norm=False,
    )  # fmt: skip


def rms_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: bool = False,
    dropout_mask: torch.Tensor | None = None,
    dropout_mask1: torch.Tensor | None = None,
    upcast: bool = False,
) -> Any:
    """Compute `rms_norm_fn` by plain differentiable PyTorch; with `upcast` in float32."""
    return _plain(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, dropout_mask, dropout_mask1,
        upcast, is_rms_norm=True,
    )  # fmt: skip


class RMSNorm(torch.nn.Module):
    """RMS norm that can add a residual and drop first, as `rms_norm_fn`."""

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.drop = torch.nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set weight to one."""
        torch.nn.init.ones_(self.weight)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        """Return the norm, and with `prenorm` the sum before it."""
        return rms_norm_fn(
            x,
            self.weight,
            self.bias,
            residual=residual,
            eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
        )


class LayerNormFn:
    """Upstream's name for the autograd.Function; ``LayerNormFn.apply`` is `layer_norm_fn`."""

    apply = staticmethod(layer_norm_fn)


class LayerNormLinearFn:
    """Upstream's name for the autograd.Function; ``LayerNormLinearFn.apply`` is `layer_norm_linear_fn`."""

    apply = staticmethod(layer_norm_linear_fn)


# --- upstream's private pair. What upstream calls seeds (opaque to callers) are here the masks themselves, x1's below x's.


@torch.no_grad()
def _layer_norm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    if residual is not None:
        residual_dtype = residual.dtype
    seeds = keep = keep1 = None
    if dropout_p > 0.0:
        seeds = _keep(x if x1 is None else torch.cat([x, x1]), dropout_p)
        keep, keep1 = seeds[: x.shape[0]], None if x1 is None else seeds[x.shape[0] :]
    changed = residual is not None or x1 is not None or rowscale is not None or dropout_p > 0.0
    wanted = residual_dtype or x.dtype
    found = _forward(
        x, weight, bias, residual, x1, weight1, bias1, rowscale, keep, keep1, dropout_p, eps, is_rms_norm,
        out_dtype or x.dtype, wanted if changed or wanted != x.dtype else None,
    )  # fmt: skip
    residual_out = x if found.residual_out is None else found.residual_out
    masks = (keep, keep1) if return_dropout_mask else (None, None)
    return found.out, found.out1, found.mean, found.rstd, residual_out, seeds, *masks


@torch.no_grad()
def _layer_norm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    dresidual: torch.Tensor | None = None,
    dy1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    has_residual: bool = False,
    has_x1: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    keep = None if seeds is None else seeds[: x.shape[0]]
    keep1 = seeds[x.shape[0] :] if seeds is not None and has_x1 else None
    found = _backward(
        dy, x, weight, bias, weight1, bias1, dy1, dresidual, rowscale, keep, keep1, dropout_p, mean, rstd, eps,
        is_rms_norm, x_dtype or x.dtype, has_residual, has_x1, recompute_output,
    )  # fmt: skip
    return tuple(found) if recompute_output else tuple(found[:-1])


def _check_input(x: torch.Tensor, residual: torch.Tensor | None) -> int:
    check_dtype("x", x, FLOATING)
    if residual is not None:
        check_shape("residual", residual, x.shape, "the shape of x")
        check_dtype("residual", residual, FLOATING)
        check_device("residual", residual, x, "x")
    return check_columns("x", x)


def _check_vectors(x: torch.Tensor, dim: int, **vectors: torch.Tensor | None) -> None:
    for name, vector in vectors.items():
        if vector is not None:
            check_shape(name, vector, (dim,), "(dim,)")
            check_dtype(name, vector, FLOATING)
            check_device(name, vector, x, "x")


def _residual_dtype(x: torch.Tensor, residual: torch.Tensor | None, in_fp32: bool) -> torch.dtype:
    if residual is not None:
        return residual.dtype
    return torch.promote_types(x.dtype, torch.float32) if in_fp32 else x.dtype


def _keep(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Draw which elements dropout keeps: bool, the shape of x."""
    return torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1.0 - dropout_p)


def _plain(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    x1: torch.Tensor | None,
    weight1: torch.Tensor | None,
    bias1: torch.Tensor | None,
    eps: float,
    dropout_p: float,
    rowscale: torch.Tensor | None,
    prenorm: bool,
    dropout_mask: torch.Tensor | None,
    dropout_mask1: torch.Tensor | None,
    upcast: bool,
    is_rms_norm: bool,
) -> Any:
    if x1 is not None and rowscale is not None:
        raise OptionError("rowscale is given together with x1, but upstream defines it for x alone.")
    dtype = x.dtype

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if upcast else tensor

    def dropped(branch: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if dropout_p == 0.0:
            return branch
        if mask is None:
            return F.dropout(branch, dropout_p)
        return branch.masked_fill(~mask, 0.0) / (1.0 - dropout_p)

    v = wide(x)
    if rowscale is not None:
        v = v * rowscale.unsqueeze(-1)
    v = dropped(v, dropout_mask)
    if x1 is not None:
        v = v + dropped(wide(x1), dropout_mask1)
    if residual is not None:
        v = (v + wide(residual)).to(v.dtype)

    def normed(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight, bias = wide(weight), None if bias is None else wide(bias)
        if not is_rms_norm:
            return F.layer_norm(v.to(weight.dtype), v.shape[-1:], weight, bias, eps).to(dtype)
        y = v / torch.sqrt(v.square().mean(-1, keepdim=True) + eps) * weight
        return (y if bias is None else y + bias).to(dtype)

    results = [normed(weight, bias)]
    if weight1 is not None:
        results.append(normed(weight1, bias1))
    if prenorm:
        results.append(v)
    return results[0] if len(results) == 1 else tuple(results)


@backward_where_forward_ran
class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        arguments = (
            x, weight, bias, residual, x1, weight1, bias1, rowscale, keep, keep1, dropout_p, eps, is_rms_norm,
            out_dtype, residual_dtype,
        )  # fmt: skip
        if traced(x):
            with below_autograd():
                out, out1, residual_out, mean, rstd = torch.ops.anymamba.layer_norm(*arguments)
        else:
            out, out1, residual_out, mean, rstd = _forward_op(*arguments)
        v = x if residual_dtype is None else residual_out
        ctx.save_for_backward(v, weight, bias, weight1, bias1, rowscale, keep, keep1, mean, rstd)
        ctx.dropout_p, ctx.eps, ctx.is_rms_norm, ctx.x_dtype = dropout_p, eps, is_rms_norm, x.dtype
        ctx.has_residual, ctx.has_x1, ctx.stored = residual is not None, x1 is not None, residual_dtype is not None
        ctx.x1_dtype = None if x1 is None else x1.dtype
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        return out, out1, residual_out, mean, rstd

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any,
        dout: torch.Tensor | None,
        dout1: torch.Tensor | None,
        dresidual_out: torch.Tensor | None,
        _mean: None,
        _rstd: None,
    ) -> Any:
        v, weight, bias, weight1, bias1, rowscale, keep, keep1, mean, rstd = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(v, dtype=ctx.x_dtype)
        if not ctx.stored:  # the gradients of placeholders
            dresidual_out = None
        if weight1 is None:
            dout1 = None
        elif dout1 is None:
            dout1 = torch.zeros_like(v, dtype=ctx.x_dtype)
        run: Any = torch.ops.anymamba.layer_norm_backward if traced(v) else _backward
        dx, dweight, dbias, dresidual, dx1, dweight1, dbias1, _ = run(
            dout, v, weight, bias, weight1, bias1, dout1, dresidual_out, rowscale, keep, keep1, ctx.dropout_p, mean,
            rstd, ctx.eps, ctx.is_rms_norm, ctx.x_dtype, ctx.has_residual, ctx.has_x1, False,
        )  # fmt: skip
        return (
            dx,
            dweight,
            None if bias is None else dbias,
            dresidual if ctx.has_residual else None,
            dx1.to(ctx.x1_dtype) if ctx.has_x1 else None,
            None if weight1 is None else dweight1,
            None if bias1 is None else dbias1,
            *(None,) * 8,
        )


@backward_where_forward_ran
class _LayerNormLinear(torch.autograd.Function):
    """Eager only: the normalised rows are not kept but computed again in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor | None,
        linear_weight: torch.Tensor,
        linear_bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        eps: float,
        is_rms_norm: bool,
        out_dtype: torch.dtype,
        residual_dtype: torch.dtype | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, _, residual_out, mean, rstd = _forward_op(
            x, norm_weight, norm_bias, residual, None, None, None, None, None, None, 0.0, eps, is_rms_norm, out_dtype,
            residual_dtype,
        )  # fmt: skip
        weight = linear_weight.to(out_dtype)
        out = linear(y, weight, None if linear_bias is None else linear_bias.to(out_dtype))
        v = x if residual_dtype is None else residual_out
        ctx.save_for_backward(v, norm_weight, norm_bias, weight, mean, rstd)
        ctx.eps, ctx.is_rms_norm, ctx.x_dtype, ctx.has_residual = eps, is_rms_norm, x.dtype, residual is not None
        ctx.weight_dtype, ctx.bias_dtype = linear_weight.dtype, None if linear_bias is None else linear_bias.dtype
        ctx.stored = residual_dtype is not None
        ctx.set_materialize_grads(False)
        return out, residual_out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dresidual_out: torch.Tensor | None) -> Any:
        v, norm_weight, norm_bias, weight, mean, rstd = ctx.saved_tensors
        if not ctx.stored:
            dresidual_out = None
        if dout is None:
            dout = weight.new_zeros(v.shape[0], weight.shape[0])
        with torch.autocast(v.device.type, enabled=False):
            dy = linear(dout, weight.t())
            found = _backward(
                dy, v, norm_weight, norm_bias, None, None, None, dresidual_out, None, None, None, 0.0, mean, rstd,
                ctx.eps, ctx.is_rms_norm, ctx.x_dtype, ctx.has_residual, False, True,
            )  # fmt: skip
            assert found.out is not None
            dlinear_weight = linear(dout.t(), found.out.t()).to(ctx.weight_dtype)
        return (
            found.dx,
            found.dweight,
            found.dbias,
            dlinear_weight,
            None if ctx.bias_dtype is None else dout.sum(0).to(ctx.bias_dtype),
            found.dresidual,
            *(None,) * 4,
        )


def _call(v: torch.Tensor, weight: torch.Tensor, other: torch.Tensor | None) -> LayerNormCall:
    """Describe a call; where the residual or the statistics are float64, so is the arithmetic, and the call says so."""
    wide = other is not None and other.dtype == torch.float64
    return LayerNormCall(v.device, torch.float64 if wide else v.dtype, weight.dtype, v.shape[1])


def _forward(
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
    backend: LayerNormBackend = choose(LAYER_NORM, _call(x, weight, residual))
    return backend.layer_norm_forward(
        x, weight, bias, residual, x1, weight1, bias1, rowscale, keep, keep1, dropout_p, eps, is_rms_norm, out_dtype,
        residual_dtype,
    )  # fmt: skip


def _backward(
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
    backend: LayerNormBackend = choose(LAYER_NORM, _call(v, weight, rstd))
    return backend.layer_norm_backward(
        dout, v, weight, bias, weight1, bias1, dout1, dresidual_out, rowscale, keep, keep1, dropout_p,
        None if is_rms_norm else mean, rstd, eps, is_rms_norm, x_dtype, has_residual, has_x1, recompute_out,
    )  # fmt: skip


# --- torch.library: the same functions as opaque operators; "none" outputs become placeholders


def _forward_op(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    out, out1, residual_out, mean, rstd = _forward(
        x, weight, bias, residual, x1, weight1, bias1, rowscale, keep, keep1, dropout_p, eps, is_rms_norm, out_dtype,
        residual_dtype,
    )  # fmt: skip
    return (
        out,
        placeholder(out) if out1 is None else out1,
        placeholder(x) if residual_out is None else residual_out,
        placeholder(rstd) if mean is None else mean,
        rstd,
    )


def _forward_fake(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    statistics = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    if residual is not None:
        statistics = torch.promote_types(statistics, residual.dtype)
    out = torch.empty_like(x, dtype=out_dtype)
    rstd = x.new_empty((x.shape[0],), dtype=statistics)
    return (
        out,
        placeholder(out) if weight1 is None else torch.empty_like(out),
        placeholder(x) if residual_dtype is None else x.new_empty(x.shape, dtype=residual_dtype),
        placeholder(rstd) if is_rms_norm else torch.empty_like(rstd),
        rstd,
    )


def _backward_op(
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
    mean: torch.Tensor,
    rstd: torch.Tensor,
    eps: float,
    is_rms_norm: bool,
    x_dtype: torch.dtype,
    has_residual: bool,
    has_x1: bool,
    recompute_out: bool,
) -> tuple[torch.Tensor, ...]:
    found = _backward(
        dout, v, weight, bias, weight1, bias1, dout1, dresidual_out, rowscale, keep, keep1, dropout_p, mean, rstd, eps,
        is_rms_norm, x_dtype, has_residual, has_x1, recompute_out,
    )  # fmt: skip
    results: list[torch.Tensor] = []
    for gradient in found:
        if gradient is None:
            results.append(placeholder(v))
        else:  # the outputs of a torch.library operator must not share memory
            results.append(gradient.clone() if any(gradient is earlier for earlier in results) else gradient)
    return tuple(results)


def _backward_fake(
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
    mean: torch.Tensor,
    rstd: torch.Tensor,
    eps: float,
    is_rms_norm: bool,
    x_dtype: torch.dtype,
    has_residual: bool,
    has_x1: bool,
    recompute_out: bool,
) -> tuple[torch.Tensor, ...]:
    def like(vector: torch.Tensor | None) -> torch.Tensor:
        return placeholder(v) if vector is None else torch.empty_like(vector)

    dx = v.new_empty(v.shape, dtype=x_dtype)
    return (
        dx,
        torch.empty_like(weight),
        like(bias),
        v.new_empty(v.shape) if has_residual else placeholder(v),
        torch.empty_like(dx) if has_x1 else placeholder(v),
        like(weight1),
        like(bias1),
        v.new_empty(v.shape, dtype=dout.dtype) if recompute_out else placeholder(v),
    )


define(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? x1, Tensor? weight1, Tensor? bias1, "
    "Tensor? rowscale, Tensor? keep, Tensor? keep1, float dropout_p, float eps, bool is_rms_norm, ScalarType out_dtype, "
    "ScalarType? residual_dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward_op,
    _forward_fake,
    autograd=_LayerNorm.apply,
)
define(
    "layer_norm_backward(Tensor dout, Tensor v, Tensor weight, Tensor? bias, Tensor? weight1, Tensor? bias1, "
    "Tensor? dout1, Tensor? dresidual_out, Tensor? rowscale, Tensor? keep, Tensor? keep1, float dropout_p, Tensor mean, "
    "Tensor rstd, float eps, bool is_rms_norm, ScalarType x_dtype, bool has_residual, bool has_x1, bool recompute_out) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_op,
    _backward_fake,
)
