"""One decoding step on the CPU: a row of states is one channel, lanes are its states.

h = 2^(delta A log2e) h + delta x B;  y = C h + D x;  out = y silu(z). State read and written once (the floor). Rows are
independent: few stay on the calling thread, since waking another costs more than a step of a whole layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from anymamba.backends import Operator
from anymamba.backends.cpu import _device
from anymamba.backends.cpu._compile import flat, kernel
from anymamba.backends.cpu._math import LOG2E, exp2, sigmoid, softplus
from anymamba.backends.cpu._threads import run
from anymamba.backends.cpu._tiles import like
from anymamba.ops.selective_state_update import SelectiveStateUpdateCall

__all__ = ["refusal", "selective_state_update"]

_NO_INDEX = np.zeros(1, np.int64)
STATES_A_THREAD = 100_000  # below this a second thread costs more than it saves


def refusal(operator: Operator, call: SelectiveStateUpdateCall) -> str | None:
    """Return why this backend cannot do the call, or None."""
    elsewhere = _device.refusal(operator, call)
    if elsewhere is not None:
        return elsewhere
    if call.state_dtype != torch.promote_types(call.dtype, torch.float32):
        return f"a {call.state_dtype} state with {call.dtype} inputs is left to the torch backend"
    return None


def selective_state_update(
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
    """See `anymamba.ops.selective_state_update.SelectiveStateUpdateBackend`."""
    batch, heads, headdim = x.shape
    dstate, groups = state.shape[3], B.shape[1]
    work = state.dtype
    tied = A.stride(2) == 0  # one decay a row
    rows = A.to(work) if tied else A.to(work).contiguous()
    out = torch.empty_like(x, dtype=work)
    none = state.new_zeros(1).as_strided((heads, headdim), (0, 0))
    arguments: list[Any] = [flat(state), *state.stride()]
    for tensor in (x, dt, none.expand(batch, heads, headdim) if z is None else z):
        arguments += _strided(tensor.to(work))
    for parameter in (rows, none if D is None else D.to(work), none if dt_bias is None else dt_bias.to(work)):
        arguments += _strided(parameter)[:3]
    arguments += [flat(B.to(work).contiguous()), flat(C.to(work).contiguous())]
    index = (
        np.empty(0, np.int64) if state_batch_indices is None else flat(state_batch_indices.to(torch.int64).contiguous())
    )

    def work_items(first: int, after: int) -> None:
        _update(
            first, after, heads, headdim, dstate, groups, *arguments, tied, z is not None, dt_softplus,
            index, state_batch_indices is not None, *_strided(out),
        )  # fmt: skip

    run(work_items, batch * heads * headdim, at_least=max(STATES_A_THREAD // max(dstate, 1), 1))
    return like(x, out)


def _strided(tensor: torch.Tensor) -> list[Any]:
    return [flat(tensor), *tensor.stride()]


@kernel
def _update(
    first, after, heads, headdim, dstate, groups, state, s_b, s_h, s_p, s_n,
    x, x_b, x_h, x_p, dt, dt_b, dt_h, dt_p, z, z_b, z_h, z_p, A, A_h, A_p, D, D_h, D_p, bias, bias_h, bias_p,
    B, C, tied, has_z, with_softplus, index, has_index, out, out_b, out_h, out_p,
):  # fmt: skip
    """Compute the rows first <= row < after."""
    log2e = x.dtype.type(LOG2E)
    for row in range(first, after):
        b = row // (heads * headdim)
        h = row // headdim % heads
        p = row % headdim
        at = b * out_b + h * out_h + p * out_p
        entry = index[b] if has_index else b
        if entry < 0:
            out[at] = 0
            continue
        step = dt[b * dt_b + h * dt_h + p * dt_p] + bias[h * bias_h + p * bias_p]
        if with_softplus:
            step = softplus(step)
        value = x[b * x_b + h * x_h + p * x_p]
        scaled = step * value
        exponent = step * log2e
        a0 = h * A_h + p * A_p
        group = (b * groups + h // (heads // groups)) * dstate
        Bs = B[group : group + dstate]
        Cs = C[group : group + dstate]
        s0 = entry * s_b + h * s_h + p * s_p
        y = D[h * D_h + p * D_p] * value
        # One loop a case, so that LLVM sees one loop to vectorise: a row is short, and every further loop costs as much.
        if s_n != 1:
            for n in range(dstate):
                rate = A[a0] if tied else A[a0 + n]
                new = exp2(exponent * rate) * state[s0 + n * s_n] + scaled * Bs[n]
                state[s0 + n * s_n] = new
                y += new * Cs[n]
        elif tied:
            decay = exp2(exponent * A[a0])
            states = state[s0 : s0 + dstate]
            for n in range(dstate):
                new = decay * states[n] + scaled * Bs[n]
                states[n] = new
                y += new * Cs[n]
        else:
            rates = A[a0 : a0 + dstate]
            states = state[s0 : s0 + dstate]
            for n in range(dstate):
                new = exp2(exponent * rates[n]) * states[n] + scaled * Bs[n]
                states[n] = new
                y += new * Cs[n]
        if has_z:
            gate = z[b * z_b + h * z_h + p * z_p]
            y *= gate * sigmoid(gate)
        out[at] = y
