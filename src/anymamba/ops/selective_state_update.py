"""One decoding step of a selective state-space model: the state is updated in place.

Per batch row, head h and channel p, with dt' = softplus(dt + dt_bias) (bias and softplus where asked for):

    state[p, n] = exp(dt'[p] * A[p, n]) * state[p, n] + dt'[p] * x[p] * B[n]
    out[p] = (sum_n state[p, n] * C[n] + D[p] * x[p]) * silu(z[p])

Names and arguments are those of mamba_ssm (1.1 to 2.3). Without heads (Mamba-1) it is one step of
`anymamba.ops.selective_scan`; with heads (Mamba-2), B and C belong to groups of heads.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, cast

import torch

from anymamba.backends import Operator, choose, use_backend
from anymamba.errors import ShapeError
from anymamba.ops._checks import FLOATING, Passed, check_device, check_dtype, check_shape
from anymamba.ops._library import define, traced
from anymamba.ops._prepared import STEP_DEVICES, Prepared

__all__ = ["SELECTIVE_STATE_UPDATE", "selective_state_update", "selective_state_update_ref"]

SELECTIVE_STATE_UPDATE = Operator(
    "selective_state_update", family="selective_state_update", functions=("selective_state_update",)
)


_prepared, _passed = Prepared(), Passed()


class SelectiveStateUpdateCall(NamedTuple):
    """What a backend may look at to accept or refuse a step."""

    device: torch.device
    dtype: torch.dtype  # of x
    state_dtype: torch.dtype
    headdim: int
    dstate: int


class SelectiveStateUpdateBackend(Protocol):
    """What a backend's module `selective_state_update` provides. Inputs are already checked; any strides may come.

    Any floating dtypes may be mixed. Parameters that are tied within a head come expanded, with stride 0.
    """

    def selective_state_update(
        self,
        state: torch.Tensor,  # (entries, nheads, headdim, dstate), updated in place
        x: torch.Tensor,  # (batch, nheads, headdim)
        dt: torch.Tensor,  # (batch, nheads, headdim)
        A: torch.Tensor,  # (nheads, headdim, dstate)
        B: torch.Tensor,  # (batch, ngroups, dstate)
        C: torch.Tensor,  # (batch, ngroups, dstate)
        D: torch.Tensor | None,  # (nheads, headdim)
        z: torch.Tensor | None,  # (batch, nheads, headdim)
        dt_bias: torch.Tensor | None,  # (nheads, headdim)
        dt_softplus: bool,
        state_batch_indices: torch.Tensor | None,  # (batch), integer entry of state; negative: padding, output 0
    ) -> torch.Tensor:
        """Return out like x. The output sees the new state before it is rounded to the state's dtype."""
        ...


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Take one step and update `state` in place. Not differentiable (as upstream's).

    Parameters
    ----------
    state : Tensor
        (batch, dim, dstate) or (batch, nheads, dim, dstate); changed in place. With `state_batch_indices` its first
        dimension is the number of cache entries. Any floating dtype.
    x, dt : Tensor
        (batch, dim) or (batch, nheads, dim).
    A : Tensor
        (dim, dstate) or (nheads, dim, dstate).
    B, C : Tensor
        (batch, dstate) or (batch, ngroups, dstate).
    D, dt_bias : Tensor, optional
        (dim) or (nheads, dim).
    z : Tensor, optional
        Like x: the gate.
    dt_softplus : bool
    state_batch_indices : Tensor, optional
        (batch), integer: the entry of `state` for each row; a negative one is padding (output 0, no update).

    Returns
    -------
    Tensor
        Like x.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        Before any work, naming the argument.
    """
    arguments = (state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices)
    tracing, key = traced(x), None
    tensors = (state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices)
    if not tracing and (state.is_cuda or state.device.type in STEP_DEVICES):
        prepared = _prepared.alike(tensors, dt_softplus)
        if prepared is not None:
            known = prepared(*arguments)
            if known is not None:
                return cast(torch.Tensor, known)
        key = _prepared.key(tensors, dt_softplus)
        prepared = _prepared.find(key)
        if prepared is not None:
            return cast(torch.Tensor, prepared(*arguments))
    if state.dim() not in (3, 4):
        raise ShapeError(
            f"state has shape {tuple(state.shape)}, but must be (batch, dim, dstate) or (batch, nheads, dim, dstate)."
        )
    has_heads = state.dim() == 4
    if not has_heads:
        state = state.unsqueeze(1)
    x, dt, B, C = (tensor.unsqueeze(1) if tensor.dim() == 2 else tensor for tensor in (x, dt, B, C))
    z = z.unsqueeze(1) if z is not None and z.dim() == 2 else z
    A = A.unsqueeze(0) if A.dim() == 2 else A
    D, dt_bias = (
        tensor.unsqueeze(0) if tensor is not None and tensor.dim() == 1 else tensor for tensor in (D, dt_bias)
    )
    if key is None or key not in _passed:
        _check(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices)
        if key is not None:
            _passed.add(key)
    run = torch.ops.anymamba.selective_state_update if tracing else _update
    with torch.no_grad():
        out: torch.Tensor = run(state, x, dt, A, B, C, D, z, dt_bias, bool(dt_softplus), state_batch_indices)
    if key is not None:
        call = SelectiveStateUpdateCall(x.device, x.dtype, state.dtype, state.shape[2], state.shape[3])
        _prepared.remember(
            key, choose(SELECTIVE_STATE_UPDATE, call), SELECTIVE_STATE_UPDATE, arguments, tensors, dt_softplus
        )
    return out if has_heads else out.squeeze(1)


def selective_state_update_ref(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `selective_state_update` by the formula written down: the reference backend, row by row."""
    with use_backend("reference"):
        return selective_state_update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices)


