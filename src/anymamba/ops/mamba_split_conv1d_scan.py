"""The inside of a Mamba-2 block, from its input projection to its output projection.

    zx0, z, xBC, dt = split(zxbcdt);  x, B, C = split(silu(causal_conv1d(xBC)))
    y = ssd(x, dt, A, B, C, D, dt_bias, softplus)
    y = rmsnorm(y, z)  in ngroups groups, with `rmsnorm_weight`;  else  y * silu(z)
    out = linear(concat(swiglu(zx0), y), outproj_weight, outproj_bias)

zx0 is what zxbcdt holds beyond the rest: the gated MLP beside the scan of a block with d_ssm < d_inner, usually nothing.
For training it is one autograd.Function over the backends' convolution, scan, norm and gate: it keeps zxbcdt and the norm's
rstd, computes everything else again in the backward, and has the gradients written into one buffer. (Upstream also keeps
the scan's output.) Names and arguments are those of mamba_ssm.ops.triton.ssd_combined (2.2.2 to 2.3.2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from anymamba.errors import DtypeError, OptionError, ShapeError
from anymamba.ops import causal_conv1d, layernorm_gated, ssd
from anymamba.ops._autocast import autocast_dtype, without_autocast
from anymamba.ops._checks import FLOATING, check_activation, check_device, check_dim, check_dtype, check_shape
from anymamba.ops._library import backward_where_forward_ran, differentiated, traced
from anymamba.ops._linear import linear
from anymamba.ops._sharding import current
from anymamba.ops.ssd_pieces import ssd_selective_scan
from anymamba.ops.swiglu import _swiglu_bwd, _swiglu_fwd, swiglu

__all__ = [
    "MambaSplitConv1dScanCombinedFn",
    "mamba_split_conv1d_scan_combined",
    "mamba_split_conv1d_scan_ref",
]


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: torch.Tensor | None = None,
    rmsnorm_eps: float | None = 1e-6,
    outproj_weight: torch.Tensor | None = None,
    outproj_bias: torch.Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Any:
    """Run the inside of a Mamba-2 block; the formula is at the top of this module.

    Parameters
    ----------
    zxbcdt : Tensor
        (batch, seqlen, 2 * d_nonssm + 2 * dim + 2 * ngroups * dstate + nheads), dim = nheads * headdim; fp32, fp16, bf16
        or fp64.
    conv1d_weight, conv1d_bias : Tensor
        (dim + 2 * ngroups * dstate, width) and (dim + 2 * ngroups * dstate); the bias may be None.
    dt_bias, A : Tensor
        (nheads).
    D : Tensor
        (nheads, headdim) or (nheads).
    chunk_size : int
        Upstream's unit of work. No result depends on it beyond rounding.
    initial_states : Tensor, optional
        (batch, nheads, headdim, dstate) of the scan. The convolution starts from zeros.
    seq_idx : Tensor, optional
        (batch, seqlen), int32 or int64: number of the packed sequence a token belongs to.
    dt_limit : (float, float)
    return_final_states : bool
        Return the scan's state after the last token too.
    activation : {None, "silu", "swish"}
        Of the convolution.
    rmsnorm_weight : Tensor, optional
        (dim). Without it the scan's output is only gated by z.
    rmsnorm_eps : float, optional
        None (FalconH1 without norm passes it) counts as 1e-6.
    outproj_weight, outproj_bias : Tensor, optional
        (out_dim, d_nonssm + dim) and (out_dim). Under autocast they are cast as a linear layer's would be.
    headdim : int, optional
        Needed when D is (nheads).
    ngroups : int
        Groups of B and C, and of the norm.
    norm_before_gate : bool
        ``rmsnorm(y) * silu(z)`` if true, else ``rmsnorm(y * silu(z))``.

    Returns
    -------
    Tensor, or (Tensor, Tensor) with `return_final_states`
        out (batch, seqlen, out_dim), or (batch, seqlen, d_nonssm + dim) without projection; final_states
        (batch, nheads, headdim, dstate).

    Raises
    ------
    ShapeError, DtypeError, DeviceError, OptionError
        Before any work, naming the argument.
    """
    inputs = _Inputs(
        zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, initial_states, seq_idx,
        rmsnorm_weight, outproj_weight, outproj_bias,
    )  # fmt: skip
    sizes = _sizes(inputs, headdim, ngroups)
    options = _Options(
        check_activation(activation),
        float(dt_limit[0]),
        float(dt_limit[1]),
        bool(return_final_states),
        1e-6 if rmsnorm_eps is None else float(rmsnorm_eps),
        bool(norm_before_gate),
        None if outproj_weight is None else autocast_dtype(zxbcdt.device.type) or outproj_weight.dtype,
    )
    _check(inputs, sizes, options, chunk_size)
    if current.sharding is not None or traced(zxbcdt) or not differentiated(*inputs):
        out, final_states = _composed(inputs, sizes, options)
    else:
        out, final_states = _SplitConv1dScan.apply(sizes, options, *inputs)
    return (out, final_states) if return_final_states else out


class MambaSplitConv1dScanCombinedFn:
    """Upstream's name for the autograd.Function; its ``apply`` is `mamba_split_conv1d_scan_combined`."""

    apply = staticmethod(mamba_split_conv1d_scan_combined)


