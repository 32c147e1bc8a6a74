"""The inside of a Mamba block, from its input projection to its output projection.

    x, z = xz.chunk(2, dim=1);  x = silu(causal_conv1d(x))
    delta_low, B, C = x_proj_weight @ x;  delta = delta_proj_weight @ delta_low
    out = out_proj_weight @ selective_scan(x, delta, A, B, C, D, z) + out_proj_bias

For training it is one autograd.Function over the backends' convolution and scan: it keeps xz, the low-rank projection and
the scan's checkpoints, and computes the convolution and delta again in the backward (checkpoint_lvl 1, upstream's default);
the gradients of x and z are written into one buffer. Names and arguments are those of mamba_ssm (1.0 to 2.3).

Tensors between are laid out (dim, batch * length), as upstream's block lays out its xz: then every projection is one matrix
product and needs no copy. Other layouts work, with copies.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from anymamba.backends import use_backend
from anymamba.errors import OptionError, ShapeError
from anymamba.ops import causal_conv1d, selective_scan
from anymamba.ops._autocast import autocast_dtype, without_autocast
from anymamba.ops._checks import FLOATING, cast, check_device, check_dim, check_dtype, check_shape
from anymamba.ops._library import backward_where_forward_ran, differentiated, traced
from anymamba.ops._sharding import current

__all__ = ["mamba_inner_fn", "mamba_inner_ref"]


def mamba_inner_fn(
    xz: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    x_proj_weight: torch.Tensor,
    delta_proj_weight: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    A: torch.Tensor,
    B: torch.Tensor | None = None,
    C: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    B_proj_bias: torch.Tensor | None = None,
    C_proj_bias: torch.Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: torch.Tensor | None = None,
    c_rms_weight: torch.Tensor | None = None,
    dt_rms_weight: torch.Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> torch.Tensor:
    """Run the inside of a Mamba block; the formula is at the top of this module.

    Parameters
    ----------
    xz : Tensor
        (batch, 2 * dim, seqlen): x, then the gate z.
    conv1d_weight, conv1d_bias : Tensor
        (dim, 1, width) and (dim); the bias may be None.
    x_proj_weight : Tensor
        (rank + dstate + dstate, dim), rows for delta, B, C; with complex A 2 * dstate rows each for B and C, real and
        imaginary parts interleaved. Rows of a B or C that is given are not used.
    delta_proj_weight : Tensor
        (dim, rank).
    out_proj_weight, out_proj_bias : Tensor
        (out_dim, dim) and (out_dim); the bias may be None.
    A : Tensor
        (dim, dstate), real or complex.
    B, C : Tensor, optional
        As in `selective_scan_fn`, instead of the projected ones.
    D, delta_bias : Tensor, optional
        (dim).
    B_proj_bias, C_proj_bias : Tensor, optional
        (dstate), for complex A (2 * dstate): added to the projected B and C.
    delta_softplus : bool
    checkpoint_lvl : {0, 1}
        0 keeps the convolution's output and delta for the backward instead of computing them again.
    b_rms_weight, c_rms_weight, dt_rms_weight : Tensor, optional
        Weights (dstate), (dstate), (dim) of RMS norms of B, C and delta. (Upstream's backward ignores these norms; ours
        does not.)
    b_c_dt_rms_eps : float

    Returns
    -------
    Tensor
        (batch, seqlen, out_dim); in autocast's dtype where autocast is on.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, OptionError
        Before any work, naming the argument.
    """
    if checkpoint_lvl not in (0, 1):
        raise OptionError(f"checkpoint_lvl is {checkpoint_lvl!r}, but must be 0 or 1.")
    _check(
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B, C, D,
        delta_bias, B_proj_bias, C_proj_bias,
    )  # fmt: skip
    norms = (b_rms_weight, c_rms_weight, dt_rms_weight)
    tensors = (
        xz, conv1d_weight.flatten(1), conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias,
        A, B, C, D, delta_bias, B_proj_bias, C_proj_bias,
    )  # fmt: skip
    composed = current.sharding is not None or traced(xz) or any(weight is not None for weight in norms)
    if composed or not differentiated(*tensors):
        return _composed(_Inputs(*tensors), bool(delta_softplus), norms, b_c_dt_rms_eps)
    out: torch.Tensor = _MambaInner.apply(bool(delta_softplus), checkpoint_lvl, *tensors)
    return out


def mamba_inner_ref(
    xz: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    x_proj_weight: torch.Tensor,
    delta_proj_weight: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    A: torch.Tensor,
    B: torch.Tensor | None = None,
    C: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    B_proj_bias: torch.Tensor | None = None,
    C_proj_bias: torch.Tensor | None = None,
    delta_softplus: bool = True,
) -> torch.Tensor:
    """Compute `mamba_inner_fn` step by step with the reference backend and autograd's own backward; slow."""
    tensors = (
        xz, conv1d_weight.flatten(1), conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias,
        A, B, C, D, delta_bias, B_proj_bias, C_proj_bias,
    )  # fmt: skip
    with use_backend("reference"):
        return _composed(_Inputs(*tensors), delta_softplus, (None, None, None), 0.0)


