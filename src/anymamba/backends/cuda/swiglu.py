"""SwiGLU on the GPU: one kernel for forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from anymamba.backends import Operator, tuned
from anymamba.backends.cuda import _tuning
from anymamba.backends.cuda._rows import NAMES, SIZES, alignment, refusal_of, rows_of
from anymamba.backends.cuda.runtime import Plan, Variant, cached, runtime

__all__ = ["refusal", "swiglu_backward", "swiglu_forward", "variants"]

THREADS = tuple({"threads": count} for count in (64, 128, 256))
TUNED, TUNED_BACKWARD = (
    _tuning.tunable(f"swiglu {way}", "swiglu.cu", threads="threads of a block; one has 16 bytes of a row")
    for way in ("forward", "backward")
)


def refusal(operator: Operator, call: Any) -> str | None:
    """Return None, or why this kernel cannot do the call."""
    return refusal_of(call.device, 0, xy=call.dtype)


def swiglu_forward(xy: torch.Tensor) -> torch.Tensor:
    """See `anymamba.ops.swiglu.SwiGLUBackend`."""
    out = torch.empty(xy.shape[0], xy.shape[1] // 2, dtype=xy.dtype, device=xy.device)
    if out.numel():
        _run(rows_of(xy), None, None, out)
    return out


def swiglu_backward(
    xy: torch.Tensor, dout: torch.Tensor, recompute_out: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `anymamba.ops.swiglu.SwiGLUBackend`."""
    dxy = torch.empty_like(xy)
    out = torch.empty(xy.shape[0], xy.shape[1] // 2, dtype=xy.dtype, device=xy.device) if recompute_out else None
    if dxy.numel():
        given = rows_of(dout if dout.dtype in NAMES else dout.float())
        written = dxy if dxy.stride(1) == 1 else torch.empty(xy.shape, dtype=xy.dtype, device=xy.device)
        _run(rows_of(xy), given, written, out)
        if written is not dxy:
            dxy.copy_(written)
    return dxy, out


def variants(every: bool = False) -> Iterator[Variant]:
    """Yield the aligned kernels; with `every`, fp16 and the slower accesses too."""
    f32, f16, bf16 = NAMES
    for dtype in (bf16, f32, f16) if every else (bf16, f32):
        for vector in (16 // SIZES[dtype], 1) if every else (16 // SIZES[dtype],):
            for large in (False, True) if every else (False,):
                yield _variant(dtype, None, vector, large)
                yield _variant(dtype, dtype, vector, large)


def _run(xy: torch.Tensor, dout: torch.Tensor | None, dxy: torch.Tensor | None, out: torch.Tensor | None) -> None:
    rows, dim, whole = xy.shape[0], xy.shape[1] // 2, 16 // SIZES[xy.dtype]
    vector = whole if dim % whole == 0 and alignment(xy, dout, dxy, out) else 1
    strides = tuple(0 if t is None else t.stride(0) for t in (xy, dout, dxy, out))
    plan = _plan(xy.dtype, None if dout is None else dout.dtype, vector, strides, rows, dim, xy.get_device())
    plan(*(0 if t is None else t.data_ptr() for t in (xy, dout, dxy, out)))


def _variant(x: torch.dtype, dout: torch.dtype | None, vector: int, large: bool) -> Variant:
    return Variant.of(
        "swiglu.cu", "swiglu", X=NAMES[x], DOUT=NAMES[dout or x], V=vector, BACKWARD=dout is not None,
        INDEX="i64" if large else "unsigned",
    )  # fmt: skip


@cached
def _plan(
    x: torch.dtype, dout: torch.dtype | None, vector: int, strides: tuple[int, ...], rows: int, dim: int, device: int
) -> Plan:
    across = dim // vector
    kind = f"rows {tuned.power(rows)}, columns {tuned.power(dim)}, {vector} at a time"
    found = (TUNED if dout is None else TUNED_BACKWARD).chosen(kind, device, THREADS)
    threads = 256 if found is None else found["threads"]
    blocks = -(-rows * across // threads)
    kernel = runtime().load(_variant(x, dout, vector, blocks * threads >= 2**31), device)
    return kernel.plan((blocks, 1, 1), (threads, 1, 1), 0, *strides, rows, dim, across)
