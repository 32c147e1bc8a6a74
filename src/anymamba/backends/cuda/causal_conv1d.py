"""Causal convolution on the GPU: picks the kernel for the layout at hand, and launches it.

Rows contiguous in time and rows contiguous in channels ("channel last") have a kernel each; both take any strides, and the
one whose fast access fits better gets the odd ones. The kernels' files say how they work and what bounds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, overload

import torch

from anymamba.backends import Operator, tuned
from anymamba.backends.cuda import _tuning, device_refusal
from anymamba.backends.cuda.runtime import Kernel, Plan, Variant, cached, runtime
from anymamba.ops._prepared import same_kind

__all__ = [
    "causal_conv1d_backward",
    "causal_conv1d_forward",
    "causal_conv1d_update",
    "causal_conv1d_varlen_states",
    "prepare",
    "refusal",
    "variants",
]

NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
SIZES = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}
INTEGERS = {torch.int32: "int", torch.int64: "i64"}
CHECKS_ALIGNMENT = True  # of calls that it prepared; see anymamba.ops._prepared
THREADS = 256
LANES, RUNS, UNROLL = 32, 8, 8  # of the channel-last kernels
BLOCKS_PER_MULTIPROCESSOR = 8  # that fill the card: more would be shorter, and ending a block costs too


def refusal(operator: Operator, call: Any) -> str | None:
    """Return None, or why these kernels cannot do the call."""
    reason = device_refusal(call.device)
    if reason is not None:
        return reason
    if operator.name == "causal_conv1d_varlen_states":
        return None
    for name, dtype in (("x", call.dtype), ("weight", call.weight_dtype)):
        if dtype not in NAMES:
            return f"{name} is {dtype}; the kernels take fp32, fp16 and bf16"
    if not 2 <= call.width <= 4:
        return f"weight has width {call.width}; the kernels take 2, 3 and 4"
    return None


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
    out = torch.empty_like(x)
    final = x.new_empty(*x.shape[:2], weight.shape[1] - 1) if return_final_states else None
    if x.numel() == 0:
        return out, None if final is None else final.zero_() if initial_states is None else final.copy_(initial_states)
    initial_states = _as(initial_states, x.dtype)
    bias = _bias(bias)
    plan = _forward_plan(
        _key(x),
        _key(weight),
        _key(bias),
        _key(seq_idx),
        _key(initial_states),
        out.stride(),
        final is not None or initial_states is not None,
        silu,
        x.get_device(),
    )
    plan(
        x.data_ptr(), weight.data_ptr(), _pointer(bias), _pointer(seq_idx), _pointer(initial_states), out.data_ptr(),
        _pointer(final),
    )  # fmt: skip
    return out, final


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
    dim, width = weight.shape
    dx = torch.empty_like(x) if dx_out is None else dx_out
    dweight = torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    dinitial = None if initial_states is None else torch.empty_like(initial_states)
    if x.numel() == 0:
        dweight.zero_()
        if dbias is not None:
            dbias.zero_()
        if dinitial is not None:
            dinitial.zero_() if dfinal_states is None else dinitial.copy_(dfinal_states)
        return dx, dweight, dbias, dinitial
    initial, dfinal = _as(initial_states, x.dtype), _as(dfinal_states, x.dtype)
    dinitial_x = (
        dinitial if dinitial is None or dinitial.dtype == x.dtype else torch.empty_like(dinitial, dtype=x.dtype)
    )
    bias32 = _bias(bias)
    dbias32 = dbias if bias is bias32 or dbias is None else torch.empty_like(dbias, dtype=torch.float32)
    along_channels = _along_channels(x.shape, x.stride())
    # A gradient in the other layout would be read in single elements far apart; a copy costs less.
    if dout.dtype != x.dtype or dout.stride(1 if along_channels else 2) != 1:
        dout = torch.empty_like(x).copy_(dout)
    plan, count, add = _backward_plan(
        _key(x), _key(weight), None if bias32 is None else _key(bias32), _key(dout),
        None if seq_idx is None else _key(seq_idx), None if initial is None else _key(initial),
        None if dfinal is None else _key(dfinal),
        dx.stride(), dx.data_ptr() % 16, dweight.stride(), _strides(dbias32), _strides(dinitial_x), silu, x.get_device(),
    )  # fmt: skip
    parts = torch.empty(count, dim, width + 1, dtype=torch.float32, device=x.device) if add else None
    plan(
        x.data_ptr(), weight.data_ptr(), _pointer(bias32), dout.data_ptr(), _pointer(seq_idx), _pointer(initial),
        _pointer(dfinal), dx.data_ptr(), dweight.data_ptr(), _pointer(dbias32), _pointer(parts), _pointer(dinitial_x),
    )  # fmt: skip
    if add is not None:
        add(_pointer(parts), dweight.data_ptr(), _pointer(dbias32))
    if dbias is not None and dbias is not dbias32:
        assert dbias32 is not None
        dbias.copy_(dbias32)
    if dinitial is not None and dinitial is not dinitial_x:
        assert dinitial_x is not None
        dinitial.copy_(dinitial_x)
    return dx, dweight, dbias, dinitial


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    cache_seqlens: torch.Tensor | None,
    conv_state_indices: torch.Tensor | None,
) -> torch.Tensor:
    """See `anymamba.ops.causal_conv1d.CausalConv1dBackend`."""
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    bias = _bias(bias)
    plan = _update_plan(
        _key(x), _key(conv_state), _key(weight), _key(bias), _key(cache_seqlens), _key(conv_state_indices),
        out.stride(), silu, x.get_device(),
    )  # fmt: skip
    plan(
        x.data_ptr(), conv_state.data_ptr(), weight.data_ptr(), _pointer(bias), _pointer(cache_seqlens),
        _pointer(conv_state_indices), out.data_ptr(),
    )  # fmt: skip
    return out


def causal_conv1d_varlen_states(x: torch.Tensor, cu_seqlens: torch.Tensor, state_len: int) -> torch.Tensor:
    """See `anymamba.ops.causal_conv1d.CausalConv1dBackend`."""
    batch, dim = cu_seqlens.shape[0] - 1, x.shape[1]
    states = x.new_empty(batch, state_len, dim)
    if states.numel():
        kernel = _varlen_kernel(x.element_size(), cu_seqlens.dtype, x.get_device())
        parameters = kernel.pack(
            x.data_ptr(),
            cu_seqlens.data_ptr(),
            states.data_ptr(),
            *x.stride(),
            *cu_seqlens.stride(),
            batch,
            dim,
            state_len,
        )
        kernel.launch((-(-dim // 256), min(batch * state_len, 65535), 1), (256, 1, 1), 0, parameters)
    return states.transpose(1, 2)


def prepare(operator: Operator, arguments: tuple[Any, ...]) -> Callable[..., torch.Tensor | None] | None:
    """Return a function that does calls like this one, or None; see `anymamba.ops._prepared`."""
    if operator.name == "causal_conv1d":
        return _prepare_forward(*arguments)
    if operator.name == "causal_conv1d_update":
        return _prepare_update(*arguments)
    return None


class PreparedConvolution:
    """Does convolutions of tensors alike, forward and backward, without options."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool) -> None:
        self._silu, self._device = silu, x.get_device()
        stride = torch.empty_like(x).stride()
        self._beyond = _beyond(x, weight, bias)
        self._forward = _forward_plan(_key(x), _key(weight), _key(bias), None, None, stride, False, silu, self._device)
        self._backwards: list[tuple[Callable[..., bool], Plan, tuple[int, ...], Plan | None]] = []

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return the convolution; None for tensors that do not begin at 16 bytes, if this was prepared for such as do."""
        x_at, weight_at, bias_at = x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr()
        if (x_at | weight_at | bias_at) & self._beyond:
            return None
        out = torch.empty_like(x)
        self._forward(x_at, weight_at, bias_at, 0, 0, out.data_ptr(), 0)
        return out

    def backward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dout: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return dx, dweight, dbias. Hooks that offload saved tensors may bring them back in another layout: all is read."""
        x_at, weight_at, dout_at = x.data_ptr(), weight.data_ptr(), dout.data_ptr()
        bias_at = 0 if bias is None else bias.data_ptr()
        if not (x_at | weight_at | dout_at | bias_at) & 15:
            for check, plan, of_parts, add in self._backwards:
                if check(x, weight, dout) if bias is None else check(x, weight, dout, bias):
                    dx, dweight = torch.empty_like(x), torch.empty_like(weight)
                    dbias = None if bias is None else torch.empty_like(bias)
                    dweight_at, dbias_at = dweight.data_ptr(), 0 if dbias is None else dbias.data_ptr()
                    if add is None:
                        plan(x_at, weight_at, bias_at, dout_at, 0, 0, 0, dx.data_ptr(), dweight_at, dbias_at, 0, 0)
                    else:
                        parts = torch.empty(of_parts, dtype=torch.float32, device=x.device)
                        at = parts.data_ptr()
                        plan(x_at, weight_at, bias_at, dout_at, 0, 0, 0, dx.data_ptr(), dweight_at, dbias_at, at, 0)
                        add(at, dweight_at, dbias_at)
                    return dx, dweight, dbias
            self._settle(x, weight, bias, dout)
        dx, dweight, dbias, _ = causal_conv1d_backward(x, weight, bias, dout, None, None, None, self._silu)
        return dx, dweight, dbias

    def _settle(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dout: torch.Tensor) -> None:
        """Keep the launches of a backward of aligned tensors like these; a few kinds, for they are tried one by one."""
        if dout.dtype != x.dtype or dout.stride(1 if _along_channels(x.shape, x.stride()) else 2) != 1:
            return
        check = same_kind((x, weight, dout) if bias is None else (x, weight, dout, bias))
        if check is None or len(self._backwards) >= 4:
            return
        dx, dweight = torch.empty_like(x), torch.empty_like(weight)
        dbias = None if bias is None else torch.empty_like(bias)
        plan, count, add = _backward_plan(
            _key(x), _key(weight), _key(bias), _key(dout), None, None, None, dx.stride(), 0, dweight.stride(),
            _strides(dbias), (), self._silu, self._device,
        )  # fmt: skip
        self._backwards.append((check, plan, (count, weight.shape[0], weight.shape[1] + 1), add))