class _Inputs(NamedTuple):
    xz: torch.Tensor
    conv1d_weight: torch.Tensor  # (dim, width)
    conv1d_bias: torch.Tensor | None
    x_proj_weight: torch.Tensor
    delta_proj_weight: torch.Tensor
    out_proj_weight: torch.Tensor
    out_proj_bias: torch.Tensor | None
    A: torch.Tensor
    B: torch.Tensor | None
    C: torch.Tensor | None
    D: torch.Tensor | None
    delta_bias: torch.Tensor | None
    B_proj_bias: torch.Tensor | None
    C_proj_bias: torch.Tensor | None

    @property
    def out_dtype(self) -> torch.dtype:
        """Autocast's dtype where autocast is on, else that of xz and the weights."""
        dtype = autocast_dtype(self.xz.device.type)
        return torch.promote_types(self.xz.dtype, self.x_proj_weight.dtype) if dtype is None else dtype

    def in_product_dtype(self) -> _Inputs:
        """Cast the projections' weights to the dtype that their products are computed in."""
        dtype = self.out_dtype
        if dtype == torch.float16 and self.xz.device.type == "cpu" and not _half_products_on_cpu():
            dtype = torch.float32
        return self._replace(
            x_proj_weight=cast(self.x_proj_weight, dtype),
            delta_proj_weight=cast(self.delta_proj_weight, dtype),
            out_proj_weight=cast(self.out_proj_weight, dtype),
            out_proj_bias=None if self.out_proj_bias is None else cast(self.out_proj_bias, dtype),
        )


@functools.cache
def _half_products_on_cpu() -> bool:
    """Return whether this torch multiplies fp16 matrices on CPU (2.1 does not)."""
    try:
        torch.zeros(1, 1, dtype=torch.float16) @ torch.zeros(1, 1, dtype=torch.float16)
    except RuntimeError:
        return False
    return True


