"""Causal convolution on the CPU, two ways; both read x once and write the output once (the floor).

Rows: where a channel's steps lie side by side, a work item is one channel of one batch entry and lanes are its steps: every tap
is one multiply-add of the row with itself, shifted. No copy, no transpose.

Tiles: any other layout, and packed sequences. A work item is LANES channels of one batch entry. A block of steps (and the
width - 1 before it) is brought into a (step, lane) buffer, every tap is one multiply-add with channels in parallel, and the
block is put back; a packed sequence's boundary is one comparison a step and tap.

Backward: the pre-activation again, its gradient in a buffer, then dx, the filter's gradient (per batch entry, added in order),
and the initial states'. Tiles go from the last block to the first and keep the width - 1 steps that the block before needs.
"""

from __future__ import annotations

from typing import Any

import torch

from anymamba.backends.cpu._causal_conv1d_update import causal_conv1d_update, prepare
from anymamba.backends.cpu._compile import inline, kernel
from anymamba.backends.cpu._device import refusal
from anymamba.backends.cpu._math import least, most, sigmoid
from anymamba.backends.cpu._scratch import begin, buffer, end
from anymamba.backends.cpu._tiles import LANES, like, load, store, vector
from anymamba.backends.cpu._tuning import BLOCKS, tunable
from anymamba.backends.torch.causal_conv1d import (
    causal_conv1d_varlen_states,
    final_states,
    kept_at_end,
)
from anymamba.machine.memory import empty_like

__all__ = [
    "causal_conv1d_backward",
    "causal_conv1d_forward",
    "causal_conv1d_update",
    "causal_conv1d_varlen_states",
    "prepare",
    "refusal",
]

BLOCK = 128  # steps transposed at a time, unless tuned
STEPS_A_THREAD = 1 << 15  # 10 us of work: fewer cost more to hand over than to do
_BLOCK = "steps transposed into a tile at a time: long ones amortise what a block costs, short ones stay in the cache"
FORWARD_ROWS = tunable("causal_conv1d forward, rows", __name__)
BACKWARD_ROWS = tunable("causal_conv1d backward, rows", __name__)
FORWARD = tunable("causal_conv1d forward", __name__, block=BLOCK, blocks=BLOCKS, meaning=_BLOCK)
BACKWARD = tunable("causal_conv1d backward", __name__, block=BLOCK, blocks=BLOCKS, meaning=_BLOCK)


def causal_conv1d_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    silu: bool,
    return_final_states: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `anymamba.ops.causal_conv1d.CausalConv1dBackend`."""
    batch, dim, seqlen = x.shape
    width = weight.shape[1]
    work = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    x_ = x.to(work)
    out = empty_like(x, work)
    arguments = _arguments(x_, weight, bias, seq_idx, initial_states)

    by_rows = _by_rows(seq_idx, x_, out)
    how = (FORWARD_ROWS if by_rows else FORWARD).settings(x_.element_size(), batch * dim, seqlen)

    arguments += [out, *out.stride()]
    if by_rows:
        _forward_rows.over(
            batch * dim, dim, seqlen, width, silu, *arguments,
            at_least=how.at_least(_rows_a_thread(seqlen)), most=how.threads,
        )  # fmt: skip
    else:
        _forward.over(
            batch * -(-dim // LANES), how.block, dim, seqlen, width, silu, *arguments,
            at_least=how.at_least(-(-_rows_a_thread(seqlen) // LANES)), most=how.threads,
        )  # fmt: skip
    return like(x, out), final_states(x, width, seq_idx, initial_states) if return_final_states else None


def causal_conv1d_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dout: torch.Tensor,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    silu: bool,
    *,
    dx_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """See `anymamba.ops.causal_conv1d.CausalConv1dBackend`."""
    batch, dim, seqlen = x.shape
    width = weight.shape[1]
    work = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    x_, dout_ = x.to(work), dout.to(work)
    dx = empty_like(x, work)
    dweight = torch.zeros(batch, dim, width, dtype=work)
    dbias = torch.zeros(batch, dim, dtype=work)
    dinitial = torch.zeros(batch, dim, width - 1, dtype=work)
    arguments = _arguments(x_, weight, bias, seq_idx, initial_states)

    arguments += [dout_, *dout_.stride(), dx, *dx.stride(), dweight, dbias, dinitial]

    by_rows = _by_rows(seq_idx, x_, dout_, dx)
    how = (BACKWARD_ROWS if by_rows else BACKWARD).settings(x_.element_size(), batch * dim, seqlen)
    if by_rows:
        _backward_rows.over(
            batch * dim, dim, seqlen, width, silu, *arguments,
            at_least=how.at_least(_rows_a_thread(seqlen)), most=how.threads,
        )  # fmt: skip
    else:
        _backward.over(
            batch * -(-dim // LANES), how.block, dim, seqlen, width, silu, *arguments,
            at_least=how.at_least(-(-_rows_a_thread(seqlen) // LANES)), most=how.threads,
        )  # fmt: skip
    if dfinal_states is not None:
        dlast = dfinal_states.to(work)
        if seq_idx is not None and seqlen:
            dlast = dlast * kept_at_end(seq_idx, width)
        from_x = min(width - 1, seqlen)
        if from_x:
            dx[..., seqlen - from_x :] += dlast[..., width - 1 - from_x :]
        if width - 1 > seqlen:
            dinitial[..., seqlen:] += dlast[..., : width - 1 - seqlen]
    return (
        like(x, dx) if dx_out is None else dx_out.copy_(dx),
        like(weight, dweight.sum(0)),
        None if bias is None else like(bias, dbias.sum(0)),
        None if initial_states is None else like(initial_states, dinitial),
    )


def _by_rows(seq_idx: torch.Tensor | None, *tensors: torch.Tensor) -> bool:
    """Return whether every channel's steps lie side by side, and belong to one sequence."""
    return seq_idx is None and all(tensor.stride(2) == 1 for tensor in tensors)