def _prepare_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> PreparedConvolution | None:
    if x.numel() == 0 or bias is not _bias(bias):
        return None
    return PreparedConvolution(x, weight, bias, silu)


def _prepare_update(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool,
    cache_seqlens: torch.Tensor | None, conv_state_indices: torch.Tensor | None,
) -> Callable[..., torch.Tensor | None] | None:  # fmt: skip
    if x.numel() == 0 or bias is not _bias(bias):
        return None
    columns, out = x, torch.empty_like(x)
    if x.dim() == 2:  # (batch, dim): the kernel sees one column, the caller gets two dimensions
        columns, out = columns.unsqueeze(-1), out.unsqueeze(-1)
    plan = _update_plan(
        _key(columns), _key(conv_state), _key(weight), _key(bias), _key(cache_seqlens), _key(conv_state_indices),
        out.stride(), silu, x.get_device(),
    )  # fmt: skip

    beyond = _beyond(x, conv_state, weight, bias, cache_seqlens, conv_state_indices)

    def call(
        x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        cache_seqlens: torch.Tensor | None, conv_state_indices: torch.Tensor | None,
    ) -> torch.Tensor | None:  # fmt: skip
        at = (
            x.data_ptr(), conv_state.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
            0 if cache_seqlens is None else cache_seqlens.data_ptr(),
            0 if conv_state_indices is None else conv_state_indices.data_ptr(),
        )  # fmt: skip
        if (at[0] | at[1] | at[2] | at[3] | at[4] | at[5]) & beyond:
            return None
        out = torch.empty_like(x)
        plan(*at, out.data_ptr())
        return out

    return call


