"""Selective scan on the GPU: picks the kernels' shape for the sizes at hand, and launches them.

The kernels' files say how they work and what bounds them. What is decided here: how many lanes share a channel, how long a
tile is, and into how many segments time is cut when there are too few channels to fill the card.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from anymamba.backends import Operator, tuned
from anymamba.backends.cuda import _tuning, device_refusal
from anymamba.backends.cuda.runtime import Plan, Variant, cached, runtime
from anymamba.ops.selective_scan import CHECKPOINT_LENGTH, Gradients

__all__ = [
    "BackwardShape",
    "ForwardShape",
    "prepare",
    "refusal",
    "selective_scan_backward",
    "selective_scan_forward",
    "variants",
]

SIZES = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}
NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
MOST_STATES = 256
CHECKS_ALIGNMENT = True  # of calls that it prepared; see anymamba.ops._prepared
FORWARD, BACKWARD, SUMS = "selective_scan_forward", "selective_scan_backward", "selective_scan_sums"


class Key(NamedTuple):
    """What a launch depends on of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    misalignment: int  # of its first element, from 16 bytes


class LaunchPlan(NamedTuple):
    """The launches of one call, in order, and what they need."""

    launches: tuple[Plan, ...]
    folded: int  # floats for what segments hand on: their states, then their sums of d
    deltas_at: int  # bytes from the first to the second
    slices: int = 1  # of the sums over blocks of dB and dC
    vector_slices: int = 1  # of those of dA, dD, ddelta_bias


class ForwardShape(NamedTuple):
    """Macros of the forward kernel; see selective_scan_forward.cu."""

    lanes: int
    states: int
    vector: int
    threads: int
    min_blocks: int
    matrix_buffers: int
    each: int = 1

    @property
    def channels(self) -> int:
        """Return the channels of a block."""
        return self.threads // self.lanes * self.each

    def shared_bytes(self, state_only: bool) -> int:
        row = self.vector * self.lanes + 4
        matrices = 1 if state_only else 2
        return 4 * row * (2 * self.channels + self.matrix_buffers * matrices * self.states)


class BackwardShape(NamedTuple):
    """Macros of the backward kernel; see selective_scan_backward.cu."""

    lanes: int
    states: int
    vector: int
    threads: int
    min_blocks: int
    tile: int
    block: int

    @property
    def channels(self) -> int:
        """Return the channels of a block."""
        return self.threads // self.lanes

    def shared_bytes(self) -> int:
        warps = self.threads // 32
        rows = 3 * self.channels + 2 * self.states * (1 if warps == 1 else 1 + warps)
        kept = CHECKPOINT_LENGTH // self.block * self.threads * (self.states // self.lanes)
        return 4 * ((self.tile + 4) * rows + kept)


