"""One decoding step on the CPU: a row of states is one channel, lanes are its states.

h = 2^(delta A log2e) h + delta x B;  y = C h + D x;  out = y silu(z). State read and written once (the floor). Rows are
independent: few stay on the calling thread, since waking another costs more than a step of a whole layer.

A layer's step is 30 us of arithmetic. Of what Python adds, the checks, views and strides are settled once for calls alike
(`prepare`), and tensors go to the kernel as addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from anymamba.backends import Operator
from anymamba.backends.cpu import _device
from anymamba.backends.cpu._compile import CODES, Entry, kernel
from anymamba.backends.cpu._math import LOG2E, exp2, least, sigmoid, softplus
from anymamba.backends.cpu._native import check
from anymamba.backends.cpu._scratch import begin, buffer, end
from anymamba.backends.cpu._threads import run_compiled
from anymamba.backends.cpu._tiles import like
from anymamba.backends.cpu._tuning import Settings, tunable
from anymamba.ops.selective_state_update import SelectiveStateUpdateCall

__all__ = ["prepare", "refusal", "selective_state_update"]

ROWS = 64  # worked on together
STATES_A_THREAD = 100_000  # below this a second thread costs more than it saves
STEP = tunable("selective_state_update", __name__, sizes=("rows", "states"))


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
    work = state.dtype
    out = torch.empty_like(x, dtype=work)
    x_, dt, A, B, C = (tensor.to(work) for tensor in (x, dt, A, B, C))
    D, z, dt_bias = (None if tensor is None else tensor.to(work) for tensor in (D, z, dt_bias))
    index = None if state_batch_indices is None else state_batch_indices.to(torch.int64).contiguous()
    layout = _layout(state, x_, dt, A, B, C, D, z, dt_bias, dt_softplus, index, out)
    addresses = [0 if t is None else t.data_ptr() for t in (state, x_, dt, A, B, C, D, z, dt_bias, index, out)]
    _run(_variant(work), layout, layout[:4].tolist(), addresses, _settings(state, x_))
    return like(x, out)


def prepare(operator: Operator, arguments: tuple[Any, ...]) -> Callable[..., torch.Tensor] | None:
    """Return a function that does calls like this one, or None; see `anymamba.ops._prepared`. Arguments as the caller's."""
    state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, indices = arguments
    work = state.dtype
    if any(t is not None and t.dtype != work for t in (x, dt, A, B, C, D, z, dt_bias)):
        return None
    if indices is not None and not (indices.dtype == torch.int64 and indices.is_contiguous()):
        return None
    out = torch.empty_like(x)
    if state.dim() == 3:  # without heads
        state, A, out = state.unsqueeze(1), A.unsqueeze(0), out.unsqueeze(1)
    x, dt, z, B, C = (t.unsqueeze(1) if t is not None and t.dim() == 2 else t for t in (x, dt, z, B, C))
    D, dt_bias = (t.unsqueeze(0) if t is not None and t.dim() == 1 else t for t in (D, dt_bias))
    layout, step = _layout(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, indices, out), _variant(work)
    sizes, how = layout[:4].tolist(), _settings(state, x)

    def call(
        state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
        D: torch.Tensor | None, z: torch.Tensor | None, dt_bias: torch.Tensor | None, dt_softplus: bool,
        indices: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        out = torch.empty_like(x)
        _run(
            step, layout, sizes, (
                state.data_ptr(), x.data_ptr(), dt.data_ptr(), A.data_ptr(), B.data_ptr(), C.data_ptr(),
                0 if D is None else D.data_ptr(), 0 if z is None else z.data_ptr(),
                0 if dt_bias is None else dt_bias.data_ptr(), 0 if indices is None else indices.data_ptr(), out.data_ptr(),
            ), how,
        )  # fmt: skip
        return out

    return call


def _settings(state: torch.Tensor, x: torch.Tensor) -> Settings:
    return STEP.settings(state.element_size(), x.numel(), state.shape[3])


def _variant(dtype: torch.dtype) -> Entry:
    return _update.variant("l" + 9 * CODES[dtype] + "l" + CODES[dtype])


def _run(step: Entry, layout: torch.Tensor, sizes: list[int], addresses: Sequence[int], how: Settings) -> None:
    batch, heads, headdim, dstate = sizes
    rows = batch * heads * headdim
    block = step.layout.pack(layout.data_ptr(), *addresses)
    if how.threads == 1 or (not how.threads and rows * dstate < 2 * STATES_A_THREAD):
        check(step.code.range(0, rows, block))
    else:
        at_least = how.at_least(max(STATES_A_THREAD // max(dstate, 1), 1))
        run_compiled(step.code, rows, block, at_least=at_least, most=how.threads)


def _layout(
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
    index: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Return all that is not an address: sizes, strides, options."""
    per_row, per_channel = (0, 0, 0), (0, 0)
    return torch.tensor(
        [
            *x.shape, state.shape[3], B.shape[1],
            *state.stride(), *x.stride(), *dt.stride(), *A.stride(), *B.stride(), *C.stride(),
            *(per_channel if D is None else D.stride()), *(per_row if z is None else z.stride()),
            *(per_channel if dt_bias is None else dt_bias.stride()), *out.stride(),
            D is not None, z is not None, dt_bias is not None, dt_softplus, index is not None,
        ],
        dtype=torch.int64,
    )  # fmt: skip


@kernel
def _update(first, after, layout, state, x, dt, A, B, C, D, z, bias, index, out):
    """Compute the rows first <= row < after."""
    heads, headdim, dstate, groups = layout[1], layout[2], layout[3], layout[4]
    s_b, s_h, s_p, s_n = layout[5], layout[6], layout[7], layout[8]
    x_b, x_h, x_p, dt_b, dt_h, dt_p = layout[9], layout[10], layout[11], layout[12], layout[13], layout[14]
    A_h, A_p, A_n = layout[15], layout[16], layout[17]
    B_b, B_g, B_n, C_b, C_g, C_n = layout[18], layout[19], layout[20], layout[21], layout[22], layout[23]
    D_h, D_p, z_b, z_h, z_p = layout[24], layout[25], layout[26], layout[27], layout[28]
    bias_h, bias_p, out_b, out_h, out_p = layout[29], layout[30], layout[31], layout[32], layout[33]
    has_D, has_z, has_bias, with_softplus = layout[34] != 0, layout[35] != 0, layout[36] != 0, layout[37] != 0
    has_index = layout[38] != 0
    log2e = state.dtype.type(LOG2E)
    side_by_side = s_n == 1 and B_n == 1 and C_n == 1
    scratch = begin()
    steps = buffer(scratch, ROWS, state)
    values = buffer(scratch, ROWS, state)
    gates = buffer(scratch, ROWS, state)
    for i in range(ROWS):  # rows of a block that there are not are computed too: not with what lay there
        steps[i] = 0
        gates[i] = 0
    row = first
    while row < after:
        b = row // (heads * headdim)
        h = row // headdim % heads
        p0 = row % headdim
        count = least(ROWS, least(headdim - p0, after - row))
        row += count
        at = b * out_b + h * out_h + p0 * out_p
        entry = index[b] if has_index else b
        if entry < 0:
            for i in range(count):
                out[at + i * out_p] = 0
            continue
        # What a row has one of, for all rows of the block: lanes are rows here.
        for i in range(count):
            steps[i] = dt[b * dt_b + h * dt_h + (p0 + i) * dt_p]
            values[i] = x[b * x_b + h * x_h + (p0 + i) * x_p]
        if has_bias:
            for i in range(count):
                steps[i] += bias[h * bias_h + (p0 + i) * bias_p]
        if with_softplus:
            for i in range(ROWS):  # all, whatever the rest holds: a loop of known length
                steps[i] = softplus(steps[i])
        if has_z:
            for i in range(count):
                gates[i] = z[b * z_b + h * z_h + (p0 + i) * z_p]
            for i in range(ROWS):
                gates[i] *= sigmoid(gates[i])
        group = h // (heads // groups)
        B0 = b * B_b + group * B_g
        C0 = b * C_b + group * C_g
        Bs, Cs = B[B0 : B0 + dstate], C[C0 : C0 + dstate]
        for i in range(count):
            p = p0 + i
            exponent = steps[i] * log2e
            scaled = steps[i] * values[i]
            a0 = h * A_h + p * A_p
            s0 = entry * s_b + h * s_h + p * s_p
            y = D[h * D_h + p * D_p] * values[i] if has_D else state.dtype.type(0)
            # One loop a case, so that LLVM sees one loop to vectorise: a row is short, and every further loop costs as much.
            if side_by_side and A_n == 0:  # one decay a row
                decay = exp2(exponent * A[a0])
                states = state[s0 : s0 + dstate]
                for n in range(dstate):
                    new = decay * states[n] + scaled * Bs[n]
                    states[n] = new
                    y += new * Cs[n]
            elif side_by_side and A_n == 1 and dstate == 16:  # the usual number: no loop at all
                rates, states = A[a0 : a0 + 16], state[s0 : s0 + 16]
                for n in range(16):
                    new = exp2(exponent * rates[n]) * states[n] + scaled * Bs[n]
                    states[n] = new
                    y += new * Cs[n]
            elif side_by_side and A_n == 1:
                rates, states = A[a0 : a0 + dstate], state[s0 : s0 + dstate]
                for n in range(dstate):
                    new = exp2(exponent * rates[n]) * states[n] + scaled * Bs[n]
                    states[n] = new
                    y += new * Cs[n]
            else:
                for n in range(dstate):
                    new = exp2(exponent * A[a0 + n * A_n]) * state[s0 + n * s_n] + scaled * B[B0 + n * B_n]
                    state[s0 + n * s_n] = new
                    y += new * C[C0 + n * C_n]
            out[at + i * out_p] = y * gates[i] if has_z else y
    end(scratch)