def variants(every: bool = False) -> Iterator[Variant]:
    """Yield the kernels that models use; with `every`, all that can be asked for but for mixed dtypes of bias and states."""
    widths = (2, 3, 4) if every else (4,)
    pairs = [(x, w) for x in NAMES for w in NAMES if every or w in (x, torch.float32)]
    for x, w in pairs:
        for width in widths:
            for silu in (True, False) if every else (True,):
                for direction in ("forward", "backward"):
                    for seq in (None, torch.int32) if every else (None,):
                        for channels in (4, 1) if every else (4,):
                            yield _variant(direction, channels, x, w, w, seq, width, silu, False, False)
                        for aligned in (True, False):
                            for has_states in (False, True) if every else (False,):
                                for pieces in (2, 4) if direction == "forward" else (2,):
                                    yield _variant(direction, 0, x, w, w, seq, width, silu, aligned, has_states, pieces)
                for packed in (True, False) if width == 4 else (False,):
                    yield _update_variant(x, x, w, w, None, None, width, silu, packed)
    for w in NAMES:
        for width in widths:
            yield _sum_variant(w, w, width)
    for size in (2, 4, 8) if every else ():
        yield _varlen_variant(size, torch.int32)


# --- kernels


def _variant(
    direction: str, channels: int, x: torch.dtype, w: torch.dtype, bias: torch.dtype, seq: torch.dtype | None, width: int,
    silu: bool, aligned: bool, has_states: bool, pieces: int = 2,
) -> Variant:  # fmt: skip
    name = f"causal_conv1d_{direction}" + ("_channel_last" if channels else "")
    defines: dict[str, object] = {
        "X": NAMES[x], "W": NAMES[w], "BIAS": NAMES[bias], "SEQ": "int" if seq is None else INTEGERS[seq],
        "HAS_SEQ": seq is not None, "HAS_STATES": has_states, "WIDTH": width, "SILU": silu,
    }  # fmt: skip
    if channels:
        defines["CHANNELS"] = channels
    else:
        defines["ALIGNED"] = aligned
        if direction == "forward":
            defines["PIECES"] = pieces
    return Variant.of(f"{name}.cu", name, **defines)


