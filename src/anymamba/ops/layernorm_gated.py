"""Layer norm and RMS norm in groups, gated by a second input: the norm at the end of every Mamba-2 mixer.

y = norm(x) * silu(z)  with `norm_before_gate`, else  y = norm(x * silu(z));  without z the gate is absent.
norm(v) = (v - mean) * rstd * weight + bias over each group of `group_size` columns; an RMS norm has no mean,
rstd = 1 / sqrt(mean((v - mean)^2) + eps). Names and arguments are those of mamba_ssm.ops.triton.layernorm_gated
(2.2.2 to 2.3.2).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F

from anymamba.backends import Operator, choose
from anymamba.errors import OptionError
from anymamba.ops._checks import FLOATING, check_device, check_dtype, check_shape
from anymamba.ops._library import (
    backward_where_forward_ran,
    below_autograd,
    define,
    differentiated,
    placeholder,
    traced,
)
from anymamba.ops._prepared import DEVICES, Prepared
from anymamba.ops._rows import as_rows, check_columns

__all__ = [
    "LayerNorm",
    "LayerNormFn",
    "RMSNorm",
    "_layer_norm_bwd",
    "_layer_norm_fwd",
    "layernorm_fn",
    "rms_norm_ref",
    "rmsnorm_fn",
]

LAYERNORM_GATED = Operator(
    "layernorm_gated", family="layernorm_gated", functions=("layernorm_gated_forward", "layernorm_gated_backward")
)


_prepared = Prepared()


class LayerNormGatedCall(NamedTuple):
    """What a backend may look at to accept or refuse a gated norm."""

    device: torch.device
    dtype: torch.dtype
    weight_dtype: torch.dtype
    group_size: int


class LayerNormGatedBackend(Protocol):
    """What a backend's module `layernorm_gated` provides. Inputs are already checked; any strides may come.

    Outputs have the dtype of the tensor they belong to and the layout of ``torch.empty_like`` of it. The statistics are
    one entry a group and row, entry ``group * rows + row``, in float32 (float64 where x or weight is float64).
    """

    def layernorm_gated_forward(
        self,
        x: torch.Tensor,  # (rows, dim)
        weight: torch.Tensor,  # (dim)
        bias: torch.Tensor | None,  # (dim)
        z: torch.Tensor | None,  # (rows, dim)
        eps: float,
        group_size: int,  # divides dim
        norm_before_gate: bool,
        is_rms_norm: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return out like x, mean (groups * rows; None for an RMS norm), rstd (groups * rows)."""
        ...

    def layernorm_gated_backward(
        self,
        dout: torch.Tensor,  # (rows, dim)
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        z: torch.Tensor | None,
        mean: torch.Tensor | None,  # as the forward returned it
        rstd: torch.Tensor,
        eps: float,
        group_size: int,
        norm_before_gate: bool,
        is_rms_norm: bool,
        recompute_out: bool,
        dz_out: torch.Tensor | None = None,  # like z, any strides: receives dz, and is returned as such
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return dx, dweight, dbias, dz (None where the input is None), and out again (None unless `recompute_out`)."""
        ...


def layernorm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> torch.Tensor:
    """Normalise the last dimension in groups and gate by SiLU of `z`.

    Parameters
    ----------
    x : Tensor
        (..., dim); fp32, fp16, bf16 or fp64; any strides. Statistics are float32 (float64 for float64).
    weight : Tensor
        (dim).
    bias : Tensor, optional
        (dim).
    z : Tensor, optional
        Like x: the gate.
    eps : float
        Added to the variance.
    group_size : int, optional
        Columns normalised together; divides dim. None: all of them.
    norm_before_gate : bool
        ``norm(x) * silu(z)`` if true, else ``norm(x * silu(z))``.
    is_rms_norm : bool
        Leave the mean where it is.

    Returns
    -------
    Tensor
        Like x.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, OptionError
        Before any work, naming the argument.
    """
    tensors, options, key = (x, weight, bias, z), (eps, group_size, norm_before_gate, is_rms_norm), None
    tracing, differentiable = traced(x), differentiated(x, weight, bias, z)
    if not tracing and not differentiable and (x.is_cuda or x.device.type in DEVICES):
        prepared = _prepared.alike(tensors, *options)
        if prepared is not None:
            known = prepared(*tensors)
            if known is not None:
                return cast(torch.Tensor, known)
        key = _prepared.key(tensors, *options)
        prepared = _prepared.find(key)
        if prepared is not None:
            return cast(torch.Tensor, prepared(*tensors))
    check_dtype("x", x, FLOATING)
    dim = check_columns("x", x)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check_shape(name, vector, (dim,), "(dim,)")
            check_dtype(name, vector, FLOATING)
            check_device(name, vector, x, "x")
    if z is not None:
        check_shape("z", z, x.shape, "the shape of x")
        check_dtype("z", z, FLOATING)
        check_device("z", z, x, "x")
    group_size = dim if group_size is None else group_size
    if group_size < 1 or dim % group_size != 0:
        raise OptionError(f"group_size is {group_size}, but must be positive and divide x's last dimension, {dim}.")
    gate = None if z is None else as_rows(z)
    arguments = (as_rows(x), weight, bias, gate, float(eps), group_size, norm_before_gate, is_rms_norm)
    if tracing:
        out, _, _ = torch.ops.anymamba.layernorm_gated(*arguments)
    elif differentiable:
        out, _, _ = _LayerNormGated.apply(*arguments)
    else:
        out, _, _ = _forward(*arguments)
    if key is not None:
        backend = choose(LAYERNORM_GATED, _call(x, weight, group_size))
        _prepared.remember(key, backend, LAYERNORM_GATED, (*tensors, *arguments[4:]), tensors, *options)
    result: torch.Tensor = out.reshape(x.shape)
    return result


def rmsnorm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> torch.Tensor:
    """`layernorm_fn` without the mean: see there."""
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm=True)


def rms_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    upcast: bool = True,
) -> torch.Tensor:
    """Compute `rmsnorm_fn` by plain differentiable PyTorch; without `upcast` in the inputs' own dtypes."""
    dtype, dim = x.dtype, x.shape[-1]
    weight, bias = weight.float(), None if bias is None else bias.float()
    if upcast:
        x, z = x.float(), None if z is None else z.float()
    if z is not None and not norm_before_gate:
        x = x * F.silu(z)
    groups = x.unflatten(-1, (-1, dim if group_size is None else group_size))
    normed = groups / torch.sqrt(groups.square().mean(-1, keepdim=True) + eps)
    out = normed.flatten(-2) * weight
    if bias is not None:
        out = out + bias
    if z is not None and norm_before_gate:
        out = out * F.silu(z)
    result: torch.Tensor = out.to(dtype)
    return result


class LayerNorm(torch.nn.Module):
    """Gated layer norm over groups of `group_size` columns (None: one group)."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set weight to one and bias to zero."""
        torch.nn.init.ones_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Return the norm of x (..., hidden_size), gated by z."""
        return layernorm_fn(
            x,
            self.weight,
            self.bias,
            z=z,
            eps=self.eps,
            group_size=self.group_size,
            norm_before_gate=self.norm_before_gate,
        )


class RMSNorm(torch.nn.Module):
    """Gated RMS norm over groups of `group_size` columns (None: one group)."""

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set weight to one."""
        torch.nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Return the RMS norm of x (..., hidden_size), gated by z."""
        return rmsnorm_fn(
            x,
            self.weight,
            self.bias,
            z=z,
            eps=self.eps,
            group_size=self.group_size,
            norm_before_gate=self.norm_before_gate,
        )


class LayerNormFn:
    """Upstream's name for the autograd.Function; ``LayerNormFn.apply`` is `layernorm_fn`."""

    apply = staticmethod(layernorm_fn)


# --- upstream's private pair, which its own modules and forks import; (rows, dim) in, statistics (groups * rows,) out


@torch.no_grad()
def _layer_norm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    z: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    seen, mean, rstd = _forward(
        x, weight, bias, z, eps, x.shape[-1] if group_size is None else group_size, norm_before_gate, is_rms_norm
    )
    return seen if out is None else out.copy_(seen), mean, rstd


@torch.no_grad()
def _layer_norm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    z: torch.Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    recompute_output: bool = False,
    dz: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    group_size = x.shape[-1] if group_size is None else group_size
    dx, dweight, dbias, gate_gradient, seen = _backward(
        dy, x, weight, bias, z, mean, rstd, eps, group_size, norm_before_gate, is_rms_norm, recompute_output,
        dz,
    )  # fmt: skip
    if not recompute_output:
        return dx, dweight, dbias, gate_gradient
    if out is not None and seen is not None:
        seen = out.copy_(seen)
    return dx, dweight, dbias, gate_gradient, seen


def _call(x: torch.Tensor, weight: torch.Tensor, group_size: int) -> LayerNormGatedCall:
    return LayerNormGatedCall(x.device, x.dtype, weight.dtype, group_size)


@backward_where_forward_ran
class _LayerNormGated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        z: torch.Tensor | None,
        eps: float,
        group_size: int,
        norm_before_gate: bool,
        is_rms_norm: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        arguments = (x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm)
        if traced(x):
            with below_autograd():
                out, mean, rstd = torch.ops.anymamba.layernorm_gated(*arguments)
        else:
            out, mean, rstd = _forward_op(*arguments)
        ctx.save_for_backward(x, weight, bias, z, mean, rstd)
        ctx.options = (eps, group_size, norm_before_gate, is_rms_norm)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        return out, mean, rstd

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, _mean: None, _rstd: None) -> Any:
        if dout is None:
            return (None,) * 8
        x, weight, bias, z, mean, rstd = ctx.saved_tensors
        run: Any = torch.ops.anymamba.layernorm_gated_backward if traced(x) else _backward_op
        dx, dweight, dbias, dz, _ = run(dout, x, weight, bias, z, mean, rstd, *ctx.options, False)
        return (dx, dweight, None if bias is None else dbias, None if z is None else dz, None, None, None, None)


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    is_rms_norm: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    backend: LayerNormGatedBackend = choose(LAYERNORM_GATED, _call(x, weight, group_size))
    return backend.layernorm_gated_forward(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm)


