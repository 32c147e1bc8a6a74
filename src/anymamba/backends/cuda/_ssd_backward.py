"""The state-space dual scan's backward on the GPU: states at the chunks' bounds in both directions, then gradients by chunk.

Two launches (see the kernels' files for how they work): `ssd_states` walks the chunks of every head forwards and backwards side
by side and leaves the states at their bounds; `ssd_backward` takes each chunk on its own, for all heads of a group or a part of
them. Small sums over chunks are left to PyTorch, as is what surrounds the scan: the gate, and D a column.

Nothing is added with atomics: the same call gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from anymamba.backends import tuned
from anymamba.backends.cuda import _tuning
from anymamba.backends.cuda.runtime import Plan, Variant, cached, runtime
from anymamba.backends.cuda.ssd import (
    CODES,
    HOPPER,
    NAMES,
    SIZES,
    Key,
    _key,
    _known,
    _multiprocessors,
    _packed,
    _padded,
    _pointer,
    _shared_limit,
    _tf32,
    ssd_forward,
)
from anymamba.backends.torch.ssd import ssd_backward as torch_backward
from anymamba.ops._autocast import without_autocast
from anymamba.ops.ssd import NEW_BUFFERS, SsdBuffers, SsdGradients

__all__ = ["BackwardShape", "StatesShape", "ssd_backward", "variants"]

MOST_COLUMNS = 128
HEADS_A_BLOCK = 4
"""Least heads of a block where there are blocks enough: what it leaves to be added weighs as much as the work on one head."""


class BackwardShape(NamedTuple):
    """Macros of ssd_backward.cu."""

    steps: int
    columns: int
    states: int
    warps: int
    stages: int

    def shared_bytes(self, size: int, sequences: bool) -> int:
        """Return the shared memory of a block."""
        row, wide, scores = (_padded(n, size) for n in (self.columns, self.states, self.steps))
        elements = self.stages * 2 * (self.steps * row + self.columns * wide) + self.steps * (2 * wide + scores)
        strips = self.steps // 16
        sums = (2 * strips + 2 * (self.warps // strips) + 2) * self.steps + self.warps
        return size * elements + 4 * (3 * (4 * self.steps + 4) + 2 * sums + (3 * self.steps if sequences else 0))


class StatesShape(NamedTuple):
    """Macros of ssd_states.cu."""

    steps: int
    columns: int
    states: int
    warps: int

    def shared_bytes(self, size: int, sequences: bool) -> int:
        """Return the shared memory of a block."""
        elements = 2 * self.steps * (_padded(self.columns, size) + _padded(self.states, size))
        return size * elements + 4 * (2 * (4 * self.steps + 4) + (2 * self.steps if sequences else 0))


class BackwardPlan(NamedTuple):
    """The two launches of a call, and the sizes of what they write for each other and for the sums afterwards."""

    states: Plan
    gradients: Plan
    chunks: int
    splits: int


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
    element = torch.promote_types(torch.promote_types(x.dtype, B.dtype), C.dtype)
    limit = _shared_limit(x.get_device())
    # Gradients of the packed sequences' states enter in the middle of a chunk.
    if dvarlen_states is not None or x.numel() == 0 or _shape(x.shape[3], B.shape[3], SIZES[element], limit) is None:
        return torch_backward(
            dout, dfinal_states, dvarlen_states, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens,
            dt_softplus, dt_min, dt_max, into=into, recompute_out=recompute_out,
        )  # fmt: skip
    with without_autocast(x.device.type):
        dout = torch.zeros_like(x, dtype=element) if dout is None else dout.to(element)
        out = dz = None
        if z is not None or recompute_out:
            out, _, _ = ssd_forward(
                x, dt, A, B, C, D, None, dt_bias, initial_states, seq_idx, None, dt_softplus, dt_min, dt_max, False
            )
        if z is not None:
            assert out is not None
            dout, dz = _through_gate(dout, out, z, into.dz, recompute_out)
        dx, ddt, dA, dB, dC, dD, dinitial = _gradients(
            dout, dfinal_states, x.to(element), dt, A, B.to(element), C.to(element), D, dt_bias, initial_states, seq_idx,
            dt_softplus, dt_min, dt_max, into.dx,
        )  # fmt: skip
        if D is not None and dD is None:
            dD = _skipped(dout, x)
        return SsdGradients(
            _placed(dx, into.dx, x),
            _placed(ddt.transpose(1, 2), into.ddt, dt),
            torch.empty_like(A).copy_(dA),
            _placed(dB, into.dB, B),
            _placed(dC, into.dC, C),
            None if D is None or dD is None else torch.empty_like(D).copy_(dD),
            dz,
            None if dt_bias is None else torch.empty_like(dt_bias).copy_(ddt.sum((0, 2))),
            None if initial_states is None or dinitial is None else torch.empty_like(initial_states).copy_(dinitial),
            out if recompute_out else None,
        )


def _placed(found: torch.Tensor, buffer: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return a gradient in the caller's buffer, or in a tensor like its input: itself where it is one."""
    if buffer is None and found.dtype == like.dtype and found.is_contiguous() and like.is_contiguous():
        return found
    buffer = torch.empty_like(like) if buffer is None else buffer
    return buffer if buffer is found or buffer.data_ptr() == found.data_ptr() else buffer.copy_(found)


