"""The state-space dual scan of Mamba-2: per head a matrix state that decays by one scalar a step.

With dt' = clamp(softplus(dt + dt_bias), dt_limit) and one A a head,

    h[t] = exp(dt'[t] * A) * h[t-1] + dt'[t] * outer(x[t], B[t])        (headdim, dstate)
    y[t] = h[t] @ C[t] + D * x[t],      out[t] = y[t] * silu(z[t])

where h[-1] is `initial_states` (zero when absent) and h[t-1] counts as zero wherever `seq_idx` changes: packed sequences
do not see each other (Dao and Gu, "Transformers are SSMs", arXiv 2405.21060, equation 16 onwards).
Names and arguments are those of mamba_ssm.ops.triton.ssd_combined (2.2.2 to 2.3.2). `chunk_size` is how upstream cuts the
work; a backend cuts as it likes, so the argument changes nothing here.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from anymamba.backends import Operator, choose
from anymamba.errors import OptionError, ShapeError
from anymamba.ops._checks import FLOATING, check_device, check_dim, check_dtype, check_shape
from anymamba.ops._library import (
    backward_where_forward_ran,
    below_autograd,
    define,
    differentiated,
    placeholder,
    traced,
)
from anymamba.ops._sharding import current

__all__ = ["MambaChunkScanCombinedFn", "mamba_chunk_scan", "mamba_chunk_scan_combined"]

SSD = Operator("ssd", family="ssd", functions=("ssd_forward", "ssd_backward"))

INFINITY = float("inf")
Tensors9 = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
]


class SsdCall(NamedTuple):
    """What a backend may look at to accept or refuse."""

    device: torch.device
    dtype: torch.dtype
    bc_dtype: torch.dtype
    headdim: int
    dstate: int
    compute: torch.dtype = torch.float32


class SsdBuffers(NamedTuple):
    """Where a caller wants gradients written: tensors of the inputs' shapes and dtypes, any strides; None: a new one."""

    dx: torch.Tensor | None = None
    ddt: torch.Tensor | None = None
    dB: torch.Tensor | None = None
    dC: torch.Tensor | None = None
    dz: torch.Tensor | None = None


NEW_BUFFERS = SsdBuffers()


class SsdGradients(NamedTuple):
    """What the backward returns; None where the input is None."""

    dx: torch.Tensor
    ddt: torch.Tensor
    dA: torch.Tensor
    dB: torch.Tensor
    dC: torch.Tensor
    dD: torch.Tensor | None
    dz: torch.Tensor | None
    ddt_bias: torch.Tensor | None
    dinitial_states: torch.Tensor | None
    out: torch.Tensor | None  # the forward's output again, if asked for


