"""Selective scan: the linear recurrence of Mamba-1.

With delta' = softplus(delta + delta_bias) (bias and softplus where asked for), per channel d and state n:

    h[t] = exp(delta'[t] * A) * h[t - 1] + delta'[t] * u[t] * B[t],    h[-1] = initial_state or 0
    y[t] = sum_n C[t] * h[t] + D * u[t]                                (complex A: 2 * real part of the sum)
    out[t] = y[t] * silu(z[t])                                         (without z: y[t])

Names and arguments are those of mamba_ssm (1.0 to 2.3); `initial_state` and the gradients into it and out of the last
state are ours, so that a sequence can be cut anywhere, also in training. Source of the formula: Gu and Dao, "Mamba:
Linear-Time Sequence Modeling with Selective State Spaces" (2023), equations 2a and 2b with its discretisation of B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from anymamba.backends import Operator, choose, use_backend
from anymamba.errors import DtypeError, ShapeError
from anymamba.ops._checks import FLOATING, Passed, cast, check_device, check_dim, check_dtype, check_shape
from anymamba.ops._library import (
    backward_where_forward_ran,
    below_autograd,
    define,
    differentiated,
    placeholder,
    traced,
)
from anymamba.ops._prepared import DEVICES, Prepared
from anymamba.ops._sharding import current

__all__ = [
    "CHECKPOINT_LENGTH",
    "SELECTIVE_SCAN",
    "real_dtype",
    "selective_scan_fn",
    "selective_scan_ref",
    "state_dtype",
]

SELECTIVE_SCAN = Operator(
    "selective_scan", family="selective_scan", functions=("selective_scan_forward", "selective_scan_backward")
)

CHECKPOINT_LENGTH = 128
"""Steps between two states that the forward keeps for the backward."""

Gradients = tuple[
    torch.Tensor,  # du
    torch.Tensor,  # ddelta
    torch.Tensor,  # dA
    torch.Tensor,  # dB
    torch.Tensor,  # dC
    "torch.Tensor | None",  # dD
    "torch.Tensor | None",  # dz
    "torch.Tensor | None",  # ddelta_bias
    "torch.Tensor | None",  # dinitial_state
    "torch.Tensor | None",  # out
]


class SelectiveScanCall(NamedTuple):
    """What a backend may look at to accept or refuse a scan."""

    device: torch.device
    dtype: torch.dtype  # of u, delta, z and of B and C where they vary
    A_dtype: torch.dtype  # the state's: fp32, fp64, complex64 or complex128
    dstate: int
    B_varies: bool
    C_varies: bool


class SelectiveScanBackend(Protocol):
    """What a backend's module `selective_scan` provides. Inputs are already checked; any strides may come.

    u, delta, z and variable B, C share one dtype; A, constant B, C and initial_state have the state's dtype (fp32; fp64 if
    u or A is fp64; the complex dtype of that precision for complex A); D and delta_bias have the state's real dtype.
    Gradients have the dtype of their input and the layout of ``torch.empty_like`` of it.
    """

    def selective_scan_forward(
        self,
        u: torch.Tensor,  # (batch, dim, seqlen)
        delta: torch.Tensor,  # (batch, dim, seqlen)
        A: torch.Tensor,  # (dim, dstate)
        B: torch.Tensor,  # (dim, dstate), or (batch, groups, dstate, seqlen); complex A: (..., 2 * seqlen), re, im, re, ...
        C: torch.Tensor,  # like B, or the other kind; the same groups if both vary
        D: torch.Tensor | None,  # (dim)
        z: torch.Tensor | None,  # (batch, dim, seqlen)
        delta_bias: torch.Tensor | None,  # (dim)
        delta_softplus: bool,
        initial_state: torch.Tensor | None,  # (batch, dim, dstate)
        save: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return out, last_state, checkpoints.

        out has u's dtype and the layout of ``torch.empty_like(delta)`` and is gated already. last_state (batch, dim, dstate)
        is contiguous. checkpoints, only if `save`: the states entering each piece of CHECKPOINT_LENGTH steps,
        (batch, dim, pieces, dstate), contiguous, in the state's dtype.
        """
        ...

    def selective_scan_backward(
        self,
        u: torch.Tensor,
        delta: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None,
        z: torch.Tensor | None,
        delta_bias: torch.Tensor | None,
        delta_softplus: bool,
        initial_state: torch.Tensor | None,
        checkpoints: torch.Tensor | None,  # of the forward; None: compute them again
        dout: torch.Tensor,  # (batch, dim, seqlen), any dtype and strides
        dlast_state: torch.Tensor | None,  # (batch, dim, dstate)
        *,
        return_out: bool = False,
        dz_out: torch.Tensor | None = None,  # where to write dz, e.g. a slice of a larger buffer
        dB_out: torch.Tensor | None = None,  # the same for B and C that vary; in their dtype
        dC_out: torch.Tensor | None = None,
    ) -> Gradients:
        """Return du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial_state, out; None where there is no such input.

        out is the forward's, computed again, only if `return_out`.
        """
        ...