def mamba_split_conv1d_scan_ref(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    activation: str | None = "silu",
    rmsnorm_weight: torch.Tensor | None = None,
    rmsnorm_eps: float | None = 1e-6,
    outproj_weight: torch.Tensor | None = None,
    outproj_bias: torch.Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> torch.Tensor:
    """Compute `mamba_split_conv1d_scan_combined` step by step, through the selective scan of Mamba-1.

    The norm is in `ngroups` groups, as in the combined function; upstream's reference takes one group whatever `ngroups`
    is, and so disagrees with upstream's own kernels.
    """
    inputs = _Inputs(
        zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, None, None, rmsnorm_weight, outproj_weight, outproj_bias
    )
    sizes = _sizes(inputs, headdim, ngroups)
    zx0, z, xBC, dt = _split(zxbcdt, sizes)
    conv = causal_conv1d.causal_conv1d_fn(xBC.transpose(1, 2), conv1d_weight, conv1d_bias, activation=activation)
    x, B, C = _split_conv(conv.transpose(1, 2), sizes)
    gate = z.unflatten(-1, (sizes.heads, sizes.headdim)) if rmsnorm_weight is None else None
    skip = D.to(torch.promote_types(D.dtype, torch.float32))
    out = ssd_selective_scan(
        x, dt.to(x.dtype), A, B, C, D=skip, z=gate, dt_bias=dt_bias, dt_softplus=True, dt_limit=dt_limit
    ).flatten(2)
    if rmsnorm_weight is not None:
        out = layernorm_gated.rmsnorm_fn(
            out,
            rmsnorm_weight,
            None,
            z,
            1e-6 if rmsnorm_eps is None else rmsnorm_eps,
            sizes.dim // sizes.groups,
            norm_before_gate,
        )
    if sizes.nonssm:
        out = torch.cat([swiglu(zx0), out], dim=-1)
    return out if outproj_weight is None else linear(out, outproj_weight, outproj_bias)


class _Inputs(NamedTuple):
    """The tensors, in the order in which the autograd.Function takes them."""

    zxbcdt: torch.Tensor
    conv1d_weight: torch.Tensor
    conv1d_bias: torch.Tensor | None
    dt_bias: torch.Tensor
    A: torch.Tensor
    D: torch.Tensor
    initial_states: torch.Tensor | None
    seq_idx: torch.Tensor | None
    rmsnorm_weight: torch.Tensor | None
    outproj_weight: torch.Tensor | None
    outproj_bias: torch.Tensor | None


class _Sizes(NamedTuple):
    nonssm: int
    heads: int
    headdim: int
    groups: int
    dstate: int

    @property
    def dim(self) -> int:
        return self.heads * self.headdim

    @property
    def conv(self) -> int:
        return self.dim + 2 * self.groups * self.dstate


class _Options(NamedTuple):
    silu: bool
    dt_min: float
    dt_max: float
    return_final_states: bool
    eps: float
    norm_before_gate: bool
    product: torch.dtype | None  # of the out projection


def _sizes(inputs: _Inputs, headdim: int | None, ngroups: int) -> _Sizes:
    """Read all sizes off the shapes, as upstream does."""
    D = inputs.D
    check_dim("zxbcdt", inputs.zxbcdt, 3, "(batch, seqlen, width)")
    check_dim("conv1d_weight", inputs.conv1d_weight, 2, "(dim + 2 * ngroups * dstate, width)")
    if D.dim() == 2:
        heads, headdim = D.shape
    elif D.dim() == 1:
        heads = D.shape[0]
        if headdim is None:
            raise OptionError("headdim is None, but must be given when D is (nheads,): nothing else says it.")
    else:
        raise ShapeError(f"D has shape {tuple(D.shape)}, but must be (nheads,) or (nheads, headdim).")
    if ngroups < 1 or heads % ngroups != 0:
        raise OptionError(f"ngroups is {ngroups}, but must be positive and divide the number of heads, {heads}.")
    dim, width, columns = heads * headdim, inputs.zxbcdt.shape[2], inputs.conv1d_weight.shape[0]
    dstate = (columns - dim) // ngroups // 2
    if dstate < 0 or columns != dim + 2 * ngroups * dstate:
        raise ShapeError(
            f"conv1d_weight has {columns} rows, but must have dim + 2 * ngroups * dstate, where dim = {heads} heads * "
            f"{headdim} = {dim} and ngroups = {ngroups}."
        )
    nonssm = (width - dim - columns - heads) // 2
    if nonssm < 0 or width != 2 * nonssm + dim + columns + heads:
        raise ShapeError(
            f"zxbcdt has width {width}, but must have dim + (dim + 2 * ngroups * dstate) + nheads = "
            f"{dim + columns + heads}, or an even number more."
        )
    return _Sizes(nonssm, heads, headdim, ngroups, dstate)


def _check(inputs: _Inputs, sizes: _Sizes, options: _Options, chunk_size: int) -> None:
    zxbcdt = inputs.zxbcdt
    batch, seqlen, _ = zxbcdt.shape
    check_shape("dt_bias", inputs.dt_bias, (sizes.heads,), "(nheads,)")
    check_shape("A", inputs.A, (sizes.heads,), "(nheads,)")
    if inputs.conv1d_bias is not None:
        check_shape("conv1d_bias", inputs.conv1d_bias, (sizes.conv,), "(dim + 2 * ngroups * dstate,)")
    if inputs.initial_states is not None:
        shape = (batch, sizes.heads, sizes.headdim, sizes.dstate)
        check_shape("initial_states", inputs.initial_states, shape, "(batch, nheads, headdim, dstate)")
    if inputs.rmsnorm_weight is not None:
        check_shape("rmsnorm_weight", inputs.rmsnorm_weight, (sizes.dim,), "(dim,)")
    weight, bias = inputs.outproj_weight, inputs.outproj_bias
    if weight is None and bias is not None:
        raise OptionError("outproj_bias is given, but outproj_weight is None.")
    if weight is not None:
        check_dim("outproj_weight", weight, 2, "(out_dim, d_nonssm + dim)")
        columns = sizes.nonssm + sizes.dim
        check_shape("outproj_weight", weight, (weight.shape[0], columns), "(out_dim, d_nonssm + dim)")
        if bias is not None:
            check_shape("outproj_bias", bias, (weight.shape[0],), "(out_dim,)")
    if inputs.seq_idx is not None:
        check_shape("seq_idx", inputs.seq_idx, (batch, seqlen), "(batch, seqlen)")
    for name, tensor in inputs._asdict().items():
        if tensor is not None:
            check_dtype(name, tensor, (torch.int32, torch.int64) if name == "seq_idx" else FLOATING)
            check_device(name, tensor, zxbcdt, "zxbcdt")
    if weight is not None and autocast_dtype(zxbcdt.device.type) is None and weight.dtype != zxbcdt.dtype:
        raise DtypeError(
            f"outproj_weight has dtype {weight.dtype}, but must have that of zxbcdt, {zxbcdt.dtype}, outside autocast."
        )
    if chunk_size < 1:
        raise OptionError(f"chunk_size is {chunk_size}, but must be at least 1.")


def _split(zxbcdt: torch.Tensor, sizes: _Sizes) -> tuple[torch.Tensor, ...]:
    """Return zx0, z, xBC, dt."""
    return torch.split(zxbcdt, [2 * sizes.nonssm, sizes.dim, sizes.conv, sizes.heads], dim=-1)


def _split_conv(conv: torch.Tensor, sizes: _Sizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x (batch, seqlen, nheads, headdim), B, C (batch, seqlen, ngroups, dstate): views of (batch, seqlen, conv)."""
    inner = sizes.groups * sizes.dstate
    x, B, C = torch.split(conv, [sizes.dim, inner, inner], dim=-1)
    return (
        x.unflatten(-1, (sizes.heads, sizes.headdim)),
        B.unflatten(-1, (sizes.groups, sizes.dstate)),
        C.unflatten(-1, (sizes.groups, sizes.dstate)),
    )


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return (batch, seqlen, ...) as (batch * seqlen, all the rest)."""
    return tensor.flatten(2).flatten(0, 1)


def _project(out: torch.Tensor, inputs: _Inputs, options: _Options) -> torch.Tensor:
    if inputs.outproj_weight is None:
        return out
    product = options.product
    bias = None if inputs.outproj_bias is None else inputs.outproj_bias.to(product)
    with without_autocast(out.device.type):
        return linear(out.to(product), inputs.outproj_weight.to(product), bias)


def _composed(inputs: _Inputs, sizes: _Sizes, options: _Options) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the block of differentiable operators: for tracing, inference and a sharded sequence."""
    zx0, z, xBC, dt = _split(inputs.zxbcdt, sizes)
    conv = causal_conv1d.causal_conv1d_fn(
        xBC.transpose(1, 2),
        inputs.conv1d_weight,
        inputs.conv1d_bias,
        seq_idx=inputs.seq_idx,
        activation="silu" if options.silu else None,
    )
    x, B, C = _split_conv(conv.transpose(1, 2), sizes)
    gated_by_scan = inputs.rmsnorm_weight is None
    y = ssd.mamba_chunk_scan_combined(
        x,
        dt,
        inputs.A,
        B,
        C,
        1,
        D=inputs.D,
        z=z.unflatten(-1, (sizes.heads, sizes.headdim)) if gated_by_scan else None,
        dt_bias=inputs.dt_bias,
        initial_states=inputs.initial_states,
        seq_idx=inputs.seq_idx,
        dt_softplus=True,
        dt_limit=(options.dt_min, options.dt_max),
        return_final_states=options.return_final_states,
    )
    y, final_states = y if options.return_final_states else (y, None)
    del x, B, C, conv
    out: torch.Tensor = y.flatten(2)
    del y
    if inputs.rmsnorm_weight is not None:
        out = layernorm_gated.rmsnorm_fn(
            out, inputs.rmsnorm_weight, None, z, options.eps, sizes.dim // sizes.groups, options.norm_before_gate
        )
    if sizes.nonssm:
        out = torch.cat([swiglu(zx0), out], dim=-1)
    return _project(out, inputs, options), final_states


@backward_where_forward_ran
class _SplitConv1dScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sizes: _Sizes, options: _Options, *tensors: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs = _Inputs(*tensors)
        zx0, z, xBC, dt = _split(inputs.zxbcdt, sizes)
        conv = _convolution(inputs, options, xBC)
        y, final_states = _scan(inputs, sizes, options, conv, z, dt)
        out, rstd = y.flatten(2), None
        if inputs.rmsnorm_weight is not None:
            normed, _, rstd = layernorm_gated._forward(
                _rows(y), inputs.rmsnorm_weight, None, _rows(z), *_norm_options(sizes, options)
            )
            out = normed.view(out.shape)
        del y
        if sizes.nonssm:
            out = torch.cat([_swiglu_fwd(zx0), out], dim=-1)
        ctx.save_for_backward(*inputs, rstd)
        ctx.sizes, ctx.options = sizes, options
        ctx.set_materialize_grads(False)
        return _project(out, inputs, options), final_states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dfinal_states: torch.Tensor | None) -> Any:
        *tensors, rstd = ctx.saved_tensors
        inputs = _Inputs(*tensors)
        with without_autocast(inputs.zxbcdt.device.type):
            gradients = _backward(inputs, ctx.sizes, ctx.options, rstd, dout, dfinal_states)
        return (
            None,
            None,
            *(
                None if gradient is None or tensor is None else gradient.to(tensor.dtype)
                for gradient, tensor in zip(gradients, inputs)
            ),
        )


def _convolution(inputs: _Inputs, options: _Options, xBC: torch.Tensor) -> torch.Tensor:
    """Return the convolution's output as (batch, seqlen, conv)."""
    conv, _ = causal_conv1d._forward(
        xBC.transpose(1, 2), inputs.conv1d_weight, inputs.conv1d_bias, inputs.seq_idx, None, options.silu, False
    )
    return conv.transpose(1, 2)


def _scan_inputs(
    inputs: _Inputs, sizes: _Sizes, options: _Options, conv: torch.Tensor, z: torch.Tensor, dt: torch.Tensor
) -> tuple[Any, ...]:
    x, B, C = _split_conv(conv, sizes)
    gate = z.unflatten(-1, (sizes.heads, sizes.headdim)) if inputs.rmsnorm_weight is None else None
    return (
        x, dt, inputs.A, B, C, inputs.D, gate, inputs.dt_bias, inputs.initial_states, inputs.seq_idx, None,
        True, options.dt_min, options.dt_max,
    )  # fmt: skip


def _scan(
    inputs: _Inputs, sizes: _Sizes, options: _Options, conv: torch.Tensor, z: torch.Tensor, dt: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    call = _scan_inputs(inputs, sizes, options, conv, z, dt)
    y, final_states, _ = ssd._forward(*(*call, options.return_final_states))
    return y, final_states


def _norm_options(sizes: _Sizes, options: _Options) -> tuple[float, int, bool, bool]:
    """Return eps, group_size, norm_before_gate, is_rms_norm."""
    return options.eps, sizes.dim // sizes.groups, options.norm_before_gate, True


def _backward(
    inputs: _Inputs,
    sizes: _Sizes,
    options: _Options,
    rstd: torch.Tensor | None,
    dout: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of every input, in the order of `_Inputs`."""
    zxbcdt, weight = inputs.zxbcdt, inputs.outproj_weight
    zx0, z, xBC, dt = _split(zxbcdt, sizes)
    dzxbcdt = torch.empty_like(zxbcdt)
    dzx0, dz, dxBC, ddt = _split(dzxbcdt, sizes)
    conv = _convolution(inputs, options, xBC)
    projected = weight is not None and dout is not None

    # Out projection.
    dinner, dweight, dbias, drows = dout, None, None, None
    if weight is not None:
        dweight = torch.zeros_like(weight) if dout is None else None
        dbias = None if inputs.outproj_bias is None else inputs.outproj_bias.new_zeros(inputs.outproj_bias.shape)
        if dout is not None:
            drows = _rows(dout.to(options.product))
            dinner = linear(drows, weight.to(options.product).t()).unflatten(0, dout.shape[:2]).to(zxbcdt.dtype)
            if inputs.outproj_bias is not None:
                dbias = drows.sum(0)
    inner: list[torch.Tensor] = []  # what went into the out projection, side by side
    if dinner is None:
        dinner = zxbcdt.new_zeros((*zxbcdt.shape[:2], sizes.nonssm + sizes.dim))
    dbeside, dy = dinner.split([sizes.nonssm, sizes.dim], dim=-1)
    if sizes.nonssm:
        beside = _swiglu_bwd(zx0, dbeside, dxy=dzx0, recompute_output=projected)
        if projected:
            inner.append(_rows(beside[1]))

    # Norm and gate, scan.
    dnorm = None
    if inputs.rmsnorm_weight is not None:
        y, _ = _scan(inputs, sizes, options._replace(return_final_states=False), conv, z, dt)
        assert rstd is not None
        found, dnorm, _, _, normed = layernorm_gated._backward(
            _rows(dy), _rows(y), inputs.rmsnorm_weight, None, _rows(z), None, rstd,
            *_norm_options(sizes, options), projected, _rows(dz),
        )  # fmt: skip
        del y
        dy = found.view(dy.shape)
        if normed is not None:
            inner.append(normed)
    dconv = torch.empty_like(conv)
    dx, dB, dC = _split_conv(dconv, sizes)
    scan = ssd._backward(
        dy.unflatten(-1, (sizes.heads, sizes.headdim)),
        dfinal_states,
        None,
        *_scan_inputs(inputs, sizes, options, conv, z, dt),
        into=ssd.SsdBuffers(dx, ddt, dB, dC, dz.unflatten(-1, (sizes.heads, sizes.headdim)) if dnorm is None else None),
        recompute_out=projected and dnorm is None,
    )
    del conv, dy
    if scan.out is not None:
        inner.append(_rows(scan.out))
    if drows is not None and weight is not None:
        dweight = torch.cat([linear(drows.t(), part.to(drows.dtype).t()) for part in inner], dim=1)
    inner.clear()

    # Convolution.
    _, dconv_weight, dconv_bias, _ = causal_conv1d._backward(
        xBC.transpose(1, 2), inputs.conv1d_weight, inputs.conv1d_bias, dconv.transpose(1, 2), inputs.seq_idx,
        None, None, options.silu, dx_out=dxBC.transpose(1, 2),
    )  # fmt: skip
    return (
        dzxbcdt, dconv_weight, dconv_bias, scan.ddt_bias, scan.dA, scan.dD, scan.dinitial_states, None,
        dnorm, dweight, dbias,
    )  # fmt: skip
