"""Selective scan on the CPU: vector lanes are channels, time is a loop, states stay in the first-level cache.

A work item is a tile of LANES channels of one batch entry (and one group of B and C). Forward, BLOCK steps at a time:

    transpose u, delta into (step, lane) buffers      bias and softplus on the way
    for each step, for each state: h = 2^(delta A log2e) h + delta u B[state];  y += h C[state]      lanes in parallel
    transpose y out                                   D u and silu(z) on the way

Lanes as channels need no sum across lanes for y, and B and C are scalars broadcast (constant ones are lanes, as A is). Bytes
moved: u, delta, z, out once, B and C once a tile (from cache). Arithmetic: 16 instructions a state and step, of which exp2 is
10; at N = 16 that is the floor.

Backward, a piece of CHECKPOINT_LENGTH steps at a time from the end: the forward recurrence again from the checkpoint, keeping
h and the decay for the piece (2 x 128 x N x LANES numbers, second-level cache), then the reverse recurrence. dB and dC are sums
over channels: each work item (a fixed part of a group's tiles) keeps its own partial sum and the parts are added in order, so
the result depends neither on the number of threads nor on timing.

Tried and lost: lanes as states (one reduction across lanes a step); a scan in log2(length) sweeps (twice the exp2).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from anymamba.backends import Operator
from anymamba.backends.cpu import _device
from anymamba.backends.cpu._compile import kernel
from anymamba.backends.cpu._math import LN2, LOG2E, exp2, least, sigmoid, softplus
from anymamba.backends.cpu._scratch import begin, buffer, end
from anymamba.backends.cpu._tiles import LANES, like, load, store, vector
from anymamba.backends.cpu._tuning import BLOCKS, tunable
from anymamba.backends.torch._short_scan import short_backward, short_forward
from anymamba.machine.memory import empty_like
from anymamba.ops.selective_scan import CHECKPOINT_LENGTH, Gradients, SelectiveScanCall

__all__ = ["refusal", "selective_scan_backward", "selective_scan_forward"]

BLOCK = 64  # steps transposed at a time, unless tuned
FORWARD = tunable(
    "selective_scan forward", __name__, block=BLOCK, blocks=BLOCKS,
    meaning="steps transposed into a tile at a time: long ones amortise what a block costs, short ones stay in the cache",
    sizes=("channels", "length", "states"),
)  # fmt: skip
BACKWARD = tunable("selective_scan backward", __name__, sizes=("channels", "length", "states"))
PIECE = CHECKPOINT_LENGTH
STEPS_A_THREAD = 1 << 17  # steps of states: 0.1 ms of work; on a busy machine waking a thread can cost far more
SLOTS = 16  # least work items of the backward: fixed, so that sums are the same whatever the number of threads


def refusal(operator: Operator, call: SelectiveScanCall) -> str | None:
    """Return why this backend cannot do the call, or None."""
    elsewhere = _device.refusal(operator, call)
    if elsewhere is not None:
        return elsewhere
    if call.A_dtype.is_complex:
        return "complex A is left to the torch backend"
    return None


def selective_scan_forward(
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
    """See `anymamba.ops.selective_scan.SelectiveScanBackend`."""
    batch, dim, seqlen = u.shape
    if seqlen == 1:  # a dozen small operations cost less than handing 40 arguments to a kernel
        return short_forward(u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, save)
    dstate = A.shape[1]
    work = A.dtype
    u_, delta_, B_, C_, z_ = (None if t is None else t.to(work) for t in (u, delta, B, C, z))
    out = empty_like(delta, work)
    last = A.new_empty(batch, dim, dstate)
    pieces = -(-seqlen // PIECE) if save else 0
    checkpoints = A.new_empty(batch, dim, pieces, dstate)
    state = last if initial_state is None else initial_state
    tensors = _views(u_, delta_, z_, B_, C_)
    groups = _groups(B, C)
    tiles = batch * groups * (-(-(dim // groups) // LANES))
    A2 = (A * LOG2E).contiguous()

    how = FORWARD.settings(A.element_size(), batch * dim, seqlen, dstate)

    _forward(B.dim() == 4, C.dim() == 4).over(
        tiles, how.block, batch, dim, seqlen, dstate, groups, *tensors, A2,
        vector(D, dim, A), vector(delta_bias, dim, A), D is not None, delta_bias is not None, delta_softplus,
        state, *state.stride(), initial_state is not None,
        out, *out.stride(), last, checkpoints, pieces,
        at_least=how.at_least(_tiles_a_thread(seqlen, dstate)), most=how.threads,
    )  # fmt: skip
    result = out if u.dtype == work else empty_like(delta, u.dtype).copy_(out)
    return result, last, checkpoints if save else None


def selective_scan_backward(
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
    """See `anymamba.ops.selective_scan.SelectiveScanBackend`."""
    batch, dim, seqlen = u.shape
    if seqlen == 1:
        return short_backward(
            u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, dout, dlast_state,
            return_out, dz_out, dB_out, dC_out,
        )  # fmt: skip
    dstate, groups = A.shape[1], _groups(B, C)
    work = A.dtype
    if checkpoints is None:
        _, _, checkpoints = selective_scan_forward(
            u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, save=True
        )
        assert checkpoints is not None
    u_, delta_, B_, C_, z_ = (None if t is None else t.to(work) for t in (u, delta, B, C, z))
    dout_ = dout.to(work)
    du, ddelta = empty_like(u, work), empty_like(delta, work)
    dz = None if z is None else empty_like(z, work)
    out = empty_like(delta, work) if return_out else None
    dinitial = A.new_empty(batch, dim, dstate)
    tiles_a_group = -(-(dim // groups) // LANES)
    parts = min(tiles_a_group, -(-SLOTS // max(batch * groups, 1)))
    # Partial sums over the channels of a part; of a constant matrix there is one a channel, and the sum is over the batch.
    dB, dC = (
        A.new_zeros(batch, groups, parts, seqlen, dstate) if matrix.dim() == 4 else A.new_zeros(batch, dim, dstate)
        for matrix in (B, C)
    )
    dA = A.new_zeros(batch, dim, dstate)
    dD, dbias = A.new_zeros(batch, dim), A.new_zeros(batch, dim)
    dlast = dinitial if dlast_state is None else dlast_state.to(work)
    tensors = _views(u_, delta_, z_, B_, C_)
    gradients = [part for t in (dout_, du, ddelta, dz if dz is not None else du, out if out is not None else du)
                 for part in (t, *t.stride())]  # fmt: skip
    A2 = (A * LOG2E).contiguous()

    how = BACKWARD.settings(A.element_size(), batch * dim, seqlen, dstate)
    at_least = -(-_tiles_a_thread(seqlen, dstate) // max(1, tiles_a_group // parts))
    _backward(B.dim() == 4, C.dim() == 4).over(
        batch * groups * parts, parts, batch, dim, seqlen, dstate, groups, *tensors, A2,
        vector(D, dim, A), vector(delta_bias, dim, A), D is not None, delta_bias is not None, delta_softplus,
        checkpoints, *gradients, out is not None,
        dlast, *dlast.stride(), dlast_state is not None,
        dinitial, dA, dB, dC, dD, dbias,
        at_least=how.at_least(at_least), most=how.threads,
    )  # fmt: skip
    if dz is not None:
        assert z is not None
        dz = dz_out.copy_(dz) if dz_out is not None else like(z, dz)
    return (
        like(u, du),
        like(delta, ddelta),
        like(A, dA.sum(0)),
        _into(dB_out, B, dB),
        _into(dC_out, C, dC),
        None if D is None else like(D, dD.sum(0)),
        dz,
        None if delta_bias is None else like(delta_bias, dbias.sum(0)),
        None if initial_state is None else like(initial_state, dinitial),
        None if out is None else (out if u.dtype == work else empty_like(delta, u.dtype).copy_(out)),
    )


def _tiles_a_thread(seqlen: int, dstate: int) -> int:
    """Return how many tiles are worth waking a thread for."""
    return -(-STEPS_A_THREAD // max(1, seqlen * dstate * LANES))


def _groups(B: torch.Tensor, C: torch.Tensor) -> int:
    return B.shape[1] if B.dim() == 4 else C.shape[1] if C.dim() == 4 else 1


def _into(given: torch.Tensor | None, tensor: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """Add the parts of the gradient of B or C up, into the memory given for it or in its tensor's layout."""
    gradient = parts.sum(2).transpose(2, 3) if tensor.dim() == 4 else parts.sum(0)
    return like(tensor, gradient) if given is None else given.copy_(gradient)