class SsdBackend(Protocol):
    """What a backend's module `ssd` provides. Inputs are already checked; any strides may come.

    `out` is contiguous and has x's dtype; a gradient has the dtype of its tensor and the layout of ``torch.empty_like``
    of it. Sums and states are float32 (float64 where x, dt, A, B or C is float64: `ssd_compute_dtype`), also under
    autocast. Nothing may be saved between the two; a backend keeps no (batch, seqlen, nheads, headdim, dstate) at all.
    """

    def ssd_forward(
        self,
        x: torch.Tensor,  # (batch, seqlen, nheads, headdim)
        dt: torch.Tensor,  # (batch, seqlen, nheads)
        A: torch.Tensor,  # (nheads)
        B: torch.Tensor,  # (batch, seqlen, ngroups, dstate); head h reads group h // (nheads / ngroups)
        C: torch.Tensor,  # like B
        D: torch.Tensor | None,  # (nheads) or (nheads, headdim)
        z: torch.Tensor | None,  # like x
        dt_bias: torch.Tensor | None,  # (nheads)
        initial_states: torch.Tensor | None,  # (batch, nheads, headdim, dstate); belongs to sequence seq_idx[:, 0]
        seq_idx: torch.Tensor | None,  # (batch, seqlen), integer; the state is zeroed wherever it changes
        cu_seqlens: torch.Tensor | None,  # (sequences + 1), integer; given: return varlen_states, batch is 1
        dt_softplus: bool,
        dt_min: float,
        dt_max: float,
        return_final_states: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return out, final_states (batch, nheads, headdim, dstate) and varlen_states (sequences, ...), contiguous.

        final_states (compute dtype) is the state after the last token; varlen_states (C's dtype) the state after the
        last token of each sequence of `cu_seqlens`, zero for an empty one.
        """
        ...

    def ssd_backward(
        self,
        dout: torch.Tensor | None,  # like x; None: zero
        dfinal_states: torch.Tensor | None,
        dvarlen_states: torch.Tensor | None,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None,
        z: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        initial_states: torch.Tensor | None,
        seq_idx: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        dt_softplus: bool,
        dt_min: float,
        dt_max: float,
        *,
        into: SsdBuffers = ...,
        recompute_out: bool = False,
    ) -> SsdGradients:
        """Return every gradient, recomputing what it needs; with `recompute_out` the forward's `out` too."""
        ...


def ssd_compute_dtype(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor
) -> torch.dtype:
    """Return the dtype of sums and states: float64 if one of these tensors has it, else float32."""
    return torch.float64 if torch.float64 in (x.dtype, dt.dtype, A.dtype, B.dtype, C.dtype) else torch.float32


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, INFINITY),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Any:
    """Scan Mamba-2's states over a sequence.

    All floating tensors may be fp32, fp16, bf16 or fp64, also mixed, with any strides; gradients reach every one of them.

    Parameters
    ----------
    x : Tensor
        (batch, seqlen, nheads, headdim).
    dt : Tensor
        (batch, seqlen, nheads): step sizes, before bias, softplus and limit.
    A : Tensor
        (nheads): decay rates, negative.
    B, C : Tensor
        (batch, seqlen, ngroups, dstate); ngroups divides nheads.
    chunk_size : int
        Upstream's unit of work. No result depends on it beyond rounding.
    D : Tensor, optional
        (nheads) or (nheads, headdim): the skip connection.
    z : Tensor, optional
        Like x: out is multiplied by silu(z).
    dt_bias : Tensor, optional
        (nheads).
    initial_states : Tensor, optional
        (batch, nheads, headdim, dstate): the state before the first token. With `seq_idx` it belongs to ``seq_idx[:, 0]``.
    seq_idx : Tensor, optional
        (batch, seqlen), int32 or int64: number of the packed sequence a token belongs to. Each run of equal numbers is a
        sequence of its own; a negative number (padding) is one like any other.
    cu_seqlens : Tensor, optional
        (sequences + 1), int32 or int64: where each packed sequence starts, and the end. Used with `return_varlen_states`.
    dt_softplus : bool
        Apply softplus to dt + dt_bias.
    dt_limit : (float, float)
        Clamp the step sizes, after softplus.
    return_final_states : bool
        Return the state after the last token too: the `initial_states` of what follows. Differentiable.
    return_varlen_states : bool
        Return the state after the last token of each sequence of `cu_seqlens` too (batch must be 1; `seq_idx` is what
        separates the sequences). Zero for an empty sequence. Differentiable.

    Returns
    -------
    Tensor, or a tuple of Tensors with `return_final_states` or `return_varlen_states`
        out like x (contiguous); final_states (batch, nheads, headdim, dstate) in float32 (float64 if an input is);
        varlen_states (sequences, nheads, headdim, dstate) in C's dtype.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, OptionError
        Before any work, naming the argument.
    """
    sharding = current.sharding
    if sharding is not None:
        results: Any = sharding.ssd(
            x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_limit,
            return_final_states, return_varlen_states,
        )  # fmt: skip
        return _wanted(results, return_final_states, return_varlen_states)
    _check(
        x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_limit, return_varlen_states
    )
    arguments = (
        x,
        dt,
        A,
        B,
        C,
        D,
        z,
        dt_bias,
        initial_states,
        seq_idx,
        cu_seqlens if return_varlen_states else None,
        bool(dt_softplus),
        float(dt_limit[0]),
        float(dt_limit[1]),
        bool(return_final_states),
    )
    if traced(x):
        results = torch.ops.anymamba.ssd(*arguments)
    elif differentiated(x, dt, A, B, C, D, z, dt_bias, initial_states):
        results = _Ssd.apply(*arguments)
    else:
        results = _forward(*arguments)
    return _wanted(results, return_final_states, return_varlen_states)


def _wanted(results: Any, return_final_states: bool, return_varlen_states: bool) -> Any:
    out, final_states, varlen_states = results
    wanted: tuple[Any, ...] = (out, final_states) if return_final_states else (out,)
    if return_varlen_states:
        wanted = (*wanted, varlen_states)
    return out if len(wanted) == 1 else wanted


def mamba_chunk_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
) -> torch.Tensor:
    """`mamba_chunk_scan_combined` without states and without a limit on the step sizes: see there."""
    out: torch.Tensor = mamba_chunk_scan_combined(
        x,
        dt,
        A,
        B,
        C,
        chunk_size,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=(-INFINITY, INFINITY),
    )
    return out