def _update_variant(
    x: torch.dtype, state: torch.dtype, w: torch.dtype, bias: torch.dtype, length: torch.dtype | None,
    index: torch.dtype | None, width: int, silu: bool, packed: bool,
) -> Variant:  # fmt: skip
    return Variant.of(
        "causal_conv1d_update.cu", "causal_conv1d_update", X=NAMES[x], STATE=NAMES[state], W=NAMES[w], BIAS=NAMES[bias],
        LENGTH="int" if length is None else INTEGERS[length], INDEX="int" if index is None else INTEGERS[index],
        WIDTH=width, SILU=silu, PACKED=packed,
    )  # fmt: skip


def _sum_variant(w: torch.dtype, bias: torch.dtype, width: int) -> Variant:
    name = "causal_conv1d_sum_parts"
    return Variant.of(f"{name}.cu", name, W=NAMES[w], BIAS=NAMES[bias], WIDTH=width)


def _varlen_variant(size: int, index: torch.dtype) -> Variant:
    name = "causal_conv1d_varlen_states"
    element = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}[size]
    return Variant.of(f"{name}.cu", name, X=element, INDEX=INTEGERS[index])


@cached
def _varlen_kernel(size: int, index: torch.dtype, device: int) -> Kernel:
    return runtime().load(_varlen_variant(size, index), device)


@cached
def _multiprocessors(device: int) -> int:
    return int(runtime().driver.multiprocessors(device))


# --- plans: what a call with tensors like these launches, settled once