_prepared, _passed = Prepared(), Passed()


def selective_scan_fn(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    initial_state: torch.Tensor | None = None,
) -> Any:
    """Run the selective scan; the formula is at the top of this module.

    Parameters
    ----------
    u, delta : Tensor
        (batch, dim, seqlen); fp32, fp16, bf16 or fp64, any strides.
    A : Tensor
        (dim, dstate), real or complex; fp16 and bf16 are computed in fp32.
    B, C : Tensor
        Constant: (dim, dstate), in A's dtype. Varying with time: (batch, dstate, seqlen) or
        (batch, groups, dstate, seqlen), real; with complex A the last dimension is 2 * seqlen, real and imaginary parts
        interleaved. One may be constant and the other not.
    D : Tensor, optional
        (dim).
    z : Tensor, optional
        (batch, dim, seqlen): the gate.
    delta_bias : Tensor, optional
        (dim), added to delta.
    delta_softplus : bool
        Apply softplus to delta.
    return_last_state : bool
        Return the state after the last step too: the `initial_state` of what follows. Differentiable.
    initial_state : Tensor, optional
        (batch, dim, dstate). Zero if absent.

    Returns
    -------
    Tensor, or (Tensor, Tensor) with `return_last_state`
        out (batch, dim, seqlen) in u's dtype and delta's layout; last_state (batch, dim, dstate), fp32 (fp64 if u or A is;
        complex with A).

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        Before any work, naming the argument.
    """
    sharding = current.sharding
    if sharding is not None:
        out, last_state = sharding.selective_scan(
            u, delta, A, B, C, D, z, delta_bias, bool(delta_softplus), initial_state
        )
        return (out, last_state) if return_last_state else out
    tracing = traced(u)
    tensors = (u, delta, A, B, C, D, z, delta_bias, initial_state)
    key = None
    if not tracing and (u.is_cuda or u.device.type in DEVICES) and not differentiated(*tensors):
        prepared = _prepared.alike(tensors, bool(delta_softplus))
        if prepared is not None:
            known = prepared(*tensors)
            if known is not None:
                return known if return_last_state else known[0]
        key = _prepared.key(tensors, bool(delta_softplus))
        prepared = _prepared.find(key)
        if prepared is not None:
            out, last_state = prepared(*tensors)
            return (out, last_state) if return_last_state else out
    passed = None if tracing else tuple([None if t is None else (t.shape, t.dtype, t.device) for t in tensors])
    if passed is None or passed not in _passed:
        _check(u, delta, A, B, C, D, z, delta_bias, initial_state)
        if passed is not None:
            _passed.add(passed)
    dtype = u.dtype
    inputs: tuple[Any, ...] = _normalised(u, delta, A, B, C, D, z, delta_bias, bool(delta_softplus), initial_state)
    wanted = differentiated(*(value for value in inputs if isinstance(value, torch.Tensor)))
    if tracing:
        out, last_state, _ = torch.ops.anymamba.selective_scan(*inputs, wanted)
    elif wanted:
        out, last_state, _ = _SelectiveScan.apply(*inputs, True)
    else:
        out, last_state, _ = _forward(*(*inputs, False))
        # Only calls whose tensors a backend gets as they are.
        if key is not None and all(a is b for a, b in zip(tensors, (*inputs[:8], inputs[9]))):
            backend = choose(SELECTIVE_SCAN, _call(u, A, B, C))
            _prepared.remember(key, backend, SELECTIVE_SCAN, inputs, tensors, bool(delta_softplus))
    out = cast(out, dtype)
    return (out, last_state) if return_last_state else out


def selective_scan_ref(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    initial_state: torch.Tensor | None = None,
) -> Any:
    """Compute `selective_scan_fn` by the formula written down: the loop over time of the reference backend, slow."""
    with use_backend("reference"):
        return selective_scan_fn(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, initial_state)