class MambaChunkScanCombinedFn:
    """Upstream's name for the autograd.Function; ``MambaChunkScanCombinedFn.apply`` is `mamba_chunk_scan_combined`."""

    apply = staticmethod(mamba_chunk_scan_combined)


def _check(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    dt_limit: tuple[float, float],
    return_varlen_states: bool,
) -> None:
    check_dim("x", x, 4, "(batch, seqlen, nheads, headdim)")
    batch, seqlen, nheads, headdim = x.shape
    check_shape("dt", dt, (batch, seqlen, nheads), "(batch, seqlen, nheads)")
    check_shape("A", A, (nheads,), "(nheads,)")
    check_dim("B", B, 4, "(batch, seqlen, ngroups, dstate)")
    ngroups, dstate = B.shape[2], B.shape[3]
    check_shape("B", B, (batch, seqlen, ngroups, dstate), "(batch, seqlen, ngroups, dstate)")
    check_shape("C", C, (batch, seqlen, ngroups, dstate), "(batch, seqlen, ngroups, dstate), as B")
    if ngroups < 1 or nheads % ngroups != 0:
        raise ShapeError(f"B has {ngroups} groups, but the {nheads} heads of x must be a multiple of that.")
    if D is not None and tuple(D.shape) not in ((nheads,), (nheads, headdim)):
        raise ShapeError(
            f"D has shape {tuple(D.shape)}, but must be (nheads,) = {(nheads,)} or (nheads, headdim) = {(nheads, headdim)}."
        )
    if z is not None:
        check_shape("z", z, x.shape, "the shape of x")
    if dt_bias is not None:
        check_shape("dt_bias", dt_bias, (nheads,), "(nheads,)")
    if initial_states is not None:
        check_shape(
            "initial_states", initial_states, (batch, nheads, headdim, dstate), "(batch, nheads, headdim, dstate)"
        )
    floats = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    for name, tensor in (*floats.items(), ("initial_states", initial_states)):
        if tensor is not None:
            check_dtype(name, tensor, FLOATING)
            check_device(name, tensor, x, "x")
    if seq_idx is not None:
        check_shape("seq_idx", seq_idx, (batch, seqlen), "(batch, seqlen)")
    if cu_seqlens is not None:
        check_dim("cu_seqlens", cu_seqlens, 1, "(sequences + 1,)")
    for name, index in (("seq_idx", seq_idx), ("cu_seqlens", cu_seqlens)):
        if index is not None:
            check_dtype(name, index, (torch.int32, torch.int64))
            check_device(name, index, x, "x")
    if chunk_size < 1:
        raise OptionError(f"chunk_size is {chunk_size}, but must be at least 1.")
    if len(dt_limit) != 2:
        raise OptionError(f"dt_limit is {dt_limit!r}, but must be (smallest, largest).")
    if return_varlen_states:
        if cu_seqlens is None:
            raise OptionError("return_varlen_states is True, but cu_seqlens is None: it says where the sequences end.")
        if batch != 1:
            raise ShapeError(f"x has batch {batch}, but return_varlen_states needs the sequences packed into batch 1.")
        if cu_seqlens.shape[0] < 1:
            raise ShapeError("cu_seqlens is empty, but must be (sequences + 1,): at least [0].")