def _backward(
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
    backend: LayerNormGatedBackend = choose(LAYERNORM_GATED, _call(x, weight, group_size))
    return backend.layernorm_gated_backward(
        dout,
        x,
        weight,
        bias,
        z,
        None if is_rms_norm else mean,
        rstd,
        eps,
        group_size,
        norm_before_gate,
        is_rms_norm,
        recompute_out,
        dz_out,
    )


# --- torch.library: the same functions as opaque operators; "none" outputs become placeholders


def _forward_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    is_rms_norm: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out, mean, rstd = _forward(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm)
    return out, placeholder(rstd) if mean is None else mean, rstd


def _forward_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    is_rms_norm: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    statistics = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    rstd = x.new_empty((x.shape[1] // group_size * x.shape[0],), dtype=statistics)
    return torch.empty_like(x), placeholder(rstd) if is_rms_norm else torch.empty_like(rstd), rstd


def _backward_op(
    dout: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    is_rms_norm: bool,
    recompute_out: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dx, dweight, dbias, dz, out = _backward(
        dout, x, weight, bias, z, mean, rstd, eps, group_size, norm_before_gate, is_rms_norm, recompute_out
    )
    return (
        dx,
        dweight,
        placeholder(weight) if dbias is None else dbias,
        placeholder(x) if dz is None else dz,
        placeholder(x) if out is None else out,
    )


def _backward_fake(
    dout: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    is_rms_norm: bool,
    recompute_out: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(x),
        torch.empty_like(weight),
        placeholder(weight) if bias is None else torch.empty_like(bias),
        placeholder(x) if z is None else torch.empty_like(z),
        torch.empty_like(x) if recompute_out else placeholder(x),
    )


define(
    "layernorm_gated(Tensor x, Tensor weight, Tensor? bias, Tensor? z, float eps, SymInt group_size, "
    "bool norm_before_gate, bool is_rms_norm) -> (Tensor, Tensor, Tensor)",
    _forward_op,
    _forward_fake,
    autograd=_LayerNormGated.apply,
)
define(
    "layernorm_gated_backward(Tensor dout, Tensor x, Tensor weight, Tensor? bias, Tensor? z, Tensor mean, Tensor rstd, "
    "float eps, SymInt group_size, bool norm_before_gate, bool is_rms_norm, bool recompute_out) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_op,
    _backward_fake,
)