def _check(
    xz: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    x_proj_weight: torch.Tensor,
    delta_proj_weight: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    A: torch.Tensor,
    B: torch.Tensor | None,
    C: torch.Tensor | None,
    D: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    B_proj_bias: torch.Tensor | None,
    C_proj_bias: torch.Tensor | None,
) -> None:
    check_dim("xz", xz, 3, "(batch, 2 * dim, seqlen)")
    check_dtype("xz", xz, FLOATING)
    if xz.shape[1] % 2:
        raise ShapeError(f"xz has shape {tuple(xz.shape)}, but must be (batch, 2 * dim, seqlen): an even second size.")
    dim = xz.shape[1] // 2
    check_dim("conv1d_weight", conv1d_weight, 3, "(dim, 1, width)")
    check_shape("conv1d_weight", conv1d_weight, (dim, 1, conv1d_weight.shape[2]), "(dim, 1, width)")
    check_dim("A", A, 2, "(dim, dstate)")
    check_shape("A", A, (dim, A.shape[1]), "(dim, dstate)")
    check_dim("delta_proj_weight", delta_proj_weight, 2, "(dim, rank)")
    rank = delta_proj_weight.shape[1]
    check_shape("delta_proj_weight", delta_proj_weight, (dim, rank), "(dim, rank)")
    check_dim("x_proj_weight", x_proj_weight, 2, "(rank + 2 * dstate, dim)")
    check_shape("x_proj_weight", x_proj_weight, (x_proj_weight.shape[0], dim), "(rank + 2 * dstate, dim)")
    rows = A.shape[1] * (2 if A.is_complex() else 1)
    least = rank + rows * ((B is None) + (C is None))
    if x_proj_weight.shape[0] < least:
        raise ShapeError(
            f"x_proj_weight has {x_proj_weight.shape[0]} rows, but must have at least {least}: "
            f"rank {rank}, and {rows} for each of B and C that is not given."
        )
    check_dim("out_proj_weight", out_proj_weight, 2, "(out_dim, dim)")
    check_shape("out_proj_weight", out_proj_weight, (out_proj_weight.shape[0], dim), "(out_dim, dim)")
    check_dtype("A", A, (*FLOATING, torch.complex64, torch.complex128))
    groups = None
    for name, given in (("B", B), ("C", C)):
        if given is not None:
            groups = selective_scan._check_matrix(name, given, xz[:, :dim], A, groups)
    for name, vector, size in (
        ("conv1d_bias", conv1d_bias, dim),
        ("D", D, dim),
        ("delta_bias", delta_bias, dim),
        ("out_proj_bias", out_proj_bias, out_proj_weight.shape[0]),
        ("B_proj_bias", B_proj_bias, rows),
        ("C_proj_bias", C_proj_bias, rows),
    ):
        if vector is not None:
            check_shape(name, vector, (size,), f"({size},)")
            check_device(name, vector, xz, "xz")
    check_device("A", A, xz, "xz")
    for name, matrix in (
        ("conv1d_weight", conv1d_weight),
        ("x_proj_weight", x_proj_weight),
        ("delta_proj_weight", delta_proj_weight),
        ("out_proj_weight", out_proj_weight),
    ):
        check_dtype(name, matrix, FLOATING)
        check_device(name, matrix, xz, "xz")


def _composed(
    inputs: _Inputs, delta_softplus: bool, norms: tuple[torch.Tensor | None, ...], eps: float
) -> torch.Tensor:
    """Compute the block of differentiable operators: for tracing, inference, the variant with RMS norms, a sharded sequence."""
    out_dtype = inputs.out_dtype
    inputs = inputs.in_product_dtype()  # so that autocast has nothing left to do
    with without_autocast(inputs.xz.device.type):
        x, z = inputs.xz.chunk(2, dim=1)
        x = causal_conv1d.causal_conv1d_fn(x, inputs.conv1d_weight, inputs.conv1d_bias, activation="silu")
        _, delta, B, C = _projected(inputs, x)
        for_B, for_C, for_delta = norms
        B = B if for_B is None else _rms_norm(B, for_B, eps, dim=2)
        C = C if for_C is None else _rms_norm(C, for_C, eps, dim=2)
        delta = delta if for_delta is None else _rms_norm(delta, for_delta, eps, dim=1)
        y = selective_scan.selective_scan_fn(x, delta, inputs.A, B, C, inputs.D, z, inputs.delta_bias, delta_softplus)
        return cast(_out_projection(inputs, y), out_dtype)


