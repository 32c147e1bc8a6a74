"""One decoding step on the GPU: one kernel for Mamba-1 and Mamba-2, any batch, every option.

The kernel's file says how it works and what bounds it. Here: which variant, and the launch, settled once for tensors alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from anymamba.backends import Operator, tuned
from anymamba.backends.cuda import _tuning, device_refusal
from anymamba.backends.cuda.runtime import Plan, Variant, cached, runtime

__all__ = ["prepare", "refusal", "selective_state_update", "variants"]

NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
SIZES = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}
INTEGERS = {torch.int32: "int", torch.int64: "i64"}
CHECKS_ALIGNMENT = True
USUAL = {"threads": 128, "blocks": 32, "share": 1}
TUNED = _tuning.tunable(
    "selective_state_update", "selective_state_update.cu",
    threads="threads of a block",
    blocks="blocks a multiprocessor; beyond, blocks walk the batch and read A once for several sequences",
    share="16-byte vectors of a channel's states that one lane has at least: more lanes a channel at 1, fewer at 2 and 4",
)  # fmt: skip

# What a plan is looked up by: shape, strides, dtype, address modulo 16.
Key = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int]


def refusal(operator: Operator, call: Any) -> str | None:
    """Return None, or why this kernel cannot do the call."""
    reason = device_refusal(call.device)
    if reason is not None:
        return reason
    for name, dtype in (("x", call.dtype), ("state", call.state_dtype)):
        if dtype not in NAMES:
            return f"{name} is {dtype}; the kernel takes fp32, fp16 and bf16"
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
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    dt, A, B, C = _known(dt), _known(A), _known(B), _known(C)
    D, z, dt_bias = (None if option is None else _known(option) for option in (D, z, dt_bias))
    plan = _plan(
        _key(state), _key(x), _key(dt), _key(A), _key(B), _key(C), None if D is None else _key(D),
        None if z is None else _key(z), None if dt_bias is None else _key(dt_bias),
        None if state_batch_indices is None else _key(state_batch_indices), out.stride(), dt_softplus, x.get_device(),
    )  # fmt: skip
    plan(
        state.data_ptr(), x.data_ptr(), dt.data_ptr(), A.data_ptr(), B.data_ptr(), C.data_ptr(),
        0 if D is None else D.data_ptr(), 0 if z is None else z.data_ptr(), 0 if dt_bias is None else dt_bias.data_ptr(),
        0 if state_batch_indices is None else state_batch_indices.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out


def prepare(operator: Operator, arguments: tuple[Any, ...]) -> Callable[..., torch.Tensor | None] | None:
    """Return a function that does calls like this one, or None; see `anymamba.ops._prepared`. Arguments as the caller's."""
    state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, indices = arguments
    if x.numel() == 0 or any(t is not None and t.dtype not in NAMES for t in (dt, A, B, C, D, z, dt_bias)):
        return None
    out = torch.empty_like(x)
    device = x.get_device()
    if state.dim() == 3:  # without heads
        state, A, out = state.unsqueeze(1), A.unsqueeze(0), out.unsqueeze(1)
    x, dt, z, B, C = (t.unsqueeze(1) if t is not None and t.dim() == 2 else t for t in (x, dt, z, B, C))
    D, dt_bias = (t.unsqueeze(0) if t is not None and t.dim() == 1 else t for t in (D, dt_bias))
    keys = [None if t is None else _key(t) for t in (state, x, dt, A, B, C, D, z, dt_bias, indices)]
    beyond = _beyond(state, x, dt, A, B, C, D, z, dt_bias, indices)
    plan = _plan(*keys, out.stride(), bool(dt_softplus), device)  # type: ignore[arg-type, call-arg]  # mypy cannot count them

    def call(
        state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
        D: torch.Tensor | None, z: torch.Tensor | None, dt_bias: torch.Tensor | None, dt_softplus: bool,
        indices: torch.Tensor | None,
    ) -> torch.Tensor | None:  # fmt: skip
        at = (
            state.data_ptr(), x.data_ptr(), dt.data_ptr(), A.data_ptr(), B.data_ptr(), C.data_ptr(),
            0 if D is None else D.data_ptr(), 0 if z is None else z.data_ptr(),
            0 if dt_bias is None else dt_bias.data_ptr(), 0 if indices is None else indices.data_ptr(),
        )  # fmt: skip
        if (at[0] | at[1] | at[2] | at[3] | at[4] | at[5] | at[6] | at[7] | at[8] | at[9]) & beyond:
            return None
        out = torch.empty_like(x)
        plan(*at, out.data_ptr())
        return out

    return call


def variants(every: bool = False) -> Iterator[Variant]:
    """Yield the kernels that models use; with `every`, the slower accesses and fp16 too."""
    f32, f16, bf16 = NAMES
    kinds = [(bf16, bf16), (bf16, f32), (f32, f32)] + ([(f16, f16), (f16, f32)] if every else [])
    for x, state in kinds:
        # Mamba-1: A and dt_bias in fp32; Mamba-2: A one number a head.
        for dstate, tied in ((16, False), (128, True), (64, True)):
            for vector in (True, False) if every else (True,):
                options = (True, not tied, True)  # Mamba-2 gates in its norm
                yield _variant(state, x, x, f32, x, x, f32, x, f32, None, dstate, tied, vector, True, options, not tied)