def refusal(operator: Operator, call: Any) -> str | None:
    """Return None, or why these kernels cannot do the call."""
    reason = device_refusal(call.device)
    if reason is not None:
        return reason
    if call.dtype not in NAMES:
        return f"u is {call.dtype}; the kernels take fp32, fp16 and bf16"
    if call.A_dtype != torch.float32:
        return f"A is {call.A_dtype}; the kernels take real fp32 states"
    if not (call.B_varies and call.C_varies):
        return "B or C is constant in time; the kernels take (batch, groups, dstate, seqlen)"
    if not 1 <= call.dstate <= MOST_STATES:
        return f"dstate is {call.dstate}; the kernels take 1 to {MOST_STATES}"
    needed = backward_shape(call.dstate).shared_bytes()
    limit = _shared_limit(call.device.index if call.device.index is not None else -1)
    if needed > limit:
        return f"dstate {call.dstate} needs {needed} bytes of shared memory a block; this card has {limit}"
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
    dstate = A.shape[1]
    pieces = -(-seqlen // CHECKPOINT_LENGTH)
    out = torch.empty_like(delta)
    last_state = A.new_empty((batch, dim, dstate))
    checkpoints = A.new_empty((batch, dim, pieces, dstate)) if save else None
    if u.numel() == 0:
        last_state.zero_() if initial_state is None else last_state.copy_(initial_state)
        return out, last_state, checkpoints
    _forward(None, 0, u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, out, last_state, checkpoints)
    return out, last_state, checkpoints


def prepare(
    operator: Operator, arguments: tuple[Any, ...]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor] | None] | None:
    """Return a function that does forward calls like this one, or None; see `anymamba.ops._prepared`."""
    u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state = arguments
    if u.numel() == 0 or D is not _contiguous(D) or delta_bias is not _contiguous(delta_bias):
        return None
    plan = _forward_plan(
        None, 0, _key(u), _key(delta), _key(A), _key(B), _key(C), _key(z), _key(initial_state),
        _key(torch.empty_like(delta)), delta_softplus, u.get_device(),
    )  # fmt: skip
    state_shape = (u.shape[0], *A.shape)
    given = (u, delta, A, B, C, D, z, delta_bias, initial_state)
    beyond = 0 if any(tensor is not None and tensor.data_ptr() & 15 for tensor in given) else 15

    def call(
        u: torch.Tensor, delta: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor | None,
        z: torch.Tensor | None, delta_bias: torch.Tensor | None, initial_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
        at = (
            u.data_ptr(), delta.data_ptr(), 0 if z is None else z.data_ptr(), B.data_ptr(), C.data_ptr(), A.data_ptr(),
            0 if D is None else D.data_ptr(), 0 if delta_bias is None else delta_bias.data_ptr(),
            0 if initial_state is None else initial_state.data_ptr(),
        )  # fmt: skip
        if (at[0] | at[1] | at[2] | at[3] | at[4] | at[5] | at[6] | at[7] | at[8]) & beyond:
            return None
        out, last_state = torch.empty_like(delta), A.new_empty(state_shape)
        states = deltas = 0
        if plan.folded:
            folded = A.new_empty(plan.folded)
            states, deltas = folded.data_ptr(), folded.data_ptr() + plan.deltas_at
        for launch in plan.launches:
            launch(*at, out.data_ptr(), last_state.data_ptr(), 0, states, deltas)
        return out, last_state

    return call


def _forward(
    shape: ForwardShape | None,
    segments: int,
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
    out: torch.Tensor,
    last_state: torch.Tensor,
    checkpoints: torch.Tensor | None,
) -> None:
    """Launch the forward; with `shape` and `segments` not the usual ones but these."""
    D, delta_bias = _contiguous(D), _contiguous(delta_bias)
    plan = _forward_plan(
        shape, segments, _key(u), _key(delta), _key(A), _key(B), _key(C), _key(z), _key(initial_state), _key(out),
        delta_softplus, u.get_device(),
    )  # fmt: skip
    _launch_forward(plan, u, delta, A, B, C, D, z, delta_bias, initial_state, out, last_state, checkpoints)


def _launch_forward(
    plan: LaunchPlan, u: torch.Tensor, delta: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    D: torch.Tensor | None, z: torch.Tensor | None, delta_bias: torch.Tensor | None, initial_state: torch.Tensor | None,
    out: torch.Tensor, last_state: torch.Tensor, checkpoints: torch.Tensor | None,
) -> None:  # fmt: skip
    states = deltas = 0
    if plan.folded:
        folded = A.new_empty(plan.folded)
        states, deltas = folded.data_ptr(), folded.data_ptr() + plan.deltas_at
    for launch in plan.launches:
        launch(
            u.data_ptr(), delta.data_ptr(), _pointer(z), B.data_ptr(), C.data_ptr(), A.data_ptr(), _pointer(D),
            _pointer(delta_bias), _pointer(initial_state), out.data_ptr(), last_state.data_ptr(), _pointer(checkpoints),
            states, deltas,
        )  # fmt: skip


@cached
def _forward_plan(
    shape: ForwardShape | None, segments: int, u: Key, delta: Key, A: Key, B: Key, C: Key, z: Key | None,
    initial_state: Key | None, out: Key, softplus: bool, device: int,
) -> LaunchPlan:  # fmt: skip
    """Return the launches for tensors of this metadata."""
    batch, dim, seqlen = u.shape
    dstate, groups = A.shape[1], B.shape[1]
    size, group_dim = SIZES[u.dtype], dim // groups
    if shape is None:
        shape, segments = forward_shape(dstate, size, batch * groups, group_dim, seqlen, device)
    group_blocks = -(-group_dim // shape.channels)
    segments, segment_length = _cut(seqlen, segments)
    vector, matrix_vector = shape.vector, min(16 // size, shape.vector * shape.lanes)
    flags = [_packed(key, vector) for key in (u, delta, z, out)]
    matrix_flags = [_packed(key, matrix_vector) for key in (B, C)]
    packed = seqlen % vector == 0 and all(flags)
    matrix_packed = seqlen % matrix_vector == 0 and all(matrix_flags)
    values = (
        *u.stride, *delta.stride, *_strides(z), *out.stride, *B.stride, *C.stride, *A.stride, *_strides(initial_state),
        dim, group_dim, group_blocks, seqlen, dstate, -(-seqlen // CHECKPOINT_LENGTH), segments, segment_length,
        *flags, *matrix_flags,
    )  # fmt: skip
    blocks, block = batch * groups * group_blocks, (shape.threads, 1, 1)
    launches = []
    for state_only in (True, False) if segments > 1 else (False,):
        variant = _forward_variant(shape, NAMES[u.dtype], z is not None, softplus, packed, matrix_packed, state_only)
        kernel = runtime().load(variant, device)
        grid = (blocks, segments - state_only, 1)
        launches.append(kernel.plan(grid, block, shape.shared_bytes(state_only), *values))
    sequences = batch * dim * segments if segments > 1 else 0
    return LaunchPlan(tuple(launches), sequences * (dstate + 1), 4 * sequences * dstate)


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
    """See `anymamba.ops.selective_scan.SelectiveScanBackend`. dB and dC are sums over blocks by atomic additions, whose
    order, and so the last bits, differ between runs; under `torch.use_deterministic_algorithms(True)` they do not.
    """
    du, ddelta = torch.empty_like(u), torch.empty_like(delta)
    dz = None if z is None else torch.empty_like(z) if dz_out is None else dz_out
    dinitial = None if initial_state is None else torch.empty_like(initial_state, memory_format=torch.contiguous_format)
    out = None
    if u.numel() == 0:
        zeros = [None if tensor is None else torch.zeros_like(tensor) for tensor in (A, B, C, D, delta_bias)]
        if dinitial is not None:
            dinitial.zero_() if dlast_state is None else dinitial.copy_(dlast_state)
        if return_out:
            out = torch.empty_like(delta)
        for given in (dB_out, dC_out):
            if given is not None:
                given.zero_()
        return du, ddelta, zeros[0], zeros[1], zeros[2], zeros[3], dz, zeros[4], dinitial, out  # type: ignore[return-value]
    if checkpoints is None or (return_out and z is None):
        out, _, checkpoints = selective_scan_forward(
            u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, True
        )
        assert checkpoints is not None
        if not return_out:
            out = None
    out_here = torch.empty_like(delta) if return_out and out is None else None
    dA, dB, dC, dD, dbias = _backward(
        None, 0, u, delta, A, B, C, D, z, delta_bias, delta_softplus, checkpoints, dout, dlast_state, du, ddelta, dz,
        dinitial, out_here, dB_out, dC_out,
    )  # fmt: skip
    return du, ddelta, dA, dB, dC, dD, dz, dbias, dinitial, out if out_here is None else out_here


def _backward(
    shape: BackwardShape | None,
    segments: int,
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    checkpoints: torch.Tensor,
    dout: torch.Tensor,
    dlast_state: torch.Tensor | None,
    du: torch.Tensor,
    ddelta: torch.Tensor,
    dz: torch.Tensor | None,
    dinitial: torch.Tensor | None,
    out: torch.Tensor | None,
    dB_out: torch.Tensor | None = None,
    dC_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Launch the backward; with `shape` and `segments` not the usual ones but these."""
    batch, dim, seqlen = u.shape
    dstate, groups = A.shape[1], B.shape[1]
    device = u.get_device()
    D, delta_bias = _contiguous(D), _contiguous(delta_bias)
    if dout.dtype != u.dtype or dout.stride(-1) != 1:  # e.g. the expanded gradient of a sum
        dout = torch.empty_like(u, memory_format=torch.contiguous_format).copy_(dout)
    ordered = torch.are_deterministic_algorithms_enabled()
    plan = _backward_plan(
        shape, segments, _key(u), _key(delta), _key(A), _key(B), _key(C), _key(z), _key(dout), _key(dlast_state), _key(du),
        _key(ddelta), _key(dz), _key(out), delta_softplus, ordered, device,
    )  # fmt: skip
    sums = A.new_empty((2, plan.slices, batch, groups, dstate, seqlen))
    vectors = (A, D, delta_bias)
    if ordered:  # a slice for each block, every element of which is written; summed below
        sum_A, sum_D, sum_bias = (None if t is None else A.new_empty((plan.vector_slices, *t.shape)) for t in vectors)
    else:
        contiguous = torch.contiguous_format
        sum_A, sum_D, sum_bias = (None if t is None else torch.empty_like(t, memory_format=contiguous) for t in vectors)
        clear = _clear_plan(
            sums.numel(), dim * dstate, 0 if D is None else dim, 0 if delta_bias is None else dim, device
        )
        clear(sums.data_ptr(), _pointer(sum_A), _pointer(sum_D), _pointer(sum_bias), 0)
    assert sum_A is not None
    carries = deltas = 0
    if plan.folded:
        folded = A.new_empty(plan.folded)
        carries, deltas = folded.data_ptr(), folded.data_ptr() + plan.deltas_at
    for launch in plan.launches:
        launch(
            u.data_ptr(), delta.data_ptr(), _pointer(z), B.data_ptr(), C.data_ptr(), dout.data_ptr(), A.data_ptr(),
            _pointer(D), _pointer(delta_bias), checkpoints.data_ptr(), _pointer(dlast_state), du.data_ptr(),
            ddelta.data_ptr(), _pointer(dz), _pointer(out), sums.data_ptr(), sums.data_ptr() + 2 * sums.numel(),
            sum_A.data_ptr(), _pointer(sum_D), _pointer(sum_bias), _pointer(dinitial), carries, deltas,
        )  # fmt: skip
    if ordered:
        sum_A, sum_D, sum_bias = (None if tensor is None else tensor.sum(0) for tensor in (sum_A, sum_D, sum_bias))
        sums = sums.sum(1, keepdim=True) if plan.slices > 1 else sums
        assert sum_A is not None
    dA = sum_A if A.is_contiguous() else torch.empty_like(A).copy_(sum_A)
    if B.dtype == torch.float32 and B.is_contiguous() and C.is_contiguous() and dB_out is None and dC_out is None:
        return dA, sums[0, 0], sums[1, 0], sum_D, sum_bias
    dB = torch.empty_like(B) if dB_out is None else dB_out
    dC = torch.empty_like(C) if dC_out is None else dC_out
    finish = _finish_plan(B.dtype, dB.stride(), dC.stride(), B.shape, device)
    finish(sums.data_ptr(), dB.data_ptr(), dC.data_ptr())
    return dA, dB, dC, sum_D, sum_bias


@cached
def _backward_plan(
    shape: BackwardShape | None, segments: int, u: Key, delta: Key, A: Key, B: Key, C: Key, z: Key | None, dout: Key,
    dlast_state: Key | None, du: Key, ddelta: Key, dz: Key | None, out: Key | None, softplus: bool, ordered: bool,
    device: int,
) -> LaunchPlan:  # fmt: skip
    """Return the launches for tensors of this metadata."""
    batch, dim, seqlen = u.shape
    dstate, groups = A.shape[1], B.shape[1]
    group_dim = dim // groups
    if shape is None:
        shape, segments = tuned_backward_shape(dstate, SIZES[u.dtype], batch * groups, group_dim, seqlen, device)
    group_blocks = -(-group_dim // shape.channels)
    segments, segment_length = _cut(seqlen, segments)
    vector, matrix_vector = shape.vector, min(16 // SIZES[u.dtype], shape.tile)
    flags = [_packed(key, vector) for key in (u, delta, z, dout, du, ddelta, dz, out)]
    matrix_flags = [_packed(key, matrix_vector) for key in (B, C)]
    packed = seqlen % vector == 0 and all(flags)
    matrix_packed = seqlen % matrix_vector == 0 and all(matrix_flags)
    values = (
        *u.stride, *delta.stride, *_strides(z), *dout.stride, *du.stride, *ddelta.stride, *_strides(dz), *_strides(out),
        *B.stride, *C.stride, *A.stride, *_strides(dlast_state), batch, dim, group_dim, group_blocks, seqlen, dstate,
        -(-seqlen // CHECKPOINT_LENGTH), segments, segment_length, *flags, *matrix_flags,
    )  # fmt: skip
    blocks, block = batch * groups * group_blocks, (shape.threads, 1, 1)
    launches = []
    for carry_only in (True, False) if segments > 1 else (False,):
        variant = _backward_variant(
            shape, NAMES[u.dtype], z is not None, softplus, packed, matrix_packed, ordered, carry_only
        )
        kernel = runtime().load(variant, device)
        launches.append(kernel.plan((blocks, segments - carry_only, 1), block, shape.shared_bytes(), *values))
    sequences = batch * dim * segments if segments > 1 else 0
    return LaunchPlan(
        tuple(launches),
        sequences * (dstate + 1),
        4 * sequences * dstate,
        group_blocks if ordered else 1,
        batch * segments if ordered else 1,
    )


@cached
def _clear_plan(sums: int, matrix: int, D: int, bias: int, device: int) -> Plan:
    kernel = runtime().load(Variant.of(f"{SUMS}.cu", "selective_scan_clear", X="f32"), device)
    return kernel.plan((_multiprocessors(device) * 4, 1, 1), (256, 1, 1), 0, sums, matrix, D, bias, 0)


@cached
def _finish_plan(
    dtype: torch.dtype, dB_stride: tuple[int, ...], dC_stride: tuple[int, ...], shape: tuple[int, ...], device: int
) -> Plan:
    batch, groups, dstate, seqlen = shape
    size = batch * groups * dstate * seqlen
    kernel = runtime().load(Variant.of(f"{SUMS}.cu", "selective_scan_finish", X=NAMES[dtype]), device)
    return kernel.plan((-(-size // 256), 1, 1), (256, 1, 1), 0, *dB_stride, *dC_stride, size, groups, dstate, seqlen)


# --- the kernels' shapes


_MEANING = {
    "lanes": "lanes that share a channel: few need fewer instructions, many give more warps and fewer registers a lane",
    "threads": "threads of a block",
    "min_blocks": "blocks a multiprocessor that registers must leave room for: more hide more latency, too many spill",
    "segments": "pieces of time worked on side by side: more fill the card, each costs a second pass over its states",
}
TUNED = _tuning.tunable("selective_scan forward", f"{FORWARD}.cu", **_MEANING)
TUNED_BACKWARD = _tuning.tunable(
    "selective_scan backward", f"{BACKWARD}.cu", **_MEANING,
    block="steps whose states a lane keeps in registers at a time: more cost registers, fewer more shared memory",
)  # fmt: skip


def shape_class(dstate: int, itemsize: int, channels: int, seqlen: int) -> str:
    """Return the sizes that the kernels' best shape depends on, in words; what is tuned holds for all of a class."""
    sizes = f"channels {tuned.power(channels)}, length {tuned.power(seqlen)}"
    return f"{sizes}, states {tuned.power(dstate)}, {itemsize} bytes"


def _cuts(segments: int, seqlen: int) -> tuple[int, ...]:
    """Return numbers of segments around `segments`."""
    most = max(1, seqlen // CHECKPOINT_LENGTH)
    return tuple(dict.fromkeys((segments, max(segments // 2, 1), min(segments * 2, most, 32))))


def offered(usual: ForwardShape, segments: int, seqlen: int) -> list[dict[str, int]]:
    """Return what can be chosen instead of `usual` for the forward."""
    cuts = _cuts(segments, seqlen)
    if usual.states > 16:
        every_lanes: tuple[int, ...] = (8, 16)
    else:
        every_lanes = (2, 4, 8) if usual.lanes <= 8 and usual.states % 8 == 0 else (usual.lanes,)
    return [
        {"lanes": lanes, "threads": threads, "min_blocks": blocks, "segments": cut}
        for lanes in every_lanes
        for threads in (64, 128, 256)
        for blocks in (1, 2, 3, 4, 6)
        for cut in cuts
        # registers of one multiprocessor: 65536, and a thread has at least 32
        if blocks * threads <= 1024
    ]


@cached
def forward_shape(
    dstate: int, itemsize: int, sequences: int, group_dim: int, seqlen: int, device: int
) -> tuple[ForwardShape, int]:
    """Return the shape and the number of segments: tuned, or the usual."""
    usual, segments = usual_forward_shape(dstate, itemsize, sequences, group_dim, seqlen, device)
    kind = shape_class(dstate, itemsize, sequences * group_dim, seqlen)
    found = TUNED.chosen(kind, device, offered(usual, segments, seqlen))
    if found is None:
        return usual, segments
    lanes = found["lanes"]
    vector = usual.vector if dstate <= 16 else usual.vector * usual.lanes // lanes  # as many steps a tile
    shape = usual._replace(
        lanes=lanes,
        states=_padded(dstate, lanes),
        vector=vector,
        threads=found["threads"],
        min_blocks=found["min_blocks"],
    )
    return shape, found["segments"]


@functools.lru_cache(maxsize=4096)
def usual_forward_shape(
    dstate: int, itemsize: int, sequences: int, group_dim: int, seqlen: int, device: int
) -> tuple[ForwardShape, int]:
    """Return the shape, and the number of segments, for `sequences` (batch times groups) of `group_dim` channels."""
    channels = sequences * group_dim
    processors = _multiprocessors(device)
    if dstate <= 16:
        # Fewer lanes need fewer instructions, as long as there are warps enough: about 7 a multiprocessor (measured).
        enough = processors * 32 * 7
        lanes = next((lanes for lanes in (2 if itemsize == 2 else 4, 4, 8) if channels * lanes >= enough), 8)
        segments = 1
        if channels * 8 < enough * 3 // 4:  # or else cut time, and scan what can then be scanned at once by few lanes
            lanes = 2 if itemsize == 2 else 4
            segments = _segments(-(-channels * lanes // 128), processors * 4, seqlen)
            if channels * lanes * segments < enough // 2:
                lanes = 8
                segments = _segments(-(-channels // 16), processors * 4, seqlen)
        return ForwardShape(lanes, _padded(dstate, lanes), 16 // itemsize, 128, 4, 2), segments
    if dstate <= 32:
        shape = ForwardShape(8, _padded(dstate, 8), 4, 128, 3, 2)
    elif dstate <= 64:
        shape = ForwardShape(16, _padded(dstate, 16), 2, 128, 3, 2)
    else:
        shape = ForwardShape(16, _padded(dstate, 16), 1, 128, 1, 2 if dstate <= 128 else 1)
    blocks = sequences * -(-group_dim // shape.channels)
    return shape, _segments(blocks, processors * 2, seqlen)


def _padded(dstate: int, lanes: int) -> int:
    return -(-dstate // lanes) * lanes


@functools.cache
def backward_shape(dstate: int) -> BackwardShape:
    """Return the shape for `dstate` states."""
    if dstate <= 4:
        return BackwardShape(4, 4, 4, 128, 4, 32, 8)
    if dstate <= 8:
        return BackwardShape(4, 8, 4, 128, 4, 32, 8)
    if dstate <= 16:
        return BackwardShape(8, 16, 4, 128, 4, 32, 8)
    if dstate <= 32:
        return BackwardShape(8, 32, 4, 64, 4, 32, 8)
    if dstate <= 64:
        return BackwardShape(16, 64, 2, 64, 2, 32, 8)
    if dstate <= 128:
        return BackwardShape(32, 128, 1, 32, 1, 32, 8)
    return BackwardShape(32, 256, 1, 32, 1, 32, 4)


def offered_backward(dstate: int, segments: int, seqlen: int, shared_limit: int) -> list[dict[str, int]]:
    """Return what can be chosen instead of the usual for the backward."""
    usual = backward_shape(dstate)
    found = []
    for lanes in (usual.lanes // 2, usual.lanes, usual.lanes * 2):
        if not 4 <= lanes <= 32 or usual.states % lanes or usual.states // lanes > 16:
            continue
        for threads in (32, 64, 128, 256):
            # the registers that a thread may have: 80, 128, 168
            for blocks in dict.fromkeys(max(1, 65536 // (registers * threads)) for registers in (80, 128, 168)):
                for block in (4, 8, 16):
                    choice = {"lanes": lanes, "threads": threads, "min_blocks": blocks, "block": block}
                    if _with(usual, choice).shared_bytes() <= shared_limit:
                        found += [{**choice, "segments": cut} for cut in _cuts(segments, seqlen)]
    return found


def _with(usual: BackwardShape, choice: tuned.Parameters) -> BackwardShape:
    lanes = choice["lanes"]
    return usual._replace(
        lanes=lanes, vector=min(4, usual.tile // lanes), threads=choice["threads"], min_blocks=choice["min_blocks"],
        block=choice["block"],
    )  # fmt: skip


@cached
def tuned_backward_shape(
    dstate: int, itemsize: int, sequences: int, group_dim: int, seqlen: int, device: int
) -> tuple[BackwardShape, int]:
    """Return the backward's shape and number of segments: tuned, or the usual."""
    usual = backward_shape(dstate)
    segments = backward_segments(usual, sequences, group_dim, seqlen, device)
    kind = shape_class(dstate, itemsize, sequences * group_dim, seqlen)
    found = TUNED_BACKWARD.chosen(kind, device, offered_backward(dstate, segments, seqlen, _shared_limit(device)))
    return (usual, segments) if found is None else (_with(usual, found), found["segments"])


def backward_segments(shape: BackwardShape, sequences: int, group_dim: int, seqlen: int, device: int) -> int:
    """Return into how many segments time is cut."""
    blocks = sequences * -(-group_dim // shape.channels)
    return _segments(blocks, _multiprocessors(device) * shape.min_blocks, seqlen)


def _segments(blocks: int, resident: int, seqlen: int) -> int:
    """Return the segments that fill the card once; a segment has at least 4 pieces, for a second pass must pay."""
    if blocks * 3 > resident * 2:
        return 1
    return max(1, min(resident // blocks, seqlen // (4 * CHECKPOINT_LENGTH), 32))


def _cut(seqlen: int, segments: int) -> tuple[int, int]:
    """Return the segments and their length, a multiple of the checkpoints' distance."""
    pieces = -(-seqlen // CHECKPOINT_LENGTH)
    length = -(-pieces // segments) * CHECKPOINT_LENGTH
    return -(-seqlen // length), length


def variants(every: bool = False) -> Iterator[Variant]:
    """Yield the kernels that models use; with `every`, those for other options and for time cut into segments too."""
    for dtype, name in NAMES.items():
        size = SIZES[dtype]
        for lanes in (2, 4, 8) if size == 2 else (4, 8):
            yield _forward_variant(ForwardShape(lanes, 16, 16 // size, 128, 4, 2), name, True, True, True, True, False)
        yield _backward_variant(backward_shape(16), name, True, True, True, True, False, False)
        yield Variant.of(f"{SUMS}.cu", "selective_scan_finish", X=name)
    yield Variant.of(f"{SUMS}.cu", "selective_scan_clear", X="f32")
    if not every:
        return
    for name in NAMES.values():
        vector = 4 if name == "f32" else 8
        for lanes in (2 if vector == 8 else 4, 8):
            shape = ForwardShape(lanes, 16, vector, 128, 4, 2)
            yield _forward_variant(shape, name, True, True, True, True, True)
            yield _forward_variant(shape, name, False, False, True, True, False)
        yield _backward_variant(backward_shape(16), name, True, True, True, True, False, True)
        yield _backward_variant(backward_shape(16), name, True, True, True, True, True, False)
        yield _backward_variant(backward_shape(16), name, False, False, True, True, False, False)


def _forward_variant(
    shape: ForwardShape, name: str, gated: bool, softplus: bool, packed: bool, matrix_packed: bool, state_only: bool
) -> Variant:
    return Variant.of(
        f"{FORWARD}.cu", FORWARD, X=name, LANES=shape.lanes, STATES=shape.states, VECTOR=shape.vector,
        THREADS=shape.threads, MIN_BLOCKS=shape.min_blocks, MATRIX_BUFFERS=shape.matrix_buffers, EACH=shape.each,
        GATED=gated,
        SOFTPLUS=softplus, PACKED=packed, MATRIX_PACKED=matrix_packed, STATE_ONLY=state_only,
    )  # fmt: skip


def _backward_variant(
    shape: BackwardShape,
    name: str,
    gated: bool,
    softplus: bool,
    packed: bool,
    matrix_packed: bool,
    ordered: bool,
    carry_only: bool,
) -> Variant:
    return Variant.of(
        f"{BACKWARD}.cu", BACKWARD, X=name, LANES=shape.lanes, STATES=shape.states, VECTOR=shape.vector,
        THREADS=shape.threads, MIN_BLOCKS=shape.min_blocks, TILE=shape.tile, BLOCK=shape.block, GATED=gated,
        SOFTPLUS=softplus, PACKED=packed, MATRIX_PACKED=matrix_packed, ORDERED=ordered, CARRY_ONLY=carry_only,
    )  # fmt: skip


@cached
def _multiprocessors(device: int) -> int:
    return int(runtime().driver.multiprocessors(device))


@cached
def _shared_limit(device: int) -> int:
    current = runtime()
    return int(current.driver.shared_limit(device if device >= 0 else current.driver.current_device()))


# --- small things


def _packed(key: Key | None, vector: int) -> bool:
    """Return whether steps are neighbours and every aligned group of `vector` steps may be moved by one access."""
    return key is None or (
        key.stride[-1] == 1
        and not any(stride % vector for stride in key.stride[:-1])
        and not key.misalignment % (vector * SIZES[key.dtype])
    )


def _key(tensor: Any) -> Any:
    """Return the metadata that a launch depends on; None for None."""
    return None if tensor is None else Key(tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() & 15)


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _strides(key: Key | None) -> tuple[int, ...]:
    return (0, 0, 0) if key is None else key.stride


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None or tensor.stride(0) == 1 else tensor.contiguous()
