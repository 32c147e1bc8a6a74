"""Causal depthwise 1-D convolution, its decoding step, and the states of packed sequences.

y[b, d, t] = act(bias[d] + sum_k weight[d, k] * x[b, d, t - (width - 1) + k]), where columns before the first are
`initial_states` (zero when absent) and columns of another packed sequence (`seq_idx`) count as zero.
Names and arguments are those of the package causal_conv1d (1.4.0 to 1.7.0).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

import torch

from anymamba.backends import Operator, choose
from anymamba.errors import OptionError, ShapeError
from anymamba.ops._checks import FLOATING, Passed, check_activation, check_device, check_dim, check_dtype, check_shape
from anymamba.ops._library import (
    backward_where_forward_ran,
    below_autograd,
    define,
    differentiated,
    placeholder,
    traced,
)
from anymamba.ops._prepared import DEVICES, STEP_DEVICES, Prepared
from anymamba.ops._sharding import current

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states"]

CAUSAL_CONV1D = Operator(
    "causal_conv1d", family="causal_conv1d", functions=("causal_conv1d_forward", "causal_conv1d_backward")
)
CAUSAL_CONV1D_UPDATE = Operator("causal_conv1d_update", family="causal_conv1d", functions=("causal_conv1d_update",))
CAUSAL_CONV1D_VARLEN_STATES = Operator(
    "causal_conv1d_varlen_states", family="causal_conv1d", functions=("causal_conv1d_varlen_states",)
)


class CausalConv1dCall(NamedTuple):
    """What a backend may look at to accept or refuse a convolution."""

    device: torch.device
    dtype: torch.dtype
    weight_dtype: torch.dtype
    width: int


class CausalConv1dBackend(Protocol):
    """What a backend's module `causal_conv1d` provides. Inputs are already checked; any strides may come.

    Outputs have the dtype of the tensor they belong to and the layout of ``torch.empty_like`` of it.
    """

    def causal_conv1d_forward(
        self,
        x: torch.Tensor,  # (batch, dim, seqlen)
        weight: torch.Tensor,  # (dim, width)
        bias: torch.Tensor | None,  # (dim)
        seq_idx: torch.Tensor | None,  # (batch, seqlen), integer; negative: padding, output 0
        initial_states: torch.Tensor | None,  # (batch, dim, width - 1); belongs to sequence seq_idx[:, 0]
        silu: bool,
        return_final_states: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return out like x, and the last width - 1 columns (batch, dim, width - 1) of the last sequence, contiguous."""
        ...

    def causal_conv1d_backward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dout: torch.Tensor,
        seq_idx: torch.Tensor | None,
        initial_states: torch.Tensor | None,
        dfinal_states: torch.Tensor | None,
        silu: bool,
        *,
        dx_out: torch.Tensor | None = None,  # like x, any strides: receives dx and is returned as dx
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return dx, dweight, dbias, dinitial_states (None where the input is None)."""
        ...

    def causal_conv1d_update(
        self,
        x: torch.Tensor,  # (batch, dim, seqlen)
        conv_state: torch.Tensor,  # (entries, dim, state_len >= width - 1), updated in place
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        silu: bool,
        cache_seqlens: torch.Tensor
        | None,  # (batch), integer: conv_state is a circular buffer, next column at this index
        conv_state_indices: torch.Tensor | None,  # (batch), integer row of conv_state; negative: padding, output 0
    ) -> torch.Tensor:
        """Return out like x."""
        ...

    def causal_conv1d_varlen_states(
        self,
        x: torch.Tensor,  # (total_tokens, dim)
        cu_seqlens: torch.Tensor,  # (batch + 1), integer
        state_len: int,
    ) -> torch.Tensor:
        """Return (batch, dim, state_len) with stride(1) == 1: the last columns of each sequence, zeros before its start."""
        ...


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Convolve each channel with its own causal filter.

    Parameters
    ----------
    x : Tensor
        (batch, dim, seqlen); fp32, fp16, bf16 or fp64; any strides. The result has x's dtype and layout.
    weight : Tensor
        (dim, width). Upstream allows widths 2-4; any width works here.
    bias : Tensor, optional
        (dim).
    seq_idx : Tensor, optional
        (batch, seqlen), int32 or int64: number of the packed sequence that a column belongs to; negative is padding (0).
    initial_states : Tensor, optional
        (batch, dim, width - 1): the columns before the first. With `seq_idx` they belong to sequence ``seq_idx[:, 0]``.
    return_final_states : bool
        Return the last ``width - 1`` columns too: the `initial_states` of what follows. Differentiable.
    final_states_out : Tensor, optional
        (batch, dim, width - 1): receives the final states.
    activation : {None, "silu", "swish"}

    Returns
    -------
    Tensor, or (Tensor, Tensor) with `return_final_states`
        out (batch, dim, seqlen) and final_states (batch, dim, width - 1).

    Raises
    ------
    ShapeError, DtypeError, DeviceError, OptionError
        Before any work, naming the argument.
    """
    sharding = current.sharding
    if sharding is not None:
        out, states = sharding.causal_conv1d(
            x, weight, bias, seq_idx, initial_states, return_final_states, final_states_out, activation
        )
        return _with_states(out, states, return_final_states, final_states_out)
    tracing = traced(x)
    differentiable = differentiated(x, weight, bias, initial_states)
    plain = seq_idx is None and initial_states is None and final_states_out is None and not tracing
    call_key = None
    if plain and not return_final_states and (x.is_cuda or x.device.type in DEVICES):
        prepared = _prepared_forward.alike((x, weight, bias), activation)
        if prepared is not None:
            out = _Prepared.apply(prepared, x, weight, bias) if differentiable else prepared(x, weight, bias)
            if out is not None:
                return out
        call_key = _prepared_forward.key((x, weight, bias), activation)
        prepared = _prepared_forward.find(call_key)
        if prepared is not None:
            return _Prepared.apply(prepared, x, weight, bias) if differentiable else prepared(x, weight, bias)
    key = _metadata(x, weight, bias, activation) if plain else None
    if key is None or key not in _passed:
        _check_forward(x, weight, bias, seq_idx, initial_states, return_final_states, final_states_out, activation)
        if key is not None:
            _passed.add(key)
    silu = activation is not None
    arguments = (x, weight, bias, seq_idx, initial_states, silu, return_final_states)
    if tracing:
        out, final_states = torch.ops.anymamba.causal_conv1d(*arguments)
    elif differentiable:
        out, final_states = _CausalConv1d.apply(*arguments)
    else:
        out, final_states = _forward(*arguments)
    if call_key is not None:
        backend = choose(CAUSAL_CONV1D, _call(x, weight))
        tensors = (x, weight, bias)
        _prepared_forward.remember(call_key, backend, CAUSAL_CONV1D, (*tensors, silu), tensors, activation)
    return _with_states(out, final_states, return_final_states, final_states_out)