def _through_gate(
    dout: torch.Tensor, out: torch.Tensor, z: torch.Tensor, dz: torch.Tensor | None, gated: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of the scan's own output and that of z; with `gated` make `out` what the caller sees, in place.

    A batch at a time: its temporaries are float32.
    """
    dz = torch.empty_like(z) if dz is None else dz
    inner = torch.empty_like(dout, memory_format=torch.contiguous_format)
    for row in range(z.shape[0]):
        wide, given, own = z[row].float(), dout[row].float(), out[row].float()
        gate = F.silu(wide)
        inner[row] = given * gate
        dz[row] = torch.ops.aten.silu_backward(given * own, wide)
        if gated:
            out[row] = own * gate
    return inner, dz


def _skipped(dout: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of D a column, (heads, headdim)."""
    found = torch.zeros(x.shape[2:], device=x.device)
    for row in range(x.shape[0]):
        found += (dout[row].float() * x[row]).sum(0)
    return found


def _gradients(
    dout: torch.Tensor,
    dfinal: torch.Tensor | None,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    softplus: bool,
    dt_min: float,
    dt_max: float,
    buffer: torch.Tensor | None,
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor | None,
]:
    """Launch on tensors of one dtype; return dx, ddt (batch, heads, seqlen), dA, dB, dC, dD of D a head, dinitial_states."""
    dt, A = _known(dt), _known(A)
    D, dt_bias, initial, dfinal = (None if t is None else _known(t) for t in (D, dt_bias, initial, dfinal))
    batch, seqlen, heads, headdim = x.shape
    groups, dstate = B.shape[2], B.shape[3]
    straight = buffer is not None and buffer.dtype == x.dtype and buffer.stride(3) == 1
    dx = buffer if straight and buffer is not None else x.new_empty(x.shape)
    plan = _plan(
        None, 0, _key(x), _key(dout), _key(dt), _key(A), _key(B), _key(C), _key(D), _key(dt_bias), _key(initial), _key(dfinal),
        _key(seq_idx), _key(dx), softplus, dt_min, dt_max, x.dtype == torch.float32 and _tf32(), x.get_device(),
    )  # fmt: skip
    bounds = x.new_empty((2, batch, plan.chunks, heads, headdim, dstate))
    dinitial = None if initial is None else x.new_empty((batch, heads, headdim, dstate), dtype=torch.float32)
    plan.states(
        x.data_ptr(), dout.data_ptr(), B.data_ptr(), C.data_ptr(), dt.data_ptr(), A.data_ptr(), _pointer(dt_bias),
        _pointer(initial), _pointer(dfinal), _pointer(seq_idx), bounds[0].data_ptr(), bounds[1].data_ptr(), _pointer(dinitial),
    )  # fmt: skip
    shape = (batch, seqlen, groups, dstate)
    dBC = x.new_empty((2, *shape)) if plan.splits == 1 else x.new_empty((2, plan.splits, *shape), dtype=torch.float32)
    ddt = x.new_empty((batch, heads, seqlen), dtype=torch.float32)
    parts = x.new_empty((2, batch, plan.chunks, heads), dtype=torch.float32)
    a_head = D is not None and D.dim() == 1
    plan.gradients(
        x.data_ptr(), dout.data_ptr(), B.data_ptr(), C.data_ptr(), dt.data_ptr(), A.data_ptr(), _pointer(dt_bias), _pointer(D),
        bounds[0].data_ptr(), bounds[1].data_ptr(), _pointer(seq_idx), dx.data_ptr(), dBC[0].data_ptr(), dBC[1].data_ptr(),
        ddt.data_ptr(), parts[0].data_ptr(), parts[1].data_ptr() if a_head else 0,
    )  # fmt: skip
    if plan.splits > 1:
        dBC = dBC.sum(1)
    sums = parts.sum((1, 2))
    return dx, ddt, sums[0], dBC[0], dBC[1], sums[1] if a_head else None, dinitial


@cached
def _plan(
    shape: BackwardShape | None, splits: int, x: Key, dout: Key, dt: Key, A: Key, B: Key, C: Key, D: Key | None,
    bias: Key | None, initial: Key | None, dfinal: Key | None, seq_idx: Key | None, dx: Key, softplus: bool, dt_min: float,
    dt_max: float, tf32: bool, device: int,
) -> BackwardPlan:  # fmt: skip
    """Return the launches for tensors of this metadata; with `shape` and `splits` not the usual ones but these."""
    batch, seqlen, heads, headdim = x.shape
    groups, dstate = B.shape[2], B.shape[3]
    size = SIZES[x.dtype]
    if shape is None:
        shape, splits = _tuned_shape(batch * heads, heads // groups, headdim, dstate, seqlen, size, device)
    chunks = -(-seqlen // shape.steps)
    group_heads = heads // groups
    split_heads = -(-group_heads // (splits or _splits(batch * chunks * groups, group_heads, _multiprocessors(device))))
    splits = -(-group_heads // split_heads)
    vector = 16 // size
    packed = (
        headdim % vector == 0
        and dstate % vector == 0
        and all(_packed(key, vector) for key in (x, dout, B, C))
        and _packed(dx, 4)
    )
    sequences = seq_idx is not None
    options = (softplus, dt_min, dt_max)
    seq_strides = seq_idx.stride if seq_idx else (0, 0)
    scalar_strides = (*A.stride, *(bias.stride if bias else (0,)))
    scalar_types = (CODES[dt.dtype], CODES[A.dtype], CODES[bias.dtype] if bias else 0)
    wide = bool(seq_idx and seq_idx.dtype == torch.int64)
    four = (0, 0, 0, 0)

    first = states_shape(shape)
    tiles = -(-headdim // first.columns)
    states = runtime().load(states_variant(first, NAMES[x.dtype], tf32, sequences, packed), device).plan(
        (batch * heads * tiles, 2, 1), (32 * first.warps, 1, 1), first.shared_bytes(size, sequences),
        *x.stride, *dout.stride, *B.stride, *C.stride, *dt.stride, *(initial.stride if initial else four),
        *(dfinal.stride if dfinal else four), *seq_strides, *scalar_strides, *scalar_types,
        CODES[initial.dtype] if initial else 0, CODES[dfinal.dtype] if dfinal else 0, wide, heads, group_heads, headdim, dstate,
        seqlen, tiles, *options,
    )  # fmt: skip
    gradients = runtime().load(backward_variant(shape, NAMES[x.dtype], tf32, sequences, packed), device).plan(
        (batch * chunks * groups * splits, 1, 1), (32 * shape.warps, 1, 1), shape.shared_bytes(size, sequences),
        *x.stride, *dout.stride, *B.stride, *C.stride, *dt.stride, *dx.stride[:3], *((*D.stride, 0)[:2] if D else (0, 0)),
        *seq_strides, *scalar_strides, *scalar_types, CODES[D.dtype] if D else 0, wide, batch, heads, groups, group_heads,
        splits, split_heads, headdim, dstate, seqlen, *options,
    )  # fmt: skip
    return BackwardPlan(states, gradients, chunks, splits)


# --- the kernels' shapes


TUNED = _tuning.tunable(
    "ssd backward", "ssd_backward.cu",
    steps="steps of a chunk: long ones leave fewer states to write and read, short ones need less shared memory",
    warps="warps of a block",
    stages="heads whose tiles are in shared memory: 2 load the next head's while one is worked on",
    splits="blocks that share the heads of a group: more fill the card, each leaves sums to be added; 0: by the sizes",
)  # fmt: skip


@cached
def _tuned_shape(
    sequences: int, group_heads: int, headdim: int, dstate: int, seqlen: int, size: int, device: int
) -> tuple[BackwardShape, int]:
    """Return the shape and the splits (0: by the sizes): tuned, or the usual."""
    limit = _shared_limit(device)
    usual = _shape(headdim, dstate, size, limit)
    assert usual is not None
    kind = (
        f"heads {tuned.power(sequences)}, length {tuned.power(seqlen)}, headdim {tuned.power(headdim)}, "
        f"states {tuned.power(dstate)}, {size} bytes"
    )
    found = TUNED.chosen(kind, device, offered(usual, group_heads, size, limit))
    if found is None:
        return usual, 0
    return usual._replace(steps=found["steps"], warps=found["warps"], stages=found["stages"]), found["splits"]


def offered(usual: BackwardShape, group_heads: int, size: int, limit: int) -> list[dict[str, int]]:
    """Return what can be chosen instead of `usual`, of what fits into `limit` bytes of shared memory."""
    shapes = [usual._replace(steps=steps, warps=warps, stages=stages) for steps, warps, stages in _tried(size)]
    return [
        {"steps": shape.steps, "warps": shape.warps, "stages": shape.stages, "splits": splits}
        for shape in shapes
        if max(shape.shared_bytes(size, True), states_shape(shape).shared_bytes(size, True)) <= limit
        for splits in (0, 1, 2, 4, 8, 16, 32)
        if splits <= group_heads
    ]


def _tried(size: int) -> tuple[tuple[int, int, int], ...]:
    """Return steps, warps and stages, the longest chunks first."""
    wide = ((64, 16, 2), (64, 16, 1)) if size == 2 else ()  # in float 128 registers a thread would not do
    return (*wide, (32, 8, 2), (32, 8, 1), (16, 4, 1))


def _splits(blocks: int, group_heads: int, processors: int) -> int:
    """Return over how many blocks the heads of a group are split: two a multiprocessor are wanted."""
    wanted = -(-2 * processors // blocks)
    return max(1, min(wanted, group_heads // HEADS_A_BLOCK if blocks * group_heads > 8 * processors else group_heads))


def _shape(headdim: int, dstate: int, size: int, limit: int) -> BackwardShape | None:
    """Return the shape with the longest chunks that fit into `limit` bytes of shared memory, or None."""
    if headdim > MOST_COLUMNS:
        return None
    columns, states = (max(16, 1 << (n - 1).bit_length()) for n in (headdim, dstate))
    for steps, warps, stages in _tried(size):
        shape = BackwardShape(steps, columns, states, warps, stages)
        if max(shape.shared_bytes(size, True), states_shape(shape).shared_bytes(size, True)) <= limit:
            return shape
    return None


def states_shape(shape: BackwardShape) -> StatesShape:
    """Return the shape for the states' kernel that goes with `shape`."""
    columns = min(32, shape.columns)
    return StatesShape(shape.steps, columns, shape.states, min(4, columns // 16 * (shape.states // 16)))


def variants(every: bool = False) -> Iterator[Variant]:
    """Yield the kernels that models use; with `every`, those for other sizes and options."""
    for dtype, name in reversed(NAMES.items()):
        shape = _shape(64, 128, SIZES[dtype], HOPPER)
        assert shape is not None
        yield states_variant(states_shape(shape), name, False, False, True)
        yield backward_variant(shape, name, False, False, True)
    if not every:
        return
    for dtype, name in NAMES.items():
        size = SIZES[dtype]
        shape = _shape(64, 128, size, HOPPER)
        assert shape is not None
        yield states_variant(states_shape(shape), name, size == 4, True, False)
        yield backward_variant(shape, name, size == 4, True, False)
        for limit in (64 << 10, 99 << 10):  # sm_75; sm_86, sm_89, sm_120
            for dstate in (16, 64, 128):
                small = _shape(64, dstate, size, limit)
                if small is not None:
                    yield states_variant(states_shape(small), name, False, False, True)
                    yield backward_variant(small, name, False, False, True)


def states_variant(shape: StatesShape, name: str, tf32: bool, sequences: bool, packed: bool) -> Variant:
    """Return the states' kernel of these macros."""
    return Variant.of(
        "ssd_states.cu", "ssd_states", X=name, Q=shape.steps, PT=shape.columns, NT=shape.states, WARPS=shape.warps, TF32=tf32,
        SEQUENCES=sequences, PACKED=packed,
    )  # fmt: skip


def backward_variant(shape: BackwardShape, name: str, tf32: bool, sequences: bool, packed: bool) -> Variant:
    """Return the gradients' kernel of these macros."""
    return Variant.of(
        "ssd_backward.cu", "ssd_backward", X=name, Q=shape.steps, PT=shape.columns, NT=shape.states, WARPS=shape.warps,
        STAGES=shape.stages, TF32=tf32, SEQUENCES=sequences, PACKED=packed,
    )  # fmt: skip