def state_dtype(u: torch.Tensor, A: torch.Tensor) -> torch.dtype:
    """Return the dtype of the states: fp32, or fp64 if u or A has it; complex if A is."""
    if A.dtype == torch.float32 and u.dtype != torch.float64:  # nearly always, and asked on every call
        return torch.float32
    wide = torch.promote_types(torch.promote_types(u.dtype, torch.float32), real_dtype(A.dtype))
    if not A.is_complex():
        return wide
    return torch.complex64 if wide == torch.float32 else torch.complex128


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the real part (torch's own `to_real` is not in every version we serve)."""
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)


def _check(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
) -> None:
    check_dim("u", u, 3, "(batch, dim, seqlen)")
    check_dtype("u", u, FLOATING)
    batch, dim, seqlen = u.shape
    for name, sequence in (("delta", delta), ("z", z)):
        if sequence is not None:
            check_shape(name, sequence, (batch, dim, seqlen), "(batch, dim, seqlen)")
            check_dtype(name, sequence, FLOATING)
            check_device(name, sequence, u, "u")
    check_dim("A", A, 2, "(dim, dstate)")
    check_shape("A", A, (dim, A.shape[1]), "(dim, dstate)")
    check_dtype("A", A, (*FLOATING, torch.complex64, torch.complex128))
    check_device("A", A, u, "u")
    groups = None
    for name, matrix in (("B", B), ("C", C)):
        groups = _check_matrix(name, matrix, u, A, groups)
    for name, vector in (("D", D), ("delta_bias", delta_bias)):
        if vector is not None:
            check_shape(name, vector, (dim,), "(dim,)")
            check_dtype(name, vector, FLOATING)
            check_device(name, vector, u, "u")
    if initial_state is not None:
        check_shape("initial_state", initial_state, (batch, dim, A.shape[1]), "(batch, dim, dstate)")
        check_device("initial_state", initial_state, u, "u")
        if initial_state.is_complex() and not A.is_complex():
            raise DtypeError(f"initial_state has dtype {initial_state.dtype}, but must be real: A is {A.dtype}.")


def _check_matrix(name: str, matrix: torch.Tensor, u: torch.Tensor, A: torch.Tensor, groups: int | None) -> int | None:
    """Check B or C; return the number of groups so far."""
    (batch, dim, seqlen), dstate = u.shape, A.shape[1]
    check_device(name, matrix, u, "u")
    if matrix.dim() == 2:
        check_shape(name, matrix, (dim, dstate), "(dim, dstate)")
        if matrix.is_complex() and not A.is_complex():
            raise DtypeError(f"{name} has dtype {matrix.dtype}, but must be real: A is {A.dtype}.")
        return groups
    if matrix.dim() not in (3, 4):
        raise ShapeError(
            f"{name} has shape {tuple(matrix.shape)}, but must be (dim, dstate), (batch, dstate, seqlen) or "
            "(batch, groups, dstate, seqlen)."
        )
    columns, meaning = (2 * seqlen, "2 * seqlen") if A.is_complex() else (seqlen, "seqlen")
    check_dtype(name, matrix, FLOATING)
    if matrix.dim() == 3:
        check_shape(name, matrix, (batch, dstate, columns), f"(batch, dstate, {meaning})")
        own = 1
    else:
        own = matrix.shape[1]
        check_shape(name, matrix, (batch, own, dstate, columns), f"(batch, groups, dstate, {meaning})")
    if own < 1 or dim % own:
        raise ShapeError(f"{name} has {own} groups, but dim = {dim} must be a multiple of their number.")
    if groups is not None and groups != own:
        raise ShapeError(f"C has {own} groups, but must have {groups} like B.")
    return own


def _normalised(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    initial_state: torch.Tensor | None,
) -> tuple[Any, ...]:
    """Bring the arguments to the shapes and dtypes that backends expect, differentiably; usually nothing changes."""
    state = state_dtype(u, A)
    real = real_dtype(state)
    B, C = (matrix.unsqueeze(1) if matrix.dim() == 3 else matrix for matrix in (B, C))
    dtype = u.dtype
    for tensor in (delta, z, *(matrix for matrix in (B, C) if matrix.dim() == 4)):
        if tensor is not None and tensor.dtype != dtype:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return (
        cast(u, dtype),
        cast(delta, dtype),
        cast(A, state),
        cast(B, dtype if B.dim() == 4 else state),
        cast(C, dtype if C.dim() == 4 else state),
        None if D is None else cast(D, real),
        None if z is None else cast(z, dtype),
        None if delta_bias is None else cast(delta_bias, real),
        delta_softplus,
        None if initial_state is None else cast(initial_state, state),
    )