@backward_where_forward_ran
class _MambaInner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, delta_softplus: bool, checkpoint_lvl: int, *tensors: Any) -> torch.Tensor:
        out_dtype = _Inputs(*tensors).out_dtype
        inputs = _Inputs(*tensors).in_product_dtype()
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        ctx.delta_softplus = delta_softplus
        batch, _, seqlen = inputs.xz.shape
        with without_autocast(inputs.xz.device.type):
            x, z = _halves(inputs.xz)
            conv = _convolution(inputs, x)
            x_dbl = torch.mm(inputs.x_proj_weight, cast(_flat_now(conv), inputs.x_proj_weight.dtype))
            delta = _delta_now(inputs, x_dbl, batch, seqlen)
            B, C = _matrices(inputs, x_dbl, batch, seqlen)
            call = selective_scan._normalised(
                conv, delta, inputs.A, B, C, inputs.D, z, inputs.delta_bias, delta_softplus, None
            )
            y, _, checkpoints = selective_scan._forward(*(*call, True))
            columns, weight = _transposed(cast(_flat_now(y), inputs.out_proj_weight.dtype)), inputs.out_proj_weight
            if inputs.out_proj_bias is None:
                out = torch.mm(columns, _transposed(weight))
            else:
                out = torch.addmm(inputs.out_proj_bias, columns, _transposed(weight))
            out = cast(out.view(batch, seqlen, weight.shape[0]), out_dtype)
        kept = (conv, delta) if checkpoint_lvl == 0 else (None, None)
        ctx.save_for_backward(*inputs, x_dbl, checkpoints, *kept)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        *tensors, x_dbl, checkpoints, conv, delta = ctx.saved_tensors
        inputs = _Inputs(*tensors)
        with without_autocast(inputs.xz.device.type):
            gradients = _backward(inputs, x_dbl, checkpoints, conv, delta, dout, ctx.delta_softplus)
        return (
            None,
            None,
            *(
                None if dtype is None or gradient is None else cast(gradient, dtype)
                for gradient, dtype in zip(gradients, ctx.dtypes)
            ),
        )


