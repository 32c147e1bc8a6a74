"""Tiles: LANES channels by a block of steps, the unit in which kernels bring strided tensors into the first-level cache."""

from __future__ import annotations

from typing import Any

import torch

from anymamba.backends.cpu._compile import inline

__all__ = ["LANES", "like", "load", "store", "vector"]

LANES = 32  # two AVX-512 registers of float32: enough independent work to hide latencies


def like(wanted: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `value` in the dtype and layout of ``torch.empty_like(wanted)``."""
    if value.dtype == wanted.dtype:
        fresh = torch.empty_like(wanted, device="meta")
        if fresh.stride() == value.stride():
            return value
    return torch.empty_like(wanted).copy_(value)


def vector(tensor: torch.Tensor | None, dim: int, like: torch.Tensor) -> torch.Tensor:
    return like.new_zeros(dim) if tensor is None else tensor.to(like.dtype).contiguous()


# Slices instead of computed indices in the inner loops: numba then needs no code for negative indices, and each loop is a plain
# strided copy. The branch on a unit stride lets LLVM copy whole registers.


@inline
def load(source: Any, offset: int, lane_stride: int, step_stride: int, lanes: int, steps: int, target: Any) -> None:
    """Copy (lane, step) of a strided tensor into target[step, lane]; lanes beyond `lanes` become zero."""
    if lanes < LANES:
        target[:steps, lanes:] = 0
    if lane_stride == 1 and lanes == LANES:
        for t in range(steps):
            start = offset + t * step_stride
            line, to = source[start : start + LANES], target[t]
            for lane in range(LANES):
                to[lane] = line[lane]
        return
    if lane_stride == 1 or step_stride == 0:
        for t in range(steps):
            start = offset + t * step_stride
            for lane in range(lanes):
                target[t, lane] = source[start + lane * lane_stride]
        return
    for lane in range(lanes):
        start = offset + lane * lane_stride
        if step_stride == 1:
            row = source[start : start + steps]
            for t in range(steps):
                target[t, lane] = row[t]
        else:
            spread = source[start : start + (steps - 1) * step_stride + 1 : step_stride]
            for t in range(steps):
                target[t, lane] = spread[t]


@inline
def store(source: Any, target: Any, offset: int, lane_stride: int, step_stride: int, lanes: int, steps: int) -> None:
    """Copy source[step, lane] into (lane, step) of a strided tensor."""
    if lane_stride == 1 and lanes == LANES:
        for t in range(steps):
            start = offset + t * step_stride
            line, given = target[start : start + LANES], source[t]
            for lane in range(LANES):
                line[lane] = given[lane]
        return
    if lane_stride == 1:
        for t in range(steps):
            start = offset + t * step_stride
            line = target[start : start + lanes]
            for lane in range(lanes):
                line[lane] = source[t, lane]
        return
    for lane in range(lanes):
        start = offset + lane * lane_stride
        if step_stride == 1:
            row = target[start : start + steps]
            for t in range(steps):
                row[t] = source[t, lane]
        else:
            spread = target[start : start + (steps - 1) * step_stride + 1 : step_stride]
            for t in range(steps):
                spread[t] = source[t, lane]
