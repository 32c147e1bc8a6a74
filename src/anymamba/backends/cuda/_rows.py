"""What the norms' and gates' kernels share on the host: which tensors they read as they are, and how a row is split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch

from anymamba.backends import tuned
from anymamba.backends.cuda import device_refusal
from anymamba.backends.cuda._tuning import Tunable
from anymamba.backends.cuda.runtime import Kernel, Plan, Variant, cached, runtime
from anymamba.ops._rows import as_rows

__all__ = [
    "BACKWARD_MEANING", "CHECKS_ALIGNMENT", "FORWARD_MEANING", "LONGEST", "NAMES", "SIZES", "Split", "alignment",
    "backward_split", "bits_that_must_be_zero", "forward_split", "in_place", "known", "refusal_of", "rows_of",
    "sizes_and_options", "sum_parts", "tuned_split", "walkers", "writable",
]  # fmt: skip

NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
SIZES = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}
LONGEST = 8192
"""Columns normalised together that are kept in registers: 512 threads of 16 columns, where a multiprocessor's registers end.

Beyond it a row would have to be read twice, or lie in shared memory: a kernel of its own for rows that no published Mamba has
(the widest normalise 8192 columns together). PyTorch's backend takes them.
"""


CHECKS_ALIGNMENT = True
"""Of the prepared calls; see `anymamba.ops._prepared`."""


class Split(NamedTuple):
    """How columns are given to threads; the macros of norm.cuh."""

    vector: int
    lanes: int
    packs: int
    units: int
    blocks: int = 1
    full: bool = False
    ahead: bool = False

    @property
    def threads(self) -> int:
        return self.lanes * self.units

    def defines(self) -> dict[str, object]:
        """Return the macros, but for AHEAD, which forwards do not have."""
        return {
            "V": self.vector, "LANES": self.lanes, "PACKS": self.packs, "UNITS": self.units, "BLOCKS": self.blocks,
            "FULL": self.full,
        }  # fmt: skip


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


def in_place(tensor: torch.Tensor) -> bool:
    """Return whether the kernels can read or write the tensor (..., dim) where it lies, as rows."""
    if tensor.dtype not in NAMES or (tensor.stride(-1) != 1 and tensor.shape[-1] > 1):
        return False
    return tensor.dim() < 3 or as_rows(tensor).data_ptr() == tensor.data_ptr()


def bits_that_must_be_zero(*tensors: torch.Tensor | None) -> int:
    """Return the bits of addresses that are zero in calls alike: a call of tensors that begin at 16 bytes wants such."""
    return 0 if any(tensor is not None and tensor.data_ptr() & 15 for tensor in tensors) else 15


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


def forward_split(size: int, widest: int, aligned: bool) -> Split:
    """Return the forward's split of `size` columns, of which the widest tensor has `widest` bytes each.

    One access of 16 bytes a thread and row, two or four where that would take more than 512 threads (of 16-bit rows, 256:
    then the sums cost more than the rows). Measured on an H200, as all of these numbers are.
    """
    vector = _vector(size, widest, aligned)
    if vector == 1:
        return _cut(size, 1, 8 if size <= 4096 else 16)
    if vector == 8:
        return _cut(size, 8, 8 if size <= 2048 else 16)
    return _cut(size, 4, 4 if size <= 2048 else 8 if size <= 4096 else 16)


def backward_split(size: int, widest: int, aligned: bool, lean: bool, threads: int) -> Split:
    """Return the backward's split: 8 columns a thread, which keeps four to six values of each in registers.

    Parameters
    ----------
    size, widest, aligned
        As of `forward_split`.
    lean : bool
        No bias, no second branch: few enough registers to press more blocks into a multiprocessor.
    threads : int
        How many threads of a lean kernel, with 4 bytes a column, a multiprocessor shall have without reading ahead.
    """
    vector = _vector(size, widest, aligned)
    if vector == 1 or not lean:
        return _cut(size, vector, 8 if size <= 4096 else 16)
    if size > 5120:
        return _cut(size, 8 if size % 8 == 0 else 4, 16)
    if vector == 8 and size <= 2048:
        return _cut(size, 8, 8, 768 if size > 256 else 512, ahead=True)
    if vector == 8 and size <= 4096:
        return _cut(size, 8, 16, 512)
    if vector == 4 and 1024 < size <= 2048:
        return _cut(size, 4, 8, threads)
    return _cut(size, vector, 8, 512, ahead=True)


Options = TypeVar("Options")


def sizes_and_options(options: Sequence[Options], every: bool) -> Iterator[tuple[int, bool, Options]]:
    """Yield sizes, whether aligned, and options that kernels are compiled for beforehand; the first options are the usual."""
    for size in (200, 768, 1024, 2048, 4096, 5120, 8192) if every else (1024, 2048):
        yield size, True, options[0]
    if every:
        for size in (100, 4096, 8192):
            yield size, False, options[0]
        for other in options[1:]:
            yield from ((2048, True, other), (8192, True, other), (8192, False, other))


def _vector(size: int, widest: int, aligned: bool) -> int:
    whole = 16 // widest
    return whole if aligned and size % whole == 0 else 1


def _cut(size: int, vector: int, each: int, threads: int = 0, ahead: bool = False) -> Split:
    """Return the split with `each` columns a thread, and as many blocks a multiprocessor as make up so many threads."""
    lanes = -(-size // (32 * each)) * 32
    packs = -(-size // (lanes * vector))
    units = 4 if lanes == 32 else 1
    return Split(vector, lanes, packs, units, max(1, threads // (lanes * units)), packs * lanes * vector == size, ahead)


FORWARD_MEANING = {"columns": "columns of a thread: few give more threads a row, many fewer sums between threads"}
BACKWARD_MEANING = {
    **FORWARD_MEANING,
    "threads": "threads of a multiprocessor that registers must leave room for; 0: as many as there happen to be",
    "ahead": "1: the next row is read while one is worked on, which costs registers",
}


def tuned_split(kernel: Tunable, usual: Split, rows: int, size: int, device: int) -> Split:
    """Return the split of `kernel` for so many rows: tuned, or `usual`. For callers that remember what they settle with it."""
    backward = "threads" in tuned.declared()[kernel.kernel]
    choices = [
        {"columns": each, "threads": threads, "ahead": ahead} if backward else {"columns": each}
        for each in (4, 8, 16, 32)
        if each % usual.vector == 0 and _cut(size, usual.vector, each).threads <= 512
        for threads in ((0, 512, 768, 1024) if backward else (0,))
        for ahead in ((0, 1) if backward else (0,))
    ]
    kind = f"rows {tuned.power(rows)}, columns {tuned.power(size)}, {usual.vector} at a time"
    found = kernel.chosen(kind, device, choices)
    if found is None:
        return usual
    return _cut(size, usual.vector, found["columns"], found.get("threads", 0), bool(found.get("ahead", 0)))


def walkers(kernel: Kernel, rows: int, groups: int, cut: Split) -> int:
    """Return how many blocks walk the rows of a group: as many as are resident at once, or fewer with no more rows each."""
    resident = int(runtime().driver.multiprocessors(kernel.device)) * kernel.occupancy(cut.threads)
    steps = -(-rows // cut.units)
    each = -(-steps // max(1, min(resident // groups, steps)))
    return -(-steps // each)


@cached
def _sum_plan(dtype: torch.dtype, stride: int, count: int, dim: int, device: int) -> Plan:
    kernel = runtime().load(Variant.of("norm_sum_parts.cu", "norm_sum_parts", W=NAMES[dtype]), device)
    return kernel.plan((-(-dim // 8), 1, 1), (512, 1, 1), 0, stride, count, dim)


def sum_parts(parts: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the sum over parts (count, dim) in the dtype of `like`, added in a fixed order."""
    gradient = torch.empty_like(like)
    count, dim = parts.shape
    plan = _sum_plan(gradient.dtype, gradient.stride(0), count, dim, like.get_device())
    plan(parts.data_ptr(), gradient.data_ptr())
    return gradient