def _backward(
    inputs: _Inputs,
    x_dbl: torch.Tensor,
    checkpoints: torch.Tensor | None,
    conv: torch.Tensor | None,
    delta: torch.Tensor | None,
    dout: torch.Tensor,
    delta_softplus: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of every input, in the order of `_Inputs`."""
    xz, A = inputs.xz, inputs.A
    batch, _, seqlen = xz.shape
    rank = inputs.delta_proj_weight.shape[1]
    products = inputs.out_proj_weight.dtype
    x, z = _halves(xz)
    if conv is None:
        conv = _convolution(inputs, x)
    if delta is None:
        delta = _delta_now(inputs, x_dbl, batch, seqlen)
    B, C = _matrices(inputs, x_dbl, batch, seqlen)
    call = selective_scan._normalised(conv, delta, A, B, C, inputs.D, z, inputs.delta_bias, delta_softplus, None)

    dout_flat = cast(dout, products).reshape(batch * seqlen, dout.shape[-1])
    dy = _unflat_now(torch.mm(_transposed(inputs.out_proj_weight), _transposed(dout_flat)), batch, seqlen)
    dxz = torch.empty_like(xz)
    dx, dz = _halves(dxz)
    same = call[6].dtype == dz.dtype
    dx_dbl = torch.zeros_like(x_dbl) if inputs.B is not None or inputs.C is not None else torch.empty_like(x_dbl)
    # dB and dC go straight to their rows of dx_dbl, if nothing is to be done to them on the way.
    straight = not A.is_complex() and x_dbl.dtype == call[0].dtype
    rows = A.shape[1] * (2 if A.is_complex() else 1)
    row_of_C = x_dbl.shape[0] - rows
    dB_out = _as_matrix(dx_dbl, rank, rows, batch, seqlen) if straight and inputs.B is None else None
    dC_out = _as_matrix(dx_dbl, row_of_C, rows, batch, seqlen) if straight and inputs.C is None else None
    scan_backward: Any = selective_scan._backward
    dconv, ddelta, dA, dB, dC, dD, dz_found, ddelta_bias, _, y = scan_backward(
        *call, checkpoints, dy, None, return_out=True, dz_out=dz if same else None,
        dB_out=dB_out, dC_out=dC_out,
    )  # fmt: skip
    assert y is not None and dz_found is not None
    if not same:
        dz.copy_(dz_found)
    dout_proj_weight = torch.mm(_transposed(dout_flat), _transposed(cast(_flat_now(y), products)))
    dout_proj_bias = None if inputs.out_proj_bias is None else dout_flat.sum(0)

    del y, dy  # so that the peak of memory is no higher than it must be
    dB_proj_bias = dC_proj_bias = None
    if inputs.B is None:
        if not straight:
            dx_dbl[rank : rank + rows] = _matrix_rows(dB, A)
        dB_proj_bias = None if inputs.B_proj_bias is None else dx_dbl[rank : rank + rows].sum(1)
    if inputs.C is None:
        if not straight:
            dx_dbl[row_of_C:] = _matrix_rows(dC, A)
        dC_proj_bias = None if inputs.C_proj_bias is None else dx_dbl[row_of_C:].sum(1)
    ddelta_flat = cast(_flat_now(ddelta), products)
    ddelta_proj_weight = torch.mm(ddelta_flat, _transposed(_first_rows(x_dbl, rank)))
    torch.mm(_transposed(inputs.delta_proj_weight), ddelta_flat, out=_first_rows(dx_dbl, rank))
    dx_proj_weight = torch.mm(dx_dbl, _transposed(cast(_flat_now(conv), products)))
    dconv_flat = cast(_flat_now(dconv), products).addmm_(_transposed(inputs.x_proj_weight), dx_dbl)
    _, dconv1d_weight, dconv1d_bias, _ = causal_conv1d._backward(
        x,
        inputs.conv1d_weight,
        inputs.conv1d_bias,
        cast(_unflat_now(dconv_flat, batch, seqlen), x.dtype),
        None,
        None,
        None,
        True,
        dx_out=dx,
    )
    return (
        dxz, dconv1d_weight, dconv1d_bias, dx_proj_weight, ddelta_proj_weight, dout_proj_weight, dout_proj_bias,
        dA,
        _like_given(dB, inputs.B),
        _like_given(dC, inputs.C),
        dD, ddelta_bias, dB_proj_bias, dC_proj_bias,
    )  # fmt: skip


def _like_given(gradient: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor | None:
    """Return the gradient of a B or C that was given, without the dimension of groups if it came without."""
    return None if given is None else gradient.squeeze(1) if given.dim() == 3 else gradient


def _convolution(inputs: _Inputs, x: torch.Tensor) -> torch.Tensor:
    conv, _ = causal_conv1d._forward(
        x, inputs.conv1d_weight, inputs.conv1d_bias, None, None, True, return_final_states=False
    )
    return conv


def _projected(inputs: _Inputs, conv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x_dbl (rows, batch * seqlen), delta (batch, dim, seqlen), B, C."""
    batch, _, seqlen = conv.shape
    x_dbl = inputs.x_proj_weight @ cast(_flat(conv), inputs.x_proj_weight.dtype)
    return x_dbl, _delta(inputs, x_dbl, batch, seqlen), *_matrices(inputs, x_dbl, batch, seqlen)


def _delta(inputs: _Inputs, x_dbl: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    rank = inputs.delta_proj_weight.shape[1]
    return _unflat(inputs.delta_proj_weight @ x_dbl[:rank], batch, seqlen)


def _matrices(inputs: _Inputs, x_dbl: torch.Tensor, batch: int, seqlen: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return B and C: as given, or the projected ones (batch, 1, dstate, seqlen or 2 * seqlen)."""
    rank = inputs.delta_proj_weight.shape[1]
    rows = inputs.A.shape[1] * (2 if inputs.A.is_complex() else 1)
    found = []
    for given, bias, first in (
        (inputs.B, inputs.B_proj_bias, rank),
        (inputs.C, inputs.C_proj_bias, x_dbl.shape[0] - rows),
    ):
        if given is not None:
            found.append(given)
        elif not inputs.A.is_complex():
            matrix = _as_matrix(x_dbl, first, rows, batch, seqlen)
            found.append(matrix if bias is None else matrix + cast(bias, matrix.dtype)[:, None])
        else:
            part = x_dbl[first : first + rows]
            if bias is not None:
                part = part + cast(bias, part.dtype)[:, None]
            pairs = part.view(rows // 2, 2, batch, seqlen).permute(2, 0, 3, 1)
            found.append(pairs.reshape(batch, 1, rows // 2, 2 * seqlen))
    return found[0], found[1]


def _as_matrix(x_dbl: torch.Tensor, first: int, dstate: int, batch: int, seqlen: int) -> torch.Tensor:
    """Return `dstate` rows of x_dbl, from `first` on, as (batch, 1, dstate, seqlen): a view."""
    if torch.is_grad_enabled() or traced(x_dbl):
        return x_dbl[first : first + dstate].view(dstate, 1, batch, seqlen).transpose(0, 2)
    width = batch * seqlen
    return x_dbl.as_strided((batch, 1, dstate, seqlen), (seqlen, width, width, 1), first * width)


def _matrix_rows(gradient: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a projected B or C as (rows, batch * seqlen)."""
    if A.is_complex():
        pairs = gradient.squeeze(1).unflatten(-1, (gradient.shape[-1] // 2, 2))  # (batch, dstate, seqlen, 2)
        rows: torch.Tensor = pairs.permute(1, 3, 0, 2).flatten(0, 1).flatten(1)
        return rows
    return gradient.squeeze(1).transpose(0, 1).flatten(1)


def _out_projection(inputs: _Inputs, y: torch.Tensor) -> torch.Tensor:
    columns = cast(y.transpose(1, 2), inputs.out_proj_weight.dtype)
    out: torch.Tensor = torch.nn.functional.linear(columns, inputs.out_proj_weight, inputs.out_proj_bias)
    return out


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return (batch, dim, seqlen) as (dim, batch * seqlen): a view if it is laid out so."""
    return tensor.transpose(0, 1).flatten(1)


def _unflat(matrix: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Return (dim, batch * seqlen) as (batch, dim, seqlen): a view."""
    return matrix.view(matrix.shape[0], batch, seqlen).transpose(0, 1)


# --- views by one call of the dispatcher instead of two or three, each some microseconds: for the autograd.Function, which
# --- runs neither traced nor under autograd


def _halves(xz: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``xz.chunk(2, dim=1)``."""
    batch, twice, seqlen = xz.shape
    size, strides = (batch, twice // 2, seqlen), xz.stride()
    first = xz.storage_offset()
    return xz.as_strided(size, strides, first), xz.as_strided(size, strides, first + twice // 2 * strides[1])


def _flat_now(tensor: torch.Tensor) -> torch.Tensor:
    """Return what `_flat` does."""
    batch, dim, seqlen = tensor.shape
    width = batch * seqlen
    if tensor.stride() == (seqlen, width, 1):
        return tensor.as_strided((dim, width), (width, 1))
    return _flat(tensor)


def _unflat_now(matrix: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Return what `_unflat` does."""
    rows, (of_row, of_column) = matrix.shape[0], matrix.stride()
    return matrix.as_strided((batch, rows, seqlen), (seqlen * of_column, of_row, of_column))


def _transposed(matrix: torch.Tensor) -> torch.Tensor:
    """Return ``matrix.t()``."""
    (rows, columns), (of_row, of_column) = matrix.shape, matrix.stride()
    return matrix.as_strided((columns, rows), (of_column, of_row))


def _first_rows(matrix: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``matrix[:count]``."""
    return matrix.as_strided((count, matrix.shape[1]), matrix.stride())


def _delta_now(inputs: _Inputs, x_dbl: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Return what `_delta` does."""
    low = _first_rows(x_dbl, inputs.delta_proj_weight.shape[1])
    return _unflat_now(torch.mm(inputs.delta_proj_weight, low), batch, seqlen)


def _rms_norm(tensor: torch.Tensor, weight: torch.Tensor, eps: float, dim: int) -> torch.Tensor:
    """Return ``tensor / rms(tensor) * weight`` over dimension `dim`, computed in fp32."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(dim, keepdim=True) + eps)
    shape = [1] * tensor.dim()
    shape[dim] = -1
    normed: torch.Tensor = (wide * scale * weight.to(wide.dtype).view(shape)).to(tensor.dtype)
    return normed
