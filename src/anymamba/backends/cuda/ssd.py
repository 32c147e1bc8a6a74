"""The state-space dual scan on the GPU: picks the forward kernel's shape for the sizes at hand, and launches it.

The kernel's file says how it works and what bounds it. What is decided here: how long a chunk is, how many columns of headdim
a block has, and into how many segments time is cut when there are too few heads to fill the card.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch

from anymamba.backends import Operator, tuned
from anymamba.backends.cuda import _tuning, device_refusal
from anymamba.backends.cuda.runtime import Plan, Variant, cached, runtime
from anymamba.ops.ssd import NEW_BUFFERS, SsdBuffers, SsdGradients

__all__ = ["ForwardShape", "refusal", "ssd_backward", "ssd_forward", "variants"]

SIZES = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}
NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
MOST = 256
HOPPER = 227 << 10  # bytes of shared memory a block can have there
FORWARD = "ssd_forward"
SHORT = 512
"""Steps up to which chunks are short; and a segment is not shorter."""
LONG = 4096
"""Steps from which time is cut into segments where heads do not fill the card: two launches must pay."""


class Key(NamedTuple):
    """What a launch depends on of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    misalignment: int  # of its first element, from 16 bytes


class LaunchPlan(NamedTuple):
    """The launches of one call, in order, and what they need."""

    launches: tuple[Plan, ...]
    folded: int  # floats for what segments hand on: their states, then their sums of d * A
    sums_at: int  # bytes from the first to the second


class ForwardShape(NamedTuple):
    """Macros of the forward kernel; see ssd_forward.cu."""

    steps: int
    columns: int
    states: int
    warps: int
    stages: int
    state_buffers: int
    min_blocks: int

    def shared_bytes(self, size: int, sequences: bool, state_only: bool) -> int:
        """Return the shared memory of a block."""
        row, wide = _padded(self.columns, size), _padded(self.states, size)
        elements = self.stages * self.steps * (row + wide)
        if not state_only:
            elements += (self.steps + self.state_buffers * self.columns) * wide
            elements += self.steps * _padded(self.steps, size) if self.warps > self.steps // 16 else 0
        scalars = 2 * (4 * self.steps + 4) + self.columns + (2 * self.steps if sequences else 0)
        return size * elements + 4 * scalars


def refusal(operator: Operator, call: Any) -> str | None:
    """Return None, or why these kernels cannot do the call."""
    reason = device_refusal(call.device)
    if reason is not None:
        return reason
    for name, dtype in (("x", call.dtype), ("B", call.bc_dtype), ("a sum", call.compute)):
        if dtype not in NAMES:
            return f"{name} is {dtype}; the kernels take fp32, fp16 and bf16"
    for name, size in (("headdim", call.headdim), ("dstate", call.dstate)):
        if not 1 <= size <= MOST:
            return f"{name} is {size}; the kernels take 1 to {MOST}"
    limit = _shared_limit(call.device.index if call.device.index is not None else -1)
    size = 2 if call.dtype == call.bc_dtype and SIZES[call.dtype] == 2 else 4
    if not _shapes(call.headdim, call.dstate, size, limit):
        return (
            f"dstate {call.dstate} in {8 * size} bits needs more shared memory than the {limit} bytes a block has here"
        )
    return None