def _call(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> SsdCall:
    return SsdCall(x.device, x.dtype, B.dtype, x.shape[3], B.shape[3], ssd_compute_dtype(x, dt, A, B, C))


@backward_where_forward_ran
class _Ssd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None,
        z: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        initial_states: torch.Tensor | None,
        seq_idx: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        dt_softplus: bool,
        dt_min: float,
        dt_max: float,
        return_final_states: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tensors = (x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens)
        ctx.save_for_backward(*tensors)
        ctx.options = (dt_softplus, dt_min, dt_max)
        ctx.return_final_states = return_final_states
        ctx.set_materialize_grads(False)
        if not traced(x):
            return _forward_op(*tensors, dt_softplus, dt_min, dt_max, return_final_states)
        with below_autograd():
            out, final_states, varlen_states = torch.ops.anymamba.ssd(
                *tensors, dt_softplus, dt_min, dt_max, return_final_states
            )
        return out, final_states, varlen_states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dfinal: torch.Tensor | None, dvarlen: torch.Tensor | None) -> Any:
        tensors = ctx.saved_tensors
        x, D, z, dt_bias, initial_states, cu_seqlens = (tensors[i] for i in (0, 5, 6, 7, 8, 10))
        dfinal = dfinal if ctx.return_final_states else None
        dvarlen = dvarlen if cu_seqlens is not None else None
        run = torch.ops.anymamba.ssd_backward if traced(x) else _backward
        dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial, *_ = run(dout, dfinal, dvarlen, *tensors, *ctx.options)
        return (
            dx,
            ddt,
            dA,
            dB,
            dC,
            None if D is None else dD,
            None if z is None else dz,
            None if dt_bias is None else ddt_bias,
            None if initial_states is None else dinitial,
            *(None,) * 6,
        )


def _forward(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    return_final_states: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    backend: SsdBackend = choose(SSD, _call(x, dt, A, B, C))
    return backend.ssd_forward(
        x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens,
        dt_softplus, dt_min, dt_max, return_final_states,
    )  # fmt: skip


def _backward(
    dout: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    dvarlen_states: torch.Tensor | None,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    *,
    into: SsdBuffers = NEW_BUFFERS,
    recompute_out: bool = False,
) -> SsdGradients:
    backend: SsdBackend = choose(SSD, _call(x, dt, A, B, C))
    return backend.ssd_backward(
        dout, dfinal_states, dvarlen_states, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens,
        dt_softplus, dt_min, dt_max, into=into, recompute_out=recompute_out,
    )  # fmt: skip


# --- torch.library: the same functions as opaque operators; "none" outputs become placeholders


def _forward_op(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    return_final_states: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out, final_states, varlen_states = _forward(
        x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens,
        dt_softplus, dt_min, dt_max, return_final_states,
    )  # fmt: skip
    return (
        out,
        placeholder(x) if final_states is None else final_states,
        placeholder(C) if varlen_states is None else varlen_states,
    )


def _forward_fake(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    return_final_states: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, _, nheads, headdim = x.shape
    state = (nheads, headdim, B.shape[3])
    compute = ssd_compute_dtype(x, dt, A, B, C)
    return (
        x.new_empty(x.shape),
        x.new_empty((batch, *state), dtype=compute) if return_final_states else placeholder(x),
        placeholder(C) if cu_seqlens is None else C.new_empty((cu_seqlens.shape[0] - 1, *state)),
    )


def _backward_op(
    dout: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    dvarlen_states: torch.Tensor | None,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> Tensors9:
    found = _backward(
        dout, dfinal_states, dvarlen_states, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens,
        dt_softplus, dt_min, dt_max,
    )  # fmt: skip
    dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial, _ = found
    return (
        dx,
        ddt,
        dA,
        dB,
        dC,
        placeholder(A) if dD is None else dD,
        placeholder(x) if dz is None else dz,
        placeholder(A) if ddt_bias is None else ddt_bias,
        placeholder(x) if dinitial is None else dinitial,
    )


def _backward_fake(
    dout: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    dvarlen_states: torch.Tensor | None,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> Tensors9:
    return (
        torch.empty_like(x),
        torch.empty_like(dt),
        torch.empty_like(A),
        torch.empty_like(B),
        torch.empty_like(C),
        placeholder(A) if D is None else torch.empty_like(D),
        placeholder(x) if z is None else torch.empty_like(z),
        placeholder(A) if dt_bias is None else torch.empty_like(dt_bias),
        placeholder(x) if initial_states is None else torch.empty_like(initial_states),
    )


_INPUTS = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, Tensor? initial_states, "
    "Tensor? seq_idx, Tensor? cu_seqlens, bool dt_softplus, float dt_min, float dt_max"
)
define(
    f"ssd({_INPUTS}, bool return_final_states) -> (Tensor, Tensor, Tensor)",
    _forward_op,
    _forward_fake,
    autograd=_Ssd.apply,
)
define(
    f"ssd_backward(Tensor? dout, Tensor? dfinal_states, Tensor? dvarlen_states, {_INPUTS}) -> ("
    + ", ".join(["Tensor"] * 9)
    + ")",
    _backward_op,
    _backward_fake,
)