def _call(u: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> SelectiveScanCall:
    return SelectiveScanCall(u.device, u.dtype, A.dtype, A.shape[1], B.dim() == 4, C.dim() == 4)


@backward_where_forward_ran
class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        u: torch.Tensor,
        delta: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None,
        z: torch.Tensor | None,
        delta_bias: torch.Tensor | None,
        delta_softplus: bool,
        initial_state: torch.Tensor | None,
        save: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        arguments = (u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, save)
        if traced(u):
            with below_autograd():
                out, last_state, checkpoints = torch.ops.anymamba.selective_scan(*arguments)
        else:
            out, last_state, checkpoints = _forward_op(*arguments)
        ctx.save_for_backward(u, delta, A, B, C, D, z, delta_bias, initial_state, checkpoints if save else None)
        ctx.delta_softplus = delta_softplus
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(checkpoints)
        return out, last_state, checkpoints

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlast_state: torch.Tensor | None, _: Any) -> Any:
        u, delta, A, B, C, D, z, delta_bias, initial_state, checkpoints = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(u)
        run = torch.ops.anymamba.selective_scan_backward if traced(u) else _backward
        du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial_state, *_out = run(
            u, delta, A, B, C, D, z, delta_bias, ctx.delta_softplus, initial_state, checkpoints, dout, dlast_state
        )
        return (
            du,
            ddelta,
            dA,
            dB,
            dC,
            None if D is None else dD,
            None if z is None else dz,
            None if delta_bias is None else ddelta_bias,
            None,
            None if initial_state is None else dinitial_state,
            None,
        )


def _forward(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    initial_state: torch.Tensor | None,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    backend: SelectiveScanBackend = choose(SELECTIVE_SCAN, _call(u, A, B, C))
    return backend.selective_scan_forward(u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, save)


def _backward(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    initial_state: torch.Tensor | None,
    checkpoints: torch.Tensor | None,
    dout: torch.Tensor,
    dlast_state: torch.Tensor | None,
    *,
    return_out: bool = False,
    dz_out: torch.Tensor | None = None,
    dB_out: torch.Tensor | None = None,
    dC_out: torch.Tensor | None = None,
) -> Gradients:
    backend: SelectiveScanBackend = choose(SELECTIVE_SCAN, _call(u, A, B, C))
    return backend.selective_scan_backward(
        u,
        delta,
        A,
        B,
        C,
        D,
        z,
        delta_bias,
        delta_softplus,
        initial_state,
        checkpoints,
        dout,
        dlast_state,
        return_out=return_out,
        dz_out=dz_out,
        dB_out=dB_out,
        dC_out=dC_out,
    )


# --- torch.library: the same functions as opaque operators; "none" outputs become placeholders


def _forward_op(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    initial_state: torch.Tensor | None,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out, last_state, checkpoints = _forward(u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, save)
    return out, last_state, placeholder(A) if checkpoints is None else checkpoints


def _forward_fake(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    initial_state: torch.Tensor | None,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (batch, dim, seqlen), dstate = u.shape, A.shape[1]
    pieces = (seqlen + CHECKPOINT_LENGTH - 1) // CHECKPOINT_LENGTH
    return (
        torch.empty_like(delta, dtype=u.dtype),
        A.new_empty((batch, dim, dstate)),
        A.new_empty((batch, dim, pieces, dstate)) if save else placeholder(A),
    )


def _or_placeholders(like: torch.Tensor, tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    return tuple(placeholder(like) if tensor is None else tensor for tensor in tensors)


def _backward_op(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    initial_state: torch.Tensor | None,
    checkpoints: torch.Tensor | None,
    dout: torch.Tensor,
    dlast_state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    gradients = _backward(
        u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, checkpoints, dout, dlast_state
    )
    return _or_placeholders(u, gradients[:-1])


def _backward_fake(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    initial_state: torch.Tensor | None,
    checkpoints: torch.Tensor | None,
    dout: torch.Tensor,
    dlast_state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    inputs = (u, delta, A, B, C, D, z, delta_bias, initial_state)
    return _or_placeholders(u, [None if tensor is None else torch.empty_like(tensor) for tensor in inputs])


_INPUTS = (
    "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, "
    "bool delta_softplus, Tensor? initial_state"
)
define(
    f"selective_scan({_INPUTS}, bool save) -> (Tensor, Tensor, Tensor)",
    _forward_op,
    _forward_fake,
    autograd=_SelectiveScan.apply,
)
define(
    f"selective_scan_backward({_INPUTS}, Tensor? checkpoints, Tensor dout, Tensor? dlast_state) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_op,
    _backward_fake,
)