def ssd_forward(
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
    """See `anymamba.ops.ssd.SsdBackend`."""
    batch, _, heads, headdim = x.shape
    state_shape = (heads, headdim, B.shape[3])
    element = (
        x.dtype
        if x.dtype == B.dtype == C.dtype
        else torch.promote_types(torch.promote_types(x.dtype, B.dtype), C.dtype)
    )
    out = x.new_empty(x.shape, dtype=element)
    final = x.new_empty((batch, *state_shape), dtype=torch.float32) if return_final_states else None
    varlen = None
    if cu_seqlens is not None:  # zero for an empty sequence
        varlen = x.new_zeros((cu_seqlens.shape[0] - 1, *state_shape), dtype=element)
    if x.numel() == 0:
        if final is not None:
            final.zero_() if initial_states is None else final.copy_(initial_states)
    else:
        _forward(
            None, 0, x.to(element), dt, A, B.to(element), C.to(element), D, None if z is None else z.to(element), dt_bias,
            initial_states, seq_idx, cu_seqlens, dt_softplus, dt_min, dt_max, out, final, varlen,
        )  # fmt: skip
    return out.to(x.dtype), final, None if varlen is None else varlen.to(C.dtype)


def ssd_backward(
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
    """See `anymamba.ops.ssd.SsdBackend`."""
    found: SsdGradients = _backward_module().ssd_backward(
        dout, dfinal_states, dvarlen_states, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus,
        dt_min, dt_max, into=into, recompute_out=recompute_out,
    )  # fmt: skip
    return found


def _backward_module() -> ModuleType:
    # it builds on this module
    return importlib.import_module("anymamba.backends.cuda._ssd_backward")


def _forward(
    shape: ForwardShape | None,
    segments: int,
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
    out: torch.Tensor,
    final: torch.Tensor | None,
    varlen: torch.Tensor | None,
) -> None:
    """Launch the forward on x, B, C, z, out of one dtype; with `shape` and `segments` not the usual ones but these."""
    dt, A = _known(dt), _known(A)
    D, dt_bias, initial_states = (None if t is None else _known(t) for t in (D, dt_bias, initial_states))
    plan = _forward_plan(
        shape, segments, _key(x), _key(dt), _key(A), _key(B), _key(C), _key(D), _key(z), _key(dt_bias), _key(initial_states),
        _key(seq_idx), _key(cu_seqlens), dt_softplus, dt_min, dt_max, x.dtype == torch.float32 and _tf32(), x.get_device(),
    )  # fmt: skip
    states = sums = 0
    if plan.folded:
        folded = x.new_empty(plan.folded, dtype=torch.float32)
        states, sums = folded.data_ptr(), folded.data_ptr() + plan.sums_at
    for launch in plan.launches:
        launch(
            x.data_ptr(), dt.data_ptr(), A.data_ptr(), B.data_ptr(), C.data_ptr(), _pointer(D), _pointer(z),
            _pointer(dt_bias), _pointer(initial_states), _pointer(seq_idx), _pointer(cu_seqlens), out.data_ptr(),
            _pointer(final), _pointer(varlen), states, sums,
        )  # fmt: skip


@cached
def _forward_plan(
    shape: ForwardShape | None, segments: int, x: Key, dt: Key, A: Key, B: Key, C: Key, D: Key | None, z: Key | None,
    bias: Key | None, initial: Key | None, seq_idx: Key | None, cu_seqlens: Key | None, softplus: bool, dt_min: float,
    dt_max: float, tf32: bool, device: int,
) -> LaunchPlan:  # fmt: skip
    """Return the launches for tensors of this metadata."""
    batch, seqlen, heads, headdim = x.shape
    groups, dstate = B.shape[2], B.shape[3]
    size = SIZES[x.dtype]
    if shape is None:
        shape, segments = tuned_forward_shape(batch * heads, headdim, dstate, seqlen, size, device)
    tiles = -(-headdim // shape.columns)
    first = state_shape(shape, size, _shared_limit(device))
    cut = _cut(seqlen, segments, batch * heads * tiles, max(shape.steps, first.steps), _multiprocessors(device))
    vector = 16 // size
    packed = (
        headdim % vector == 0
        and dstate % vector == 0
        and all(_packed(key, vector) for key in (x, B, C))
        and (z is None or _packed(z, 4))
    )
    strides = (
        *x.stride, *dt.stride, *B.stride, *C.stride, *(z.stride if z else (0,) * 4),
        *(initial.stride if initial else (0,) * 4), *((*D.stride, 0)[:2] if D else (0, 0)),
        *(seq_idx.stride if seq_idx else (0, 0)), *A.stride, *(bias.stride if bias else (0,)),
        *(cu_seqlens.stride if cu_seqlens else (0,)), CODES[dt.dtype], CODES[A.dtype], CODES[D.dtype] if D else 0,
        CODES[bias.dtype] if bias else 0, CODES[initial.dtype] if initial else 0,
        bool(seq_idx and seq_idx.dtype == torch.int64), bool(cu_seqlens and cu_seqlens.dtype == torch.int64),
        heads, heads // groups, headdim, dstate, seqlen, tiles,
    )  # fmt: skip
    options = (cu_seqlens.shape[0] - 1 if cu_seqlens else 0, softplus, dt_min, dt_max)
    sequences = seq_idx is not None
    launches = []
    for state_only in (True, False) if cut.segments > 1 else (False,):
        one = first if state_only else shape
        variant = forward_variant(one, NAMES[x.dtype], tf32, z is not None, sequences, packed, state_only)
        kernel = runtime().load(variant, device)
        grid = (batch * heads * tiles, (cut.segments - 1) * cut.finer if state_only else cut.segments, 1)
        lengths = (cut.segments * cut.finer, cut.finer, cut.length // cut.finer if state_only else cut.length)
        shared = one.shared_bytes(size, sequences, state_only)
        launches.append(kernel.plan(grid, (32 * one.warps, 1, 1), shared, *strides, *lengths, *options))
    handed = batch * heads * cut.segments * cut.finer if cut.segments > 1 else 0
    return LaunchPlan(tuple(launches), handed * (headdim * dstate + 1), 4 * handed * headdim * dstate)


# --- the kernel's shapes


@functools.lru_cache(maxsize=4096)
def forward_shape(
    sequences: int, headdim: int, dstate: int, seqlen: int, size: int, device: int
) -> tuple[ForwardShape, int]:
    """Return the shape, and the number of segments, for `sequences` (batch times heads). Measured on an H200."""
    limit, processors = _shared_limit(device), _multiprocessors(device)
    shapes = _shapes(headdim, dstate, size, limit)
    blocks = sequences * -(-headdim // shapes[0].columns)
    if blocks * 3 > processors * 4:  # two blocks on most multiprocessors: long chunks; short sequences like short ones
        return shapes[-1 if seqlen <= SHORT else 0], 1
    if seqlen < LONG:
        return shapes[0], 1
    shape = shapes[-1]
    resident = processors * max(1, min(shape.min_blocks, limit // shape.shared_bytes(size, False, False)))
    return shape, max(1, min(resident // blocks, seqlen // SHORT, 32))


TUNED = _tuning.tunable(
    "ssd forward", f"{FORWARD}.cu",
    steps="steps of a chunk: long ones need fewer passes over the state, short ones less shared memory and fewer products",
    columns="columns of headdim that a block has: few give more blocks, each of which finds C B^T again",
    warps="warps of a block",
    stages="chunks of x and B in shared memory: 2 load the next while one is worked on",
    state_buffers="copies of the state in shared memory: with 2 (and 2 stages) a chunk needs one barrier",
    min_blocks="blocks a multiprocessor that registers must leave room for",
    segments="pieces of time worked on side by side: more fill the card, each costs a second pass over its states",
)  # fmt: skip


@cached
def tuned_forward_shape(
    sequences: int, headdim: int, dstate: int, seqlen: int, size: int, device: int
) -> tuple[ForwardShape, int]:
    """Return the shape and the number of segments: tuned, or the usual."""
    usual, segments = forward_shape(sequences, headdim, dstate, seqlen, size, device)
    kind = (
        f"heads {tuned.power(sequences)}, length {tuned.power(seqlen)}, headdim {tuned.power(headdim)}, "
        f"states {tuned.power(dstate)}, {size} bytes"
    )
    found = TUNED.chosen(kind, device, offered(usual, segments, seqlen, size, _shared_limit(device)))
    if found is None:
        return usual, segments
    return ForwardShape(states=usual.states, **{name: found[name] for name in _OWN}), found["segments"]


_OWN = ("steps", "columns", "warps", "stages", "state_buffers", "min_blocks")


def offered(usual: ForwardShape, segments: int, seqlen: int, size: int, limit: int) -> list[dict[str, int]]:
    """Return what can be chosen instead of `usual`, of what fits into `limit` bytes of shared memory."""
    cuts = dict.fromkeys((segments, max(segments // 2, 1), min(segments * 2, max(1, seqlen // 128), 32)))
    found = []
    for steps in (16, 32, 64) if size == 2 else (16, 32):
        for columns in (32, 64):
            for warps in (2, 4, 8):
                strips = steps // 16
                parts = warps // strips  # of the columns
                if warps % strips or columns // parts % 16 or columns // 16 * (usual.states // 16) < warps:
                    continue
                for stages, buffers in ((1, 1), (2, 1), (2, 2)):
                    shape = ForwardShape(steps, columns, usual.states, warps, stages, buffers, 1)
                    resident = limit // shape.shared_bytes(size, True, False)
                    blocks = dict.fromkeys(min(count, resident) for count in (1, 2, 3, 4) if count <= resident)
                    found += [
                        {**{name: getattr(shape, name) for name in _OWN}, "min_blocks": count, "segments": cut}
                        for count in blocks
                        for cut in cuts
                    ]
    return found


@functools.cache
def _shapes(headdim: int, dstate: int, size: int, limit: int) -> list[ForwardShape]:
    """Return shapes that fit into `limit` bytes of shared memory: first with long chunks, last with short ones and more
    blocks a multiprocessor (the same where there is only one); [] if none fits.
    """
    states = max(16, 1 << (dstate - 1).bit_length())
    columns = 64 if (headdim > 32 and states <= 128) or states < 32 else 32
    if size == 2:
        tried = [(64, 4, 2, 1, 2), (32, 4, 2, 2, 3), (32, 4, 1, 1, 2), (16, 2, 1, 1, 1)]
    else:
        tried = [(32, 4, 2, 1, 2), (32, 4, 1, 1, 2), (16, 2, 1, 1, 1)]
    found = []
    for steps, warps, stages, buffers, min_blocks in tried:
        for width in dict.fromkeys((columns, 32)):
            shape = ForwardShape(steps, width, states, warps, stages, buffers, min_blocks)
            if width // 16 * (states // 16) >= warps and shape.shared_bytes(size, True, False) <= limit:
                found.append(shape)
                break
    four = [shape for shape in found if shape.warps == 4]
    twice = [shape for shape in four if 2 * shape.shared_bytes(size, True, False) <= limit]
    found = twice or four or found
    return found[: 2 if size == 2 and len(found) > 2 else 1]


def state_shape(shape: ForwardShape, size: int, limit: int) -> ForwardShape:
    """Return the shape for STATE_ONLY that goes with `shape`: longer chunks, if there is shared memory for them."""
    longer = shape._replace(steps=64, stages=2, min_blocks=4 if size == 2 else 1)
    fits = shape.warps >= 4 and longer.shared_bytes(size, True, True) <= limit
    return longer if fits else shape


class Cut(NamedTuple):
    """How time is cut: into `segments` of `length` steps, each of which STATE_ONLY cuts into `finer`."""

    segments: int
    finer: int
    length: int


def _cut(seqlen: int, segments: int, blocks: int, steps: int, processors: int) -> Cut:
    """Return the segments; all lengths are multiples of the chunk. STATE_ONLY needs four blocks a multiprocessor."""
    finer = max(1, min(4, processors * 4 // (blocks * (segments - 1)))) if segments > 1 else 1
    chunks = -(-seqlen // steps)
    length = -(-chunks // (segments * finer)) * finer * steps
    return Cut(-(-seqlen // length), finer, length)


def variants(every: bool = False) -> Iterator[Variant]:
    """Yield the kernels that models use; with `every`, those for other sizes and options and for time cut into segments."""
    yield from _backward_module().variants(every)
    for dtype, name in NAMES.items():
        for shape in _shapes(64, 128, SIZES[dtype], HOPPER):
            yield forward_variant(shape, name, False, False, False, True, False)
        yield forward_variant(state_shape(shape, SIZES[dtype], HOPPER), name, False, False, False, True, True)
    if not every:
        return
    for dtype, name in NAMES.items():
        size = SIZES[dtype]
        for shape in _shapes(64, 128, size, HOPPER):
            yield forward_variant(shape, name, size == 4, True, True, True, False)
        yield forward_variant(shape, name, False, True, False, False, False)
        for limit in (64 << 10, 99 << 10):  # sm_75; sm_86, sm_89, sm_120
            for dstate in (16, 64, 128, 256):
                for small in _shapes(64, dstate, size, limit)[:1]:
                    yield forward_variant(small, name, False, False, False, True, False)


def forward_variant(
    shape: ForwardShape, name: str, tf32: bool, gated: bool, sequences: bool, packed: bool, state_only: bool
) -> Variant:
    """Return the kernel of these macros."""
    return Variant.of(
        f"{FORWARD}.cu", FORWARD, X=name, Q=shape.steps, PT=shape.columns, NT=shape.states, WARPS=shape.warps,
        STAGES=shape.stages, STATE_BUFFERS=shape.state_buffers, MIN_BLOCKS=shape.min_blocks, TF32=tf32,
        GATED=gated and not state_only, SEQUENCES=sequences, STATE_ONLY=state_only, PACKED=packed,
    )  # fmt: skip


@cached
def _multiprocessors(device: int) -> int:
    return int(runtime().driver.multiprocessors(device))


@cached
def _shared_limit(device: int) -> int:
    current = runtime()
    return int(current.driver.shared_limit(device if device >= 0 else current.driver.current_device()))


# --- small things


def _tf32() -> bool:
    """Return whether PyTorch may use tf32 for products of float32 matrices."""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # newer PyTorch, when the newer setting was used
        return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"


def _padded(columns: int, size: int) -> int:
    """Return mma.cuh's padded_stride."""
    return columns + 8 if size == 2 else columns // 32 * 32 + (40 if columns % 32 > 8 else 8)


def _packed(key: Key, vector: int) -> bool:
    """Return whether elements of a row are neighbours and every aligned group of `vector` may be moved by one access."""
    return (
        (key.stride[-1] == 1 or key.shape[-1] == 1)
        and not any(stride % vector for stride, size in zip(key.stride[:-1], key.shape[:-1]) if size > 1)
        and not key.misalignment % (vector * SIZES[key.dtype])
    )


def _known(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in CODES else tensor.float()


def _key(tensor: Any) -> Any:
    """Return the metadata that a launch depends on; None for None."""
    return None if tensor is None else Key(tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() & 15)


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