def _views(
    u: torch.Tensor | None,
    delta: torch.Tensor | None,
    z: torch.Tensor | None,
    B: torch.Tensor | None,
    C: torch.Tensor | None,
) -> list[Any]:
    """Return each tensor's memory and strides, flattened, and whether there is a z."""
    assert u is not None and delta is not None and B is not None and C is not None
    gate = u if z is None else z
    parts = [part for t in (u, delta, gate) for part in (t, *t.stride())]
    for matrix in (B, C):
        # (batch, groups, dstate, seqlen); of a constant one (dim, dstate) the channel takes the place of the step.
        strides = matrix.stride() if matrix.dim() == 4 else (0, 0, matrix.stride(1), matrix.stride(0))
        parts += [matrix, *strides]
    return [*parts, z is not None]


@kernel
def _discretise(raw: Any, steps: int, bias: Any, with_softplus: bool, step: Any) -> None:
    """Return raw + bias in `raw`, and the step size (its softplus where asked for) in `step`."""
    for t in range(steps):
        for lane in range(LANES):
            value = raw[t, lane] + bias[lane]
            raw[t, lane] = value
            step[t, lane] = softplus(value) if with_softplus else value


@functools.cache
def _forward(B_varies: bool, C_varies: bool) -> Any:
    """Return the kernel for B and C that vary with time or are constant: known when it is compiled, not asked at every step."""

    @kernel
    def forward(
        first, after, block, batch, dim, seqlen, dstate, groups,
        u, u_b, u_d, u_t, delta, delta_b, delta_d, delta_t, z, z_b, z_d, z_t,
        B, B_b, B_g, B_n, B_t, C, C_b, C_g, C_n, C_t, has_z, A2,
        D, bias, has_D, has_bias, with_softplus,
        state, state_b, state_d, state_n, has_state,
        out, out_b, out_d, out_t, last, checkpoints, pieces,
    ):  # fmt: skip
        """Compute the tiles first <= tile < after."""
        channels = dim // groups
        tiles_a_group = (channels + LANES - 1) // LANES
        scratch = begin()
        h = buffer(scratch, (dstate, LANES), A2)
        decay = buffer(scratch, (dstate, LANES), A2)
        Bb = buffer(scratch, (dstate, LANES), A2)
        Cb = buffer(scratch, (dstate, LANES), A2)
        zero = A2.dtype.type(0)
        ub = buffer(scratch, (block, LANES), A2)
        db = buffer(scratch, (block, LANES), A2)
        raw = buffer(scratch, (block, LANES), A2)
        yb = buffer(scratch, (block, LANES), A2)
        lane_D = buffer(scratch, LANES, A2)
        lane_bias = buffer(scratch, LANES, A2)
        for tile in range(first, after):
            b = tile // (groups * tiles_a_group)
            g = tile // tiles_a_group % groups
            c0 = g * channels + tile % tiles_a_group * LANES
            lanes = least(LANES, (g + 1) * channels - c0)
            for lane in range(LANES):
                lane_D[lane] = D[c0 + lane] if lane < lanes else 0
                lane_bias[lane] = bias[c0 + lane] if lane < lanes else 0
            for n in range(dstate):
                for lane in range(LANES):
                    inside = lane < lanes
                    decay[n, lane] = A2[(c0 + lane) * dstate + n] if inside else 0
                    Bb[n, lane] = B[(c0 + lane) * B_t + n * B_n] if inside and not B_varies else 0
                    Cb[n, lane] = C[(c0 + lane) * C_t + n * C_n] if inside and not C_varies else 0
                    h[n, lane] = state[b * state_b + (c0 + lane) * state_d + n * state_n] if has_state and inside else 0
            for t0 in range(0, seqlen, block):
                steps = least(block, seqlen - t0)
                if pieces > 0 and t0 % PIECE == 0:
                    for lane in range(lanes):
                        start = ((b * dim + c0 + lane) * pieces + t0 // PIECE) * dstate
                        for n in range(dstate):
                            checkpoints[start + n] = h[n, lane]
                load(u, b * u_b + c0 * u_d + t0 * u_t, u_d, u_t, lanes, steps, ub)
                load(delta, b * delta_b + c0 * delta_d + t0 * delta_t, delta_d, delta_t, lanes, steps, raw)
                _discretise(raw, steps, lane_bias, with_softplus, db)
                for t in range(steps):
                    for lane in range(LANES):
                        yb[t, lane] = lane_D[lane] * ub[t, lane]
                        ub[t, lane] *= db[t, lane]
                B0 = b * B_b + g * B_g + t0 * B_t
                C0 = b * C_b + g * C_g + t0 * C_t
                for t in range(steps):
                    for n in range(dstate):
                        Bn = B[B0 + t * B_t + n * B_n] if B_varies else zero
                        Cn = C[C0 + t * C_t + n * C_n] if C_varies else zero
                        for lane in range(LANES):
                            b_ = Bn if B_varies else Bb[n, lane]
                            value = exp2(db[t, lane] * decay[n, lane]) * h[n, lane] + ub[t, lane] * b_
                            h[n, lane] = value
                            yb[t, lane] += value * (Cn if C_varies else Cb[n, lane])
                if has_z:
                    load(z, b * z_b + c0 * z_d + t0 * z_t, z_d, z_t, lanes, steps, raw)
                    for t in range(steps):
                        for lane in range(LANES):
                            yb[t, lane] *= raw[t, lane] * sigmoid(raw[t, lane])
                store(yb, out, b * out_b + c0 * out_d + t0 * out_t, out_d, out_t, lanes, steps)
            for lane in range(lanes):
                for n in range(dstate):
                    last[(b * dim + c0 + lane) * dstate + n] = h[n, lane]
        end(scratch)

    return forward


@functools.cache
def _backward(B_varies: bool, C_varies: bool) -> Any:
    """Return the kernel, as `_forward` does."""

    @kernel
    def backward(
        first, after, parts, batch, dim, seqlen, dstate, groups,
        u, u_b, u_d, u_t, delta, delta_b, delta_d, delta_t, z, z_b, z_d, z_t,
        B, B_b, B_g, B_n, B_t, C, C_b, C_g, C_n, C_t, has_z, A2,
        D, bias, has_D, has_bias, with_softplus, checkpoints,
        dout, dout_b, dout_d, dout_t, du, du_b, du_d, du_t, ddelta, ddelta_b, ddelta_d, ddelta_t,
        dz, dz_b, dz_d, dz_t, out, out_b, out_d, out_t, return_out,
        dlast, dlast_b, dlast_d, dlast_n, has_dlast, dinitial, dA, dB, dC, dD, dbias,
    ):  # fmt: skip
        """Compute the work items first <= item < after: a range of the tiles of one batch entry and group each."""
        channels = dim // groups
        tiles_a_group = (channels + LANES - 1) // LANES
        pieces = (seqlen + PIECE - 1) // PIECE
        kind = A2.dtype
        zero = kind.type(0)
        scratch = begin()
        hs = buffer(
            scratch, (PIECE + 1, dstate, LANES), A2
        )  # the state before each step of the piece, and after the last
        decays = buffer(scratch, (PIECE, dstate, LANES), A2)
        A_ = buffer(scratch, (dstate, LANES), A2)
        G = buffer(scratch, (dstate, LANES), A2)  # gradient of the state that enters the step after
        dA_ = buffer(scratch, (dstate, LANES), A2)
        Bb = buffer(scratch, (dstate, LANES), A2)
        Cb = buffer(scratch, (dstate, LANES), A2)
        dBb = buffer(scratch, (dstate, LANES), A2)
        dCb = buffer(scratch, (dstate, LANES), A2)
        ub = buffer(scratch, (PIECE, LANES), A2)
        xb = buffer(scratch, (PIECE, LANES), A2)
        db = buffer(scratch, (PIECE, LANES), A2)
        raw = buffer(scratch, (PIECE, LANES), A2)
        yb = buffer(scratch, (PIECE, LANES), A2)
        dyb = buffer(scratch, (PIECE, LANES), A2)
        zb = buffer(scratch, (PIECE, LANES), A2)
        dub = buffer(scratch, (PIECE, LANES), A2)
        ddb = buffer(scratch, (PIECE, LANES), A2)
        dx = buffer(scratch, LANES, A2)
        ddt = buffer(scratch, LANES, A2)
        lane_D = buffer(scratch, LANES, A2)
        lane_bias = buffer(scratch, LANES, A2)
        lane_dD = buffer(scratch, LANES, A2)
        lane_dbias = buffer(scratch, LANES, A2)
        for item in range(first, after):
            row = item // parts  # batch entry and group
            part = item % parts
            b = row // groups
            g = row % groups
            sums = item * seqlen * dstate
            for tile in range(tiles_a_group * part // parts, tiles_a_group * (part + 1) // parts):
                c0 = g * channels + tile * LANES
                lanes = least(LANES, (g + 1) * channels - c0)
                for lane in range(LANES):
                    lane_D[lane] = D[c0 + lane] if lane < lanes else 0
                    lane_bias[lane] = bias[c0 + lane] if lane < lanes else 0
                    lane_dD[lane] = 0
                    lane_dbias[lane] = 0
                for n in range(dstate):
                    for lane in range(LANES):
                        inside = lane < lanes
                        A_[n, lane] = A2[(c0 + lane) * dstate + n] if inside else 0
                        Bb[n, lane] = B[(c0 + lane) * B_t + n * B_n] if inside and not B_varies else 0
                        Cb[n, lane] = C[(c0 + lane) * C_t + n * C_n] if inside and not C_varies else 0
                        dA_[n, lane] = 0
                        dBb[n, lane] = 0
                        dCb[n, lane] = 0
                        G[n, lane] = (
                            dlast[b * dlast_b + (c0 + lane) * dlast_d + n * dlast_n] if has_dlast and inside else 0
                        )
                for piece in range(pieces - 1, -1, -1):
                    t0 = piece * PIECE
                    steps = least(PIECE, seqlen - t0)
                    load(u, b * u_b + c0 * u_d + t0 * u_t, u_d, u_t, lanes, steps, ub)
                    load(delta, b * delta_b + c0 * delta_d + t0 * delta_t, delta_d, delta_t, lanes, steps, raw)
                    load(dout, b * dout_b + c0 * dout_d + t0 * dout_t, dout_d, dout_t, lanes, steps, dyb)
                    _discretise(raw, steps, lane_bias, with_softplus, db)
                    for n in range(dstate):
                        for lane in range(LANES):
                            hs[0, n, lane] = (
                                checkpoints[((b * dim + c0 + lane) * pieces + piece) * dstate + n]
                                if lane < lanes
                                else 0
                            )
                    B0 = b * B_b + g * B_g + t0 * B_t
                    C0 = b * C_b + g * C_g + t0 * C_t
                    for t in range(steps):
                        for lane in range(LANES):
                            yb[t, lane] = lane_D[lane] * ub[t, lane]
                            xb[t, lane] = db[t, lane] * ub[t, lane]
                        for n in range(dstate):
                            Bn = B[B0 + t * B_t + n * B_n] if B_varies else zero
                            Cn = C[C0 + t * C_t + n * C_n] if C_varies else zero
                            for lane in range(LANES):
                                decay = exp2(db[t, lane] * A_[n, lane])
                                b_ = Bn if B_varies else Bb[n, lane]
                                value = decay * hs[t, n, lane] + xb[t, lane] * b_
                                decays[t, n, lane] = decay
                                hs[t + 1, n, lane] = value
                                yb[t, lane] += value * (Cn if C_varies else Cb[n, lane])
                    if has_z:
                        load(z, b * z_b + c0 * z_d + t0 * z_t, z_d, z_t, lanes, steps, zb)
                        for t in range(steps):
                            for lane in range(LANES):
                                gate = sigmoid(zb[t, lane])
                                silu = zb[t, lane] * gate
                                dsilu = dyb[t, lane] * yb[t, lane]
                                dyb[t, lane] *= silu
                                yb[t, lane] *= silu
                                zb[t, lane] = dsilu * gate * (1 + zb[t, lane] * (1 - gate))
                        store(zb, dz, b * dz_b + c0 * dz_d + t0 * dz_t, dz_d, dz_t, lanes, steps)
                    if return_out:
                        store(yb, out, b * out_b + c0 * out_d + t0 * out_t, out_d, out_t, lanes, steps)
                    for t in range(steps - 1, -1, -1):
                        for lane in range(LANES):
                            dx[lane] = 0
                            ddt[lane] = 0
                        for n in range(dstate):
                            Bn = B[B0 + t * B_t + n * B_n] if B_varies else zero
                            Cn = C[C0 + t * C_t + n * C_n] if C_varies else zero
                            sum_B = zero
                            sum_C = zero
                            for lane in range(LANES):
                                dy = dyb[t, lane]
                                dh = G[n, lane] + (Cn if C_varies else Cb[n, lane]) * dy
                                if C_varies:
                                    sum_C += dy * hs[t + 1, n, lane]
                                else:
                                    dCb[n, lane] += dy * hs[t + 1, n, lane]
                                if B_varies:
                                    sum_B += dh * xb[t, lane]
                                else:
                                    dBb[n, lane] += dh * xb[t, lane]
                                through = dh * decays[t, n, lane]
                                to_exponent = through * hs[t, n, lane]
                                G[n, lane] = through
                                dx[lane] += dh * (Bn if B_varies else Bb[n, lane])
                                ddt[lane] += to_exponent * A_[n, lane]
                                dA_[n, lane] += to_exponent * db[t, lane]
                            at = sums + (t0 + t) * dstate + n
                            if B_varies:
                                dB[at] += sum_B
                            if C_varies:
                                dC[at] += sum_C
                        for lane in range(LANES):
                            dub[t, lane] = dx[lane] * db[t, lane] + lane_D[lane] * dyb[t, lane]
                            lane_dD[lane] += dyb[t, lane] * ub[t, lane]
                            ddb[t, lane] = dx[lane] * ub[t, lane] + ddt[lane] * kind.type(LN2)
                    if with_softplus:
                        for t in range(steps):
                            for lane in range(LANES):
                                ddb[t, lane] *= sigmoid(raw[t, lane])
                    for t in range(steps):
                        for lane in range(LANES):
                            lane_dbias[lane] += ddb[t, lane]
                    store(dub, du, b * du_b + c0 * du_d + t0 * du_t, du_d, du_t, lanes, steps)
                    store(ddb, ddelta, b * ddelta_b + c0 * ddelta_d + t0 * ddelta_t, ddelta_d, ddelta_t, lanes, steps)
                for lane in range(lanes):
                    channel = b * dim + c0 + lane
                    dD[channel] = lane_dD[lane]
                    dbias[channel] = lane_dbias[lane]
                    for n in range(dstate):
                        dA[channel * dstate + n] = dA_[n, lane]
                        if not B_varies:
                            dB[channel * dstate + n] = dBb[n, lane]
                        if not C_varies:
                            dC[channel * dstate + n] = dCb[n, lane]
                        dinitial[channel * dstate + n] = G[n, lane]
        end(scratch)

    return backward