def _beyond(*tensors: torch.Tensor | None) -> int:
    """Return the bits of addresses that must be zero in calls alike: if these begin at 16 bytes, those must too."""
    return 0 if any(tensor is not None and tensor.data_ptr() & 15 for tensor in tensors) else 15


def _known(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in NAMES else tensor.float()


def _key(tensor: torch.Tensor) -> Key:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16


@cached
def _plan(
    state: Key, x: Key, dt: Key, A: Key, B: Key, C: Key, D: Key | None, z: Key | None, dt_bias: Key | None,
    indices: Key | None, out_stride: tuple[int, ...], softplus: bool, device: int,
) -> Plan:  # fmt: skip
    batch, heads, headdim = x[0]
    dstate = state[0][3]
    tied = A[1][1] == 0 and A[1][2] == 0
    wide = [state, B, C] if tied else [state, A, B, C]
    kind = (
        f"channels {tuned.power(heads * headdim)}, batch {tuned.power(batch)}, states {tuned.power(dstate)}, "
        f"{SIZES[state[2]]} bytes{', one decay a head' if tied else ''}"
    )
    how = TUNED.chosen(kind, device, offered(dstate, 16 // SIZES[state[2]])) or USUAL
    # Without an option its dtype does not matter: one that is there anyway makes no variant of its own.
    variant = _variant(
        state[2], x[2], dt[2], A[2], B[2], C[2], (D or A)[2], (z or x)[2], (dt_bias or A)[2],
        None if indices is None else indices[2], dstate, tied, _vectors(wide, dstate, state[2]), softplus,
        (D is not None, z is not None, dt_bias is not None), heads == 1, how["threads"], how["share"],
    )  # fmt: skip
    lanes = int(dict(variant.defines)["LANES"])
    across = -(-heads * headdim // (how["threads"] // lanes))
    multiprocessors = int(runtime().driver.multiprocessors(device))
    along = min(batch, max(1, -(-how["blocks"] * multiprocessors // across)), 65535)
    along = -(-batch // -(-batch // along))  # no more blocks than have as many sequences as the fullest
    strides = (
        *state[1], *x[1], *dt[1], *A[1], *B[1], *C[1], *(D[1] if D else (0, 0)), *(z[1] if z else (0, 0, 0)),
        *(dt_bias[1] if dt_bias else (0, 0)), *(indices[1] if indices else (0,)), *out_stride,
    )  # fmt: skip
    return (
        runtime()
        .load(variant, device)
        .plan((across, along, 1), (how["threads"], 1, 1), 0, *strides, batch, heads, headdim, dstate, heads // B[0][1])
    )


def offered(dstate: int, elements: int) -> list[dict[str, int]]:
    """Return what can be chosen instead of the usual; `elements` of a state make 16 bytes."""
    vectors = -(-dstate // elements)
    return [
        {"threads": threads, "blocks": blocks, "share": share}
        for threads in (64, 128, 256)
        for blocks in (8, 16, 32, 64)
        for share in (1, 2, 4)
        if share == 1 or share < 2 * vectors
    ]


def _vectors(tensors: list[Key], dstate: int, state_dtype: torch.dtype) -> bool:
    """Return whether all of these are contiguous along the states and aligned for 16-byte accesses."""
    if dstate % (16 // SIZES[state_dtype]):
        return False
    for _, stride, dtype, past in tensors:
        step = 16 // SIZES[dtype]
        if past or stride[-1] != 1 or any(other % step for other in stride[:-1]):
            return False
    return True


def _variant(
    state: torch.dtype, x: torch.dtype, dt: torch.dtype, A: torch.dtype, B: torch.dtype, C: torch.dtype, D: torch.dtype,
    z: torch.dtype, bias: torch.dtype, indices: torch.dtype | None, dstate: int, tied: bool, vector: bool, softplus: bool,
    options: tuple[bool, bool, bool], one_head: bool, threads: int = 128, share: int = 1,
) -> Variant:  # fmt: skip
    elements = 16 // SIZES[state]
    lanes = max(1, min(1 << (-(-dstate // elements) - 1).bit_length(), 32) // share)
    return Variant.of(
        "selective_state_update.cu", "selective_state_update", STATE=NAMES[state], X=NAMES[x], DT=NAMES[dt],
        A_TYPE=NAMES[A], B_TYPE=NAMES[B], C_TYPE=NAMES[C], D_TYPE=NAMES[D], Z_TYPE=NAMES[z], BIAS=NAMES[bias],
        INDEX="int" if indices is None else INTEGERS[indices], V=elements, THREADS=threads, LANES=lanes,
        SINGLE=lanes * elements >= dstate, WHOLE=dstate % (lanes * elements) == 0, TIED=tied, VECTOR=vector, SOFTPLUS=softplus,
        HAS_D=options[0], HAS_Z=options[1], HAS_BIAS=options[2], ONE_HEAD=one_head,
    )  # fmt: skip