class Facts(NamedTuple):
    """What a plan depends on of a tensor; the rest is a pointer."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    past: int  # the address modulo 16: whether vectors fit


# What the plans are looked up by: plain tuples, four times cheaper to make than `Facts`.
Key = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int]


@overload
def _key(tensor: torch.Tensor) -> Key: ...
@overload
def _key(tensor: torch.Tensor | None) -> Key | None: ...
def _key(tensor: torch.Tensor | None) -> Key | None:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16)


def _facts(key: Key | None) -> Facts | None:
    return None if key is None else Facts(*key)


def _stride(facts: Facts | None, dims: int) -> tuple[int, ...]:
    return (0,) * dims if facts is None else facts.stride


@cached
def _forward_plan(
    x_key: Key, weight_key: Key, bias_key: Key | None, seq_idx_key: Key | None, initial_key: Key | None,
    out_stride: tuple[int, ...], has_states: bool, silu: bool, device: int,
) -> Plan:  # fmt: skip
    x, weight = Facts(*x_key), Facts(*weight_key)
    out = x._replace(stride=out_stride, past=0)  # fresh tensors begin at more than 16 bytes
    bias, seq_idx, initial = _facts(bias_key), _facts(seq_idx_key), _facts(initial_key)
    batch, dim, seqlen = x.shape
    channels = _channels(x, out)
    aligned = not channels and _aligned(1, x, out)
    pieces = _pieces(1, x, aligned)
    each = 4 if pieces >= 1024 else 2  # of one thread: long rows have threads enough
    kind = shape_class(SIZES[x.dtype], batch * dim, seqlen)
    if not channels:
        found = TUNED.chosen(kind, device, PIECES)
        each = each if found is None else found["pieces"]
    variant = _variant(
        "forward", channels, x.dtype, weight.dtype, (bias or weight).dtype, seq_idx and seq_idx.dtype, weight.shape[1],
        silu, aligned, has_states, each,
    )  # fmt: skip
    kernel = runtime().load(variant, device)
    strides = (
        *x.stride, *out.stride, *weight.stride, *_stride(bias, 1), *_stride(seq_idx, 2), *_stride(initial, 3),
    )  # fmt: skip
    if channels:
        found = TUNED_CHANNEL_LAST.chosen(kind, device, RUN_LENGTHS)
        run, tiles, grid = _channel_last_grid(
            batch, dim, seqlen, channels, device, None if found is None else found["run"]
        )
        return kernel.plan(grid, (LANES * RUNS, 1, 1), 0, *strides, batch, dim, seqlen, run, tiles)
    bits = min((-(-pieces // each) - 1).bit_length(), 8)
    groups = -(-dim // (THREADS >> bits))
    grid = (batch * groups, -(-pieces // (each << bits)), 1)
    return kernel.plan(grid, (THREADS, 1, 1), 0, *strides, batch, dim, seqlen, bits, groups)


@cached
def _backward_plan(
    x_key: Key, weight_key: Key, bias_key: Key | None, dout_key: Key, seq_idx_key: Key | None, initial_key: Key | None,
    dfinal_key: Key | None, dx_stride: tuple[int, ...], dx_past: int, dweight_stride: tuple[int, ...],
    dbias_stride: tuple[int, ...], dinitial_stride: tuple[int, ...], silu: bool, device: int,
) -> tuple[Plan, int, Plan | None]:  # fmt: skip
    """Return the launch, how many blocks leave sums of dweight and dbias, and the launch that adds these (None: one)."""
    x, weight, dout = Facts(*x_key), Facts(*weight_key), Facts(*dout_key)
    bias, seq_idx, initial, dfinal = _facts(bias_key), _facts(seq_idx_key), _facts(initial_key), _facts(dfinal_key)
    dx = x._replace(stride=dx_stride, past=dx_past)
    if not dbias_stride:
        dbias_stride = (0,)
    batch, dim, seqlen = x.shape
    width = weight.shape[1]
    channels = _channels(x, dout, dx)
    aligned = not channels and _aligned(2, x, dout, dx)
    bias_dtype = (bias or weight).dtype
    variant = _variant(
        "backward", channels, x.dtype, weight.dtype, bias_dtype, seq_idx and seq_idx.dtype, width, silu, aligned,
        initial is not None or dfinal is not None,
    )  # fmt: skip
    kernel = runtime().load(variant, device)
    strides = (
        *x.stride, *dout.stride, *dx.stride, *weight.stride, *_stride(bias, 1), *_stride(seq_idx, 2),
        *_stride(initial, 3), *_stride(dfinal, 3), *dweight_stride, *dbias_stride, *(dinitial_stride or (0, 0, 0)),
    )  # fmt: skip
    kind = shape_class(SIZES[x.dtype], batch * dim, seqlen)
    if channels:
        found = TUNED_BACKWARD_CHANNEL_LAST.chosen(kind, device, RUN_LENGTHS)
        run, tiles, grid = _channel_last_grid(
            batch, dim, seqlen, channels, device, None if found is None else found["run"]
        )
        plan = kernel.plan(grid, (LANES * RUNS, 1, 1), 0, *strides, batch, dim, seqlen, run, tiles)
        count = grid[0]
    else:
        found = TUNED_BACKWARD.chosen(kind, device, BLOCKS)
        bits, tiles, along_time, grid = _rows_grid(x, aligned, device, None if found is None else found["blocks"])
        plan = kernel.plan(grid, (THREADS, 1, 1), 0, *strides, batch, dim, seqlen, bits, tiles, along_time)
        count = grid[1]
    if count == 1:
        return plan, 1, None
    add = runtime().load(_sum_variant(weight.dtype, bias_dtype, width), device)
    blocks = -(-dim * (width + 1) // 128)
    return plan, count, add.plan((blocks, 1, 1), (128, 1, 1), 0, *dweight_stride, *dbias_stride, count, dim)


@cached
def _update_plan(
    x_key: Key, state_key: Key, weight_key: Key, bias_key: Key | None, lengths_key: Key | None,
    indices_key: Key | None, out_stride: tuple[int, ...], silu: bool, device: int,
) -> Plan:  # fmt: skip
    x, state, weight = Facts(*x_key), Facts(*state_key), Facts(*weight_key)
    bias, lengths, indices = _facts(bias_key), _facts(lengths_key), _facts(indices_key)
    batch, dim, seqlen = x.shape
    packed = (
        seqlen == 1 and state.shape[2] == 4 and weight.shape[1] == 4 and lengths is None
        and _in_fours(state) and _in_fours(weight)
    )  # fmt: skip
    variant = _update_variant(
        x.dtype, state.dtype, weight.dtype, (bias or weight).dtype, lengths and lengths.dtype, indices and indices.dtype,
        weight.shape[1], silu, packed,
    )  # fmt: skip
    kind = f"channels {tuned.power(dim)}, batch {tuned.power(batch)}, {SIZES[x.dtype]} bytes"
    found = TUNED_UPDATE.chosen(kind, device, UPDATES) or {"threads": 128, "sequences": 1}
    threads, along = found["threads"], min(-(-batch // found["sequences"]), 65535)
    return runtime().load(variant, device).plan(
        (-(-dim // threads), along, 1), (threads, 1, 1), 0, *x.stride, *state.stride, *weight.stride,
        *_stride(bias, 1), *_stride(lengths, 1), *_stride(indices, 1), *out_stride, batch, dim, seqlen,
        state.shape[2],
    )  # fmt: skip


# --- tuning

TUNED = _tuning.tunable(
    "causal_conv1d forward", "causal_conv1d_forward.cu",
    pieces="pieces of 16 bytes that a thread reads before it computes: more are on their way, fewer leave more threads",
)  # fmt: skip
PIECES = ({"pieces": 2}, {"pieces": 4})
TUNED_BACKWARD = _tuning.tunable(
    "causal_conv1d backward", "causal_conv1d_backward.cu",
    blocks="blocks a multiprocessor at least: more are shorter and spread better, but the end of each costs half a tile",
)  # fmt: skip
BLOCKS = tuple({"blocks": count} for count in (2, 4, 6, 8, 12, 16, 32))
_RUN = "columns that a thread walks: long runs read fewer columns twice, short ones give more blocks"
TUNED_CHANNEL_LAST = _tuning.tunable(
    "causal_conv1d forward, channel last", "causal_conv1d_forward_channel_last.cu", run=_RUN
)
TUNED_BACKWARD_CHANNEL_LAST = _tuning.tunable(
    "causal_conv1d backward, channel last", "causal_conv1d_backward_channel_last.cu", run=_RUN
)
RUN_LENGTHS = tuple({"run": run} for run in (8, 16, 24, 32, 48, 64, 96, 128, 256))
TUNED_UPDATE = _tuning.tunable(
    "causal_conv1d_update", "causal_conv1d_update.cu",
    threads="threads (channels) of a block",
    sequences="sequences that a block walks one after the other: more make fewer blocks",
)  # fmt: skip
UPDATES = tuple({"threads": t, "sequences": s} for t in (32, 64, 128, 256) for s in (1, 2, 4, 8))


def shape_class(itemsize: int, channels: int, seqlen: int) -> str:
    """Return the sizes that the best parameters depend on, in words."""
    return f"channels {tuned.power(channels)}, length {tuned.power(seqlen)}, {itemsize} bytes"


# --- geometry


def _along_channels(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether neighbours in memory are channels rather than columns."""
    return stride[1] < stride[2] or (stride[1] == stride[2] and shape[2] == 1)