def _check(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state_batch_indices: torch.Tensor | None,
) -> None:
    entries, nheads, dim, dstate = state.shape
    check_dtype("state", state, FLOATING)
    batch = entries if state_batch_indices is None else state_batch_indices.shape[0]
    if state_batch_indices is not None:
        check_shape("state_batch_indices", state_batch_indices, (batch,), "(batch,)")
        check_dtype("state_batch_indices", state_batch_indices, (torch.int32, torch.int64))
        check_device("state_batch_indices", state_batch_indices, state, "state")
    groups = B.shape[1] if B.dim() == 3 else 1
    expected: list[tuple[str, torch.Tensor | None, tuple[int, ...], str]] = [
        ("x", x, (batch, nheads, dim), "(batch, nheads, dim)"),
        ("dt", dt, (batch, nheads, dim), "(batch, nheads, dim)"),
        ("A", A, (nheads, dim, dstate), "(nheads, dim, dstate)"),
        ("B", B, (batch, groups, dstate), "(batch, ngroups, dstate)"),
        ("C", C, (batch, groups, dstate), "(batch, ngroups, dstate)"),
        ("D", D, (nheads, dim), "(nheads, dim)"),
        ("z", z, (batch, nheads, dim), "(batch, nheads, dim)"),
        ("dt_bias", dt_bias, (nheads, dim), "(nheads, dim)"),
    ]
    for name, tensor, shape, meaning in expected:
        if tensor is not None:
            check_shape(name, tensor, shape, meaning)
            check_dtype(name, tensor, FLOATING)
            check_device(name, tensor, state, "state")
    if groups < 1 or nheads % groups:
        raise ShapeError(f"B has {groups} groups, but nheads = {nheads} must be a multiple of their number.")


def _update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    state_batch_indices: torch.Tensor | None,
) -> torch.Tensor:
    call = SelectiveStateUpdateCall(x.device, x.dtype, state.dtype, state.shape[2], state.shape[3])
    backend: SelectiveStateUpdateBackend = choose(SELECTIVE_STATE_UPDATE, call)
    return backend.selective_state_update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices)


define(
    "selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
    "Tensor? dt_bias, bool dt_softplus, Tensor? state_batch_indices) -> Tensor",
    _update,
    lambda state, x, *_others: torch.empty_like(x),
)