def _rows_a_thread(seqlen: int) -> int:
    """Return how many channels are worth waking a thread for."""
    return -(-STEPS_A_THREAD // max(seqlen, 1))


def _arguments(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
) -> list[Any]:
    states = x if initial_states is None else initial_states.to(x.dtype)
    owner = torch.zeros(0, dtype=torch.int64) if seq_idx is None else seq_idx.to(torch.int64).contiguous()
    return [
        x, *x.stride(), weight.to(x.dtype).contiguous(), vector(bias, x.shape[1], x),
        owner, seq_idx is not None, states, *states.stride(), initial_states is not None,
    ]  # fmt: skip


@inline
def _step(v, silu):
    return v * sigmoid(v) if silu else v


@inline
def _at(xr, t, state, s_k, has_states, reach):
    """Return column t of a row, which lies in the initial states (or is zero) where t is negative."""
    if t >= 0:
        return xr[t]
    if has_states:
        return state[(t + reach) * s_k]
    return xr.dtype.type(0)


@kernel
def _forward_rows(
    first, after, dim, seqlen, width, silu, x, x_b, x_d, x_t, weight, bias, owner, has_owner,
    states, s_b, s_d, s_k, has_states, out, out_b, out_d, out_t,
):  # fmt: skip
    """Compute the channels first <= row < after; x_t and out_t are 1, and has_owner is False."""
    reach = width - 1
    head = least(reach, seqlen)
    n = seqlen - head
    for row in range(first, after):
        b = row // dim
        d = row % dim
        xr = x[b * x_b + d * x_d : b * x_b + d * x_d + seqlen]
        yr = out[b * out_b + d * out_d : b * out_b + d * out_d + seqlen]
        w = weight[d * width : d * width + width]
        state = states[b * s_b + d * s_d :]
        c = bias[d]
        for t in range(head):
            v = c
            for k in range(width):
                v += w[k] * _at(xr, t - reach + k, state, s_k, has_states, reach)
            yr[t] = _step(v, silu)
        y = yr[head:]
        if width == 4:
            w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
            x0, x1, x2, x3 = xr[:n], xr[1 : n + 1], xr[2 : n + 2], xr[3 : n + 3]
            if silu:
                for t in range(n):
                    v = c + w0 * x0[t] + w1 * x1[t] + w2 * x2[t] + w3 * x3[t]
                    y[t] = v * sigmoid(v)
            else:
                for t in range(n):
                    y[t] = c + w0 * x0[t] + w1 * x1[t] + w2 * x2[t] + w3 * x3[t]
        else:
            for t in range(n):
                y[t] = c
            for k in range(width):
                wk = w[k]
                xk = xr[k : k + n]
                for t in range(n):
                    y[t] += wk * xk[t]
            if silu:
                for t in range(n):
                    y[t] *= sigmoid(y[t])


@kernel
def _backward_rows(
    first, after, dim, seqlen, width, silu, x, x_b, x_d, x_t, weight, bias, owner, has_owner,
    states, s_b, s_d, s_k, has_states, dout, dout_b, dout_d, dout_t, dx, dx_b, dx_d, dx_t, dweight, dbias, dinitial,
):  # fmt: skip
    """Compute the channels first <= row < after; x_t, dout_t and dx_t are 1, and has_owner is False."""
    reach = width - 1
    head = least(reach, seqlen)
    n = seqlen - head
    scratch = begin()
    dy = buffer(scratch, seqlen + reach, x)  # zeros follow: no output lies behind the last
    dy[seqlen:] = 0
    zero = dy.dtype.type(0)
    for row in range(first, after):
        b = row // dim
        d = row % dim
        xr = x[b * x_b + d * x_d : b * x_b + d * x_d + seqlen]
        dr = dout[b * dout_b + d * dout_d : b * dout_b + d * dout_d + seqlen]
        dxr = dx[b * dx_b + d * dx_d : b * dx_b + d * dx_d + seqlen]
        w = weight[d * width : d * width + width]
        dw = dweight[row * width : row * width + width]
        state = states[b * s_b + d * s_d :]
        c = bias[d]
        if silu:
            for t in range(head):
                v = c
                for k in range(width):
                    v += w[k] * _at(xr, t - reach + k, state, s_k, has_states, reach)
                gate = sigmoid(v)
                dy[t] = dr[t] * gate * (1 + v * (1 - gate))
            y, dn = dy[head:seqlen], dr[head:]
            if width == 4:
                w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
                x0, x1, x2, x3 = xr[:n], xr[1 : n + 1], xr[2 : n + 2], xr[3 : n + 3]
                for t in range(n):
                    v = c + w0 * x0[t] + w1 * x1[t] + w2 * x2[t] + w3 * x3[t]
                    gate = sigmoid(v)
                    y[t] = dn[t] * gate * (1 + v * (1 - gate))
            else:
                for t in range(n):
                    y[t] = c
                for k in range(width):
                    wk = w[k]
                    xk = xr[k : k + n]
                    for t in range(n):
                        y[t] += wk * xk[t]
                for t in range(n):
                    gate = sigmoid(y[t])
                    y[t] = dn[t] * gate * (1 + y[t] * (1 - gate))
        else:
            for t in range(seqlen):
                dy[t] = dr[t]
        for k in range(width):
            total = zero
            for t in range(head):
                total += dy[t] * _at(xr, t - reach + k, state, s_k, has_states, reach)
            dw[k] = total
        total = zero
        if width == 4:
            w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
            y0, y1, y2, y3 = dy[:seqlen], dy[1 : seqlen + 1], dy[2 : seqlen + 2], dy[3 : seqlen + 3]
            for t in range(seqlen):
                total += y0[t]
                dxr[t] = w3 * y0[t] + w2 * y1[t] + w1 * y2[t] + w0 * y3[t]
            d0, d1, d2, d3 = zero, zero, zero, zero
            x0, x1, x2, x3 = xr[:n], xr[1 : n + 1], xr[2 : n + 2], xr[3 : n + 3]
            y = dy[head:seqlen]
            for t in range(n):
                d0 += y[t] * x0[t]
                d1 += y[t] * x1[t]
                d2 += y[t] * x2[t]
                d3 += y[t] * x3[t]
            dw[0] += d0
            dw[1] += d1
            dw[2] += d2
            dw[3] += d3
        else:
            for t in range(seqlen):
                total += dy[t]
                dxr[t] = 0
            for k in range(width):
                wk = w[k]
                yk = dy[reach - k : reach - k + seqlen]
                for t in range(seqlen):
                    dxr[t] += wk * yk[t]
                y = dy[head:seqlen]
                xk = xr[k : k + n]
                dk = zero
                for t in range(n):
                    dk += y[t] * xk[t]
                dw[k] += dk
        dbias[row] = total
        if has_states:
            for j in range(reach):
                total = zero
                for k in range(j + 1):
                    if j - k < seqlen:
                        total += w[k] * dy[j - k]
                dinitial[row * reach + j] = total
    end(scratch)


@inline
def _window(
    x, x_b, x_d, x_t, states, s_b, s_d, s_k, has_states, b, c0, lanes, t0, steps, width, xb,
):  # fmt: skip
    """Load columns t0 - (width - 1) <= t < t0 + steps into xb, from the initial states or zero before the first."""
    for k in range(width - 1):
        t = t0 - (width - 1) + k
        for lane in range(LANES):
            if lane >= lanes:
                xb[k, lane] = 0
            elif t >= 0:
                xb[k, lane] = x[b * x_b + (c0 + lane) * x_d + t * x_t]
            elif has_states:
                xb[k, lane] = states[b * s_b + (c0 + lane) * s_d + (t + width - 1) * s_k]
            else:
                xb[k, lane] = 0
    load(x, b * x_b + c0 * x_d + t0 * x_t, x_d, x_t, lanes, steps, xb[width - 1 :])


@inline
def _convolve(xb, w, lane_bias, owner, has_owner, row, t0, steps, width, yb):
    """Write the pre-activation of a block into yb."""
    if width == 4 and not has_owner:  # one pass instead of a read and a write a tap: 4x faster for the usual width
        for t in range(steps):
            for lane in range(LANES):
                yb[t, lane] = (
                    lane_bias[lane]
                    + w[0, lane] * xb[t, lane]
                    + w[1, lane] * xb[t + 1, lane]
                    + w[2, lane] * xb[t + 2, lane]
                    + w[3, lane] * xb[t + 3, lane]
                )
        return
    for t in range(steps):
        for lane in range(LANES):
            yb[t, lane] = lane_bias[lane]
        for k in range(width):
            before = t0 + t - (width - 1 - k)
            if not has_owner or owner[row + most(before, 0)] == owner[row + t0 + t]:
                for lane in range(LANES):
                    yb[t, lane] += w[k, lane] * xb[t + k, lane]


@inline
def _gradients(
    xb, dyb, w, owner, has_owner, row, t0, steps, width, seqlen, dxb, dw, db,
):  # fmt: skip
    """Write dx of a block into dxb, and add to the filter's and the bias's gradients."""
    reach = width - 1
    if width == 4 and not has_owner:
        for t in range(steps):
            for lane in range(LANES):
                dy = dyb[t, lane]
                db[lane] += dy
                dw[0, lane] += dy * xb[t, lane]
                dw[1, lane] += dy * xb[t + 1, lane]
                dw[2, lane] += dy * xb[t + 2, lane]
                dw[3, lane] += dy * xb[t + 3, lane]
                dxb[t, lane] = (
                    w[3, lane] * dy
                    + w[2, lane] * dyb[t + 1, lane]
                    + w[1, lane] * dyb[t + 2, lane]
                    + w[0, lane] * dyb[t + 3, lane]
                )
        return
    for t in range(steps):
        for lane in range(LANES):
            db[lane] += dyb[t, lane]
            dxb[t, lane] = 0
        for k in range(width):
            shift = reach - k
            before = most(t0 + t - shift, 0)
            if not has_owner or owner[row + before] == owner[row + t0 + t]:
                for lane in range(LANES):
                    dw[k, lane] += dyb[t, lane] * xb[t + k, lane]
            behind = least(t0 + t + shift, seqlen - 1)
            if not has_owner or owner[row + behind] == owner[row + t0 + t]:
                for lane in range(LANES):
                    dxb[t, lane] += w[k, lane] * dyb[t + shift, lane]


@inline
def _filter(weight, bias, c0, lanes, width, w, lane_bias):
    for lane in range(LANES):
        inside = lane < lanes
        lane_bias[lane] = bias[c0 + lane] if inside else 0
        for k in range(width):
            w[k, lane] = weight[(c0 + lane) * width + k] if inside else 0


@kernel
def _forward(
    first, after, block, dim, seqlen, width, silu, x, x_b, x_d, x_t, weight, bias, owner, has_owner,
    states, s_b, s_d, s_k, has_states, out, out_b, out_d, out_t,
):  # fmt: skip
    """Compute the tiles first <= tile < after."""
    tiles = (dim + LANES - 1) // LANES
    scratch = begin()
    xb = buffer(scratch, (block + width - 1, LANES), x)
    yb = buffer(scratch, (block, LANES), x)
    w = buffer(scratch, (width, LANES), x)
    lane_bias = buffer(scratch, LANES, x)
    for tile in range(first, after):
        b = tile // tiles
        c0 = tile % tiles * LANES
        lanes = least(LANES, dim - c0)
        _filter(weight, bias, c0, lanes, width, w, lane_bias)
        row = b * seqlen
        for t0 in range(0, seqlen, block):
            steps = least(block, seqlen - t0)
            _window(x, x_b, x_d, x_t, states, s_b, s_d, s_k, has_states, b, c0, lanes, t0, steps, width, xb)
            _convolve(xb, w, lane_bias, owner, has_owner, row, t0, steps, width, yb)
            if silu:
                for t in range(steps):
                    for lane in range(LANES):
                        yb[t, lane] *= sigmoid(yb[t, lane])
            if has_owner:
                for t in range(steps):
                    if owner[row + t0 + t] < 0:
                        for lane in range(LANES):
                            yb[t, lane] = 0
            store(yb, out, b * out_b + c0 * out_d + t0 * out_t, out_d, out_t, lanes, steps)
    end(scratch)


@kernel
def _backward(
    first, after, block, dim, seqlen, width, silu, x, x_b, x_d, x_t, weight, bias, owner, has_owner,
    states, s_b, s_d, s_k, has_states, dout, dout_b, dout_d, dout_t, dx, dx_b, dx_d, dx_t, dweight, dbias, dinitial,
):  # fmt: skip
    """Compute the tiles first <= tile < after."""
    tiles = (dim + LANES - 1) // LANES
    reach = width - 1
    scratch = begin()
    xb = buffer(scratch, (block + reach, LANES), x)
    yb = buffer(scratch, (block, LANES), x)
    dyb = buffer(scratch, (block + reach, LANES), x)  # the block's, then the first of the block after
    dxb = buffer(scratch, (block, LANES), x)
    w = buffer(scratch, (width, LANES), x)
    dw = buffer(scratch, (width, LANES), x)
    lane_bias = buffer(scratch, LANES, x)
    db = buffer(scratch, LANES, x)
    for tile in range(first, after):
        b = tile // tiles
        c0 = tile % tiles * LANES
        lanes = least(LANES, dim - c0)
        _filter(weight, bias, c0, lanes, width, w, lane_bias)
        dw[:] = 0
        db[:] = 0
        row = b * seqlen
        for t0 in range((seqlen - 1) // block * block, -1, -block):
            steps = least(block, seqlen - t0)
            following = least(reach, seqlen - t0 - steps)
            for k in range(following):  # still in place: the block after wrote them at the start of the buffer
                for lane in range(LANES):
                    dxb[k, lane] = dyb[k, lane]
            for k in range(reach):
                for lane in range(LANES):
                    dyb[steps + k, lane] = dxb[k, lane] if k < following else 0
            _window(x, x_b, x_d, x_t, states, s_b, s_d, s_k, has_states, b, c0, lanes, t0, steps, width, xb)
            load(dout, b * dout_b + c0 * dout_d + t0 * dout_t, dout_d, dout_t, lanes, steps, dyb)
            if silu:
                _convolve(xb, w, lane_bias, owner, has_owner, row, t0, steps, width, yb)
                for t in range(steps):
                    for lane in range(LANES):
                        gate = sigmoid(yb[t, lane])
                        dyb[t, lane] *= gate * (1 + yb[t, lane] * (1 - gate))
            if has_owner:
                for t in range(steps):
                    if owner[row + t0 + t] < 0:
                        for lane in range(LANES):
                            dyb[t, lane] = 0
            _gradients(xb, dyb, w, owner, has_owner, row, t0, steps, width, seqlen, dxb, dw, db)
            store(dxb, dx, b * dx_b + c0 * dx_d + t0 * dx_t, dx_d, dx_t, lanes, steps)
        if has_states:
            for j in range(reach):
                for k in range(least(j + 1, width)):
                    t = j - k
                    if t < seqlen and (not has_owner or owner[row + t] == owner[row]):
                        for lane in range(lanes):
                            dinitial[(b * dim + c0 + lane) * reach + j] += w[k, lane] * dyb[t, lane]
        for lane in range(lanes):
            dbias[b * dim + c0 + lane] = db[lane]
            for k in range(width):
                dweight[(b * dim + c0 + lane) * width + k] = dw[k, lane]
    end(scratch)
