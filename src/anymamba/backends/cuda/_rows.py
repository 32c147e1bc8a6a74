"""What the norms' and gates' kernels share on the host: which tensors they read as they are, and how a row is split."""

from __future__ import annotations

from typing import NamedTuple

import torch

from anymamba.backends.cuda import device_refusal
from anymamba.backends.cuda.runtime import Kernel, Plan, Variant, cached, runtime

__all__ = [
    "BACKWARD", "LONGEST", "NAMES", "SIZES", "Split", "alignment", "known", "refusal_of", "rows_of", "split", "sum_parts",
    "walkers", "writable",
]  # fmt: skip

NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
SIZES = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}
LONGEST = 8192
"""Columns normalised together that are kept in registers: 512 threads of 16."""


BACKWARD = 8
"""Columns of a thread in a backward: it keeps four to six values of each in registers, the forward one to three."""


class Split(NamedTuple):
    """How columns are given to threads; the macros of norm.cuh."""

    vector: int
    lanes: int
    packs: int
    units: int


def refusal_of(device: torch.device, size: int, **dtypes: torch.dtype) -> str | None:
    """Return None, or why the kernels cannot do a call with these dtypes and so many columns normalised together."""
    reason = device_refusal(device)
    if reason is not None:
        return reason
    for name, dtype in dtypes.items():
        if dtype not in NAMES:
            return f"{name} is {dtype}; the kernels take fp32, fp16 and bf16"
    if size > LONGEST:
        return f"{size} columns are normalised together; the kernels keep up to {LONGEST} in registers"
    return None


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows themselves if their columns are contiguous, else a copy."""
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


def known(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in a dtype that the kernels take."""
    return tensor if tensor.dtype in NAMES else tensor.float()


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor (rows, dim) itself if its columns are contiguous, else a fresh one to copy from afterwards."""
    packed = tensor.stride(1) == 1 or tensor.shape[1] == 1
    return tensor if packed else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def alignment(*tensors: torch.Tensor | None) -> bool:
    """Return whether every row (or vector) begins at a multiple of 16 bytes."""
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.data_ptr() % 16:
            return False
        if tensor.dim() == 2 and tensor.shape[0] > 1 and tensor.stride(0) * tensor.element_size() % 16:
            return False
    return True


def split(size: int, dtype: torch.dtype, aligned: bool, each: int = 16) -> Split:
    """Return the split of `size` columns of this dtype: `each` a thread if 512 threads are enough for that."""
    whole = 16 // SIZES[dtype]
    vector = whole if aligned and size % whole == 0 else 1
    lanes = min(max(32, 1 << (-(-size // each) - 1).bit_length()), 512)
    return Split(vector, lanes, -(-size // (lanes * vector)), 4 if lanes == 32 else 1)


def walkers(kernel: Kernel, rows: int, groups: int, cut: Split) -> int:
    """Return how many blocks walk the rows of a group: as many as are resident at once, no more than there are rows."""
    resident = int(runtime().driver.multiprocessors(kernel.device)) * kernel.occupancy(cut.lanes * cut.units)
    return max(1, min(-(-resident // groups), -(-rows // cut.units)))


@cached
def _sum_plan(dtype: torch.dtype, stride: int, count: int, dim: int, device: int) -> Plan:
    kernel = runtime().load(Variant.of("norm_sum_parts.cu", "norm_sum_parts", W=NAMES[dtype]), device)
    return kernel.plan((-(-dim // 32), 1, 1), (512, 1, 1), 0, stride, count, dim)


def sum_parts(parts: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the sum over parts (count, dim) in the dtype of `like`, added in a fixed order."""
    gradient = torch.empty_like(like)
    count, dim = parts.shape
    plan = _sum_plan(gradient.dtype, gradient.stride(0), count, dim, like.get_device())
    plan(parts.data_ptr(), gradient.data_ptr())
    return gradient