def _with_states(
    out: torch.Tensor, final_states: Any, return_final_states: bool, final_states_out: torch.Tensor | None
) -> Any:
    if not return_final_states:
        return out
    if final_states_out is not None:
        final_states = final_states_out.copy_(final_states)
    return out, final_states


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve the next column or columns and update `conv_state` in place. Not differentiable (as upstream's).

    Parameters
    ----------
    x : Tensor
        (batch, dim) or (batch, dim, seqlen).
    conv_state : Tensor
        (batch, dim, state_len) with ``state_len >= width - 1``; changed in place. With `conv_state_indices` its first
        dimension is the number of cache entries.
    weight, bias : Tensor
        (dim, width) and (dim).
    activation : {None, "silu", "swish"}
    cache_seqlens : Tensor, optional
        (batch), integer: treat `conv_state` as a circular buffer whose next column is ``cache_seqlens % state_len``.
    conv_state_indices : Tensor, optional
        (batch), integer: the entry of `conv_state` for each sequence; a negative one is padding (output 0, no update).

    Returns
    -------
    Tensor
        Like x.
    """
    tracing = traced(x)
    call_key = None
    tensors = (x, conv_state, weight, bias, cache_seqlens, conv_state_indices)
    if not tracing and (x.is_cuda or x.device.type in STEP_DEVICES):
        prepared = _prepared_update.alike(tensors, activation)
        if prepared is not None:
            known = prepared(*tensors)
            if known is not None:
                return cast(torch.Tensor, known)
        call_key = _prepared_update.key(tensors, activation)
        prepared = _prepared_update.find(call_key)
        if prepared is not None:
            return cast(torch.Tensor, prepared(x, conv_state, weight, bias, cache_seqlens, conv_state_indices))
    if call_key is None or call_key not in _passed:
        _check_update(x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)
        if call_key is not None:
            _passed.add(call_key)
    silu = activation is not None
    columns = x if x.dim() == 3 else x.unsqueeze(-1)
    run = torch.ops.anymamba.causal_conv1d_update if tracing else _update
    arguments = (columns, conv_state, weight, bias, silu, cache_seqlens, conv_state_indices)
    if torch.is_grad_enabled():  # entering the context costs as much as a launch: only where it changes something
        with torch.no_grad():
            out: torch.Tensor = run(*arguments)
    else:
        out = run(*arguments)
    if call_key is not None:
        _prepared_update.remember(
            call_key,
            choose(CAUSAL_CONV1D_UPDATE, _call(x, weight)),
            CAUSAL_CONV1D_UPDATE,
            (x, conv_state, weight, bias, silu, cache_seqlens, conv_state_indices),
            tensors,
            activation,
        )
    return out if x.dim() == 3 else out.squeeze(-1)


def causal_conv1d_varlen_states(x: torch.Tensor, cu_seqlens: torch.Tensor, state_len: int) -> torch.Tensor:
    """Return the last `state_len` columns of each packed sequence. Not differentiable (as upstream's).

    Parameters
    ----------
    x : Tensor
        (total_tokens, dim).
    cu_seqlens : Tensor
        (batch + 1), integer: where each sequence starts, and the end.
    state_len : int
        Columns to keep; a shorter sequence has zeros before its start.

    Returns
    -------
    Tensor
        (batch, dim, state_len), stride 1 along dim.
    """
    check_dim("x", x, 2, "(total_tokens, dim)")
    check_dim("cu_seqlens", cu_seqlens, 1, "(batch + 1,)")
    check_dtype("cu_seqlens", cu_seqlens, (torch.int32, torch.int64))
    check_device("cu_seqlens", cu_seqlens, x, "x")
    if cu_seqlens.shape[0] < 1:
        raise ShapeError("cu_seqlens is empty, but must be (batch + 1,): at least [0].")
    if state_len < 0:
        raise OptionError(f"state_len is {state_len}, but must not be negative.")
    run = torch.ops.anymamba.causal_conv1d_varlen_states if traced(x) else _varlen_states
    with torch.no_grad():
        states: torch.Tensor = run(x, cu_seqlens, state_len)
    return states


_passed = Passed()
_prepared_forward, _prepared_update = Prepared(), Prepared()


def _metadata(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> tuple[object, ...]:
    """Return all that the checks of the common call read."""
    of_bias = None if bias is None else (bias.shape, bias.device)
    return x.shape, x.dtype, x.device, weight.shape, weight.dtype, weight.device, of_bias, activation


def _check_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    return_final_states: bool,
    final_states_out: torch.Tensor | None,
    activation: str | None,
) -> None:
    check_activation(activation)
    check_dim("x", x, 3, "(batch, dim, seqlen)")
    batch, dim, seqlen = x.shape
    _check_filter(x, weight, bias)
    width = weight.shape[1]
    if seq_idx is not None:
        check_shape("seq_idx", seq_idx, (batch, seqlen), "(batch, seqlen)")
        check_dtype("seq_idx", seq_idx, (torch.int32, torch.int64))
        check_device("seq_idx", seq_idx, x, "x")
    if initial_states is not None:
        check_shape("initial_states", initial_states, (batch, dim, width - 1), "(batch, dim, width - 1)")
        check_device("initial_states", initial_states, x, "x")
    if final_states_out is not None:
        if not return_final_states:
            raise OptionError("final_states_out is given, but return_final_states is False.")
        check_shape("final_states_out", final_states_out, (batch, dim, width - 1), "(batch, dim, width - 1)")
        check_device("final_states_out", final_states_out, x, "x")


def _check_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    cache_seqlens: torch.Tensor | None,
    conv_state_indices: torch.Tensor | None,
) -> None:
    check_activation(activation)
    if x.dim() not in (2, 3):
        raise ShapeError(f"x has shape {tuple(x.shape)}, but must be (batch, dim) or (batch, dim, seqlen).")
    batch, dim = x.shape[0], x.shape[1]
    _check_filter(x, weight, bias)
    check_dim("conv_state", conv_state, 3, "(batch, dim, state_len)")
    entries = batch if conv_state_indices is None else conv_state.shape[0]
    check_shape("conv_state", conv_state, (entries, dim, conv_state.shape[2]), "(batch, dim, state_len)")
    check_device("conv_state", conv_state, x, "x")
    if conv_state.shape[2] < weight.shape[1] - 1:
        raise ShapeError(
            f"conv_state has state_len {conv_state.shape[2]}, but must have at least width - 1 = {weight.shape[1] - 1}."
        )
    for name, index in (("cache_seqlens", cache_seqlens), ("conv_state_indices", conv_state_indices)):
        if index is not None:
            check_shape(name, index, (batch,), "(batch,)")
            check_dtype(name, index, (torch.int32, torch.int64))
            check_device(name, index, x, "x")


def _check_filter(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    check_dtype("x", x, FLOATING)
    check_dim("weight", weight, 2, "(dim, width)")
    check_shape("weight", weight, (x.shape[1], weight.shape[1]), "(dim, width)")
    check_dtype("weight", weight, FLOATING)
    check_device("weight", weight, x, "x")
    if weight.shape[1] < 1:
        raise ShapeError(f"weight has shape {tuple(weight.shape)}, but its width must be at least 1.")
    if bias is not None:
        check_shape("bias", bias, (x.shape[1],), "(dim,)")
        check_device("bias", bias, x, "x")


def _call(x: torch.Tensor, weight: torch.Tensor) -> CausalConv1dCall:
    return CausalConv1dCall(x.device, x.dtype, weight.dtype, weight.shape[1])


@backward_where_forward_ran
class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        seq_idx: torch.Tensor | None,
        initial_states: torch.Tensor | None,
        silu: bool,
        return_final_states: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.save_for_backward(x, weight, bias, seq_idx, initial_states)
        ctx.silu, ctx.return_final_states = silu, return_final_states
        ctx.set_materialize_grads(False)
        arguments = (x, weight, bias, seq_idx, initial_states, silu, return_final_states)
        if not traced(x):
            return _forward(*arguments)  # None for final states that nobody wants: no second output to differentiate
        with below_autograd():
            out, final_states = torch.ops.anymamba.causal_conv1d(*arguments)
        return out, final_states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dfinal_states: torch.Tensor | None) -> Any:
        x, weight, bias, seq_idx, initial_states = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(x)
        if not ctx.return_final_states:
            dfinal_states = None
        run = torch.ops.anymamba.causal_conv1d_backward if traced(x) else _backward
        dx, dweight, dbias, dinitial = run(x, weight, bias, dout, seq_idx, initial_states, dfinal_states, ctx.silu)
        return (
            dx,
            dweight,
            None if bias is None else dbias,
            None,
            None if initial_states is None else dinitial,
            None,
            None,
        )


class _Prepared(torch.autograd.Function):
    """The plain convolution of a call like one before, on the backend that was chosen then."""

    @staticmethod
    def forward(
        ctx: Any, prepared: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.prepared = prepared
        return cast(torch.Tensor, prepared(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        if torch.is_grad_enabled():  # with create_graph: the decorator says that there is no second derivative
            return _backward_once(ctx, dout)
        return None, *ctx.prepared.backward(*ctx.saved_tensors, dout)


@torch.autograd.function.once_differentiable
def _backward_once(ctx: Any, dout: torch.Tensor) -> Any:
    return None, *ctx.prepared.backward(*ctx.saved_tensors, dout)


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    silu: bool,
    return_final_states: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    backend: CausalConv1dBackend = choose(CAUSAL_CONV1D, _call(x, weight))
    return backend.causal_conv1d_forward(x, weight, bias, seq_idx, initial_states, silu, return_final_states)


def _backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dout: torch.Tensor,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    silu: bool,
    dx_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    backend: CausalConv1dBackend = choose(CAUSAL_CONV1D, _call(x, weight))
    return backend.causal_conv1d_backward(
        x, weight, bias, dout, seq_idx, initial_states, dfinal_states, silu, dx_out=dx_out
    )


def _update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    cache_seqlens: torch.Tensor | None,
    conv_state_indices: torch.Tensor | None,
) -> torch.Tensor:
    backend: CausalConv1dBackend = choose(CAUSAL_CONV1D_UPDATE, _call(x, weight))
    return backend.causal_conv1d_update(x, conv_state, weight, bias, silu, cache_seqlens, conv_state_indices)


def _varlen_states(x: torch.Tensor, cu_seqlens: torch.Tensor, state_len: int) -> torch.Tensor:
    call = CausalConv1dCall(x.device, x.dtype, x.dtype, 1)
    backend: CausalConv1dBackend = choose(CAUSAL_CONV1D_VARLEN_STATES, call)
    return backend.causal_conv1d_varlen_states(x, cu_seqlens, state_len)


# --- torch.library: the same functions as opaque operators; "none" outputs become placeholders


def _forward_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    silu: bool,
    return_final_states: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, final_states = _forward(x, weight, bias, seq_idx, initial_states, silu, return_final_states)
    return out, placeholder(x) if final_states is None else final_states


def _forward_autograd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    silu: bool,
    return_final_states: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, final_states = _CausalConv1d.apply(x, weight, bias, seq_idx, initial_states, silu, return_final_states)
    return out, placeholder(x) if final_states is None else final_states


def _forward_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    silu: bool,
    return_final_states: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    final_shape = (x.shape[0], x.shape[1], weight.shape[1] - 1)
    return torch.empty_like(x), x.new_empty(final_shape) if return_final_states else placeholder(x)


def _backward_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dout: torch.Tensor,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dx, dweight, dbias, dinitial = _backward(x, weight, bias, dout, seq_idx, initial_states, dfinal_states, silu)
    return (
        dx,
        dweight,
        placeholder(weight) if dbias is None else dbias,
        placeholder(x) if dinitial is None else dinitial,
    )


def _backward_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dout: torch.Tensor,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(x),
        torch.empty_like(weight),
        placeholder(weight) if bias is None else torch.empty_like(bias),
        placeholder(x) if initial_states is None else torch.empty_like(initial_states),
    )


define(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, Tensor? initial_states, bool silu, "
    "bool return_final_states) -> (Tensor, Tensor)",
    _forward_op,
    _forward_fake,
    autograd=_forward_autograd,
)
define(
    "causal_conv1d_backward(Tensor x, Tensor weight, Tensor? bias, Tensor dout, Tensor? seq_idx, "
    "Tensor? initial_states, Tensor? dfinal_states, bool silu) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward_op,
    _backward_fake,
)
define(
    "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, bool silu, "
    "Tensor? cache_seqlens, Tensor? conv_state_indices) -> Tensor",
    _update,
    lambda x, conv_state, weight, bias, silu, cache_seqlens, conv_state_indices: torch.empty_like(x),
)
define(
    "causal_conv1d_varlen_states(Tensor x, Tensor cu_seqlens, int state_len) -> Tensor",
    _varlen_states,
    lambda x, cu_seqlens, state_len: x.new_empty((cu_seqlens.shape[0] - 1, state_len, x.shape[1])).transpose(1, 2),
)
