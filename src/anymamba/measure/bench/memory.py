"""Peak memory of one call: what PyTorch's allocator held at most beyond what it held before.

On a card the allocator counts for itself. On a CPU it does not, but it reports every block it hands out and takes back to
PyTorch's profiler; their running sum is the same figure. What a library allocates without PyTorch (numba's few KiB of tiles,
BLAS's buffers) is in neither.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from anymamba.measure.bench.timing import Call

__all__ = ["method", "peak_bytes", "peak_of"]


def method(device: torch.device) -> str:
    """Return in words what `peak_bytes` measures on this device."""
    if device.type == "cuda":
        return "peak of PyTorch's CUDA allocator during one call, less what was held before it"
    if device.type == "cpu":
        return "peak of PyTorch's CPU allocator during one call (sum of its profiler's memory events)"
    return "not measured on this device"


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Call once and return the peak, None where it cannot be measured."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        kept = call()
        torch.cuda.synchronize()
        del kept
        return int(torch.cuda.max_memory_allocated(device) - before)
    if device.type != "cpu":
        return None
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _quiet():
        profiler.start()
    try:
        kept = call()
        del kept
    finally:
        with _quiet():
            profiler.stop()
    results: Any = getattr(profiler.profiler, "kineto_results", None)
    if results is None:
        return None
    return peak_of((_start(event), event.nbytes()) for event in results.events() if event.name() == "[memory]")


def peak_of(events: Iterable[tuple[int, int]]) -> int:
    """Return the greatest running sum of (time, bytes taken or, negative, given back)."""
    held = most = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        held += size
        most = max(most, held)
    return most


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the lines from the terminal that newer profilers write, past Python, whenever they start and stop."""
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except (OSError, ValueError, AttributeError):  # no stderr at all: nothing to keep clean
        yield
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _start(event: Any) -> int:
    # torch < 2.3 counts in microseconds
    return int(event.start_ns() if hasattr(event, "start_ns") else event.start_us())