def _channels(*tensors: Facts) -> int:
    """Return how many channels a thread of the channel-last kernel takes (1 or 4), 0 for the kernel of rows."""
    if not _along_channels(tensors[0].shape, tensors[0].stride):
        return 0
    if tensors[0].shape[1] % 4:
        return 1
    for tensor in tensors:
        of_batch, of_dim, of_time = tensor.stride
        if of_dim != 1 or of_batch % 4 or of_time % 4 or tensor.past % (4 * SIZES[tensor.dtype]):
            return 1
    return 4


def _in_fours(tensor: Facts) -> bool:
    """Return whether the last dimension, of four elements, can be moved by one access."""
    *others, last = tensor.stride
    return last == 1 and not any(stride % 4 for stride in others) and not tensor.past % min(4 * SIZES[tensor.dtype], 16)


def _aligned(vectors: int, *tensors: Facts) -> bool:
    """Return whether all rows are contiguous, start at 16 bytes and are whole pieces of that many vectors."""
    for tensor in tensors:
        vector = 16 // SIZES[tensor.dtype]
        of_batch, of_dim, of_time = tensor.stride
        if of_time != 1 or of_batch % vector or of_dim % vector or tensor.past or tensor.shape[2] % (vectors * vector):
            return False
    return True


def _pieces(vectors: int, x: Facts, aligned: bool) -> int:
    """Return how many pieces of that many vectors a row has, at most: its start may lie within a vector."""
    vector = 16 // SIZES[x.dtype]
    return -(-(x.shape[2] + (0 if aligned else vector - 1)) // (vectors * vector))


def _rows_grid(
    x: Facts, aligned: bool, device: int, blocks: int | None = None
) -> tuple[int, int, int, tuple[int, int, int]]:
    """Return log2 of the threads along time, the tiles of a channel, those along time, and the grid (backward)."""
    batch, dim, _ = x.shape
    pieces = _pieces(2, x, aligned)
    bits = min((pieces - 1).bit_length(), 8)
    along_time = -(-pieces // (1 << bits))
    tiles = -(-batch // (THREADS >> bits)) * along_time
    splits = min(tiles, -(-(blocks or BLOCKS_PER_MULTIPROCESSOR) * _multiprocessors(device) // dim), 65535)
    splits = -(-tiles // -(-tiles // splits))  # no more blocks than have as many tiles as the fullest
    return bits, tiles, along_time, (dim, splits, 1)


def _channel_last_grid(
    batch: int, dim: int, seqlen: int, channels: int, device: int, run: int | None = None
) -> tuple[int, int, tuple[int, int, int]]:
    """Return the columns of a thread's run, the tiles along time, and the grid.

    Long runs cost least (a run reads WIDTH - 1 columns and the weights before it starts), as long as two blocks a
    multiprocessor are left and a tile of 8 runs is not longer than the row.
    """
    across = -(-dim // (LANES * channels))
    if run is None:
        run = min(max(batch * seqlen * across // (2 * _multiprocessors(device) * RUNS), UNROLL), 128)
    run = min(run, -(-seqlen // RUNS))
    run = -(-run // UNROLL) * UNROLL
    tiles = -(-seqlen // (RUNS * run))
    return run, tiles, (batch * tiles, across, 1)


# --- small things


def _beyond(*tensors: torch.Tensor | None) -> int:
    """Return the bits of addresses that must be zero in calls alike: if these begin at 16 bytes, those must too."""
    return 0 if any(tensor is not None and tensor.data_ptr() & 15 for tensor in tensors) else 15


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _strides(tensor: torch.Tensor | None) -> tuple[int, ...]:
    return () if tensor is None else tensor.stride()


def _as(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype)


def _bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    return bias if bias is None or bias.dtype in NAMES else bias.float()
