"""How a time comes about: warm calls, interleaved rounds, device events on a card and a monotonic clock elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["Call", "Stopwatch", "calls_a_round", "replays", "stopwatch", "time_rounds"]

Call = Callable[[], Any]
Stopwatch = Callable[[Call, int], float]
"""Runs the call so many times; returns the seconds of one."""

A_ROUND = 0.02  # seconds that a round of a fast call should last: many times the clock's step and a thread's wake-up
MOST_CALLS = 50


def stopwatch(device: torch.device) -> Stopwatch:
    """Return the stopwatch for work on `device`."""
    if device.type == "cuda":
        return _events
    synchronize = getattr(getattr(torch, device.type, None), "synchronize", None) or (lambda: None)

    def clock(call: Call, count: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        synchronize()
        return (time.perf_counter() - start) / count

    return clock


def _events(call: Call, count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count


def replays(call: Call, count: int) -> float:
    """Time a captured graph of `count` calls: the kernels alone. A call that cannot be captured is timed as it is.

    The call must have been made once before: what it compiles and settles is not captured.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    try:
        # Not torch.cuda.graph: that empties the allocator's cache, which takes longer than all that is measured here.
        with torch.cuda.stream(stream):
            graph.capture_begin()
            try:
                for _ in range(count):
                    call()
            finally:
                graph.capture_end()
    except RuntimeError:  # it waits for the card, as one that reads lengths does
        torch.cuda.synchronize()
        return _events(call, count)
    graph.replay()
    return _events(graph.replay, 1) / count


def calls_a_round(seconds: float) -> int:
    """Return how many calls of about this long make a round."""
    return int(min(MOST_CALLS, max(1, A_ROUND / max(seconds, 1e-9))))


def time_rounds(
    candidates: Mapping[str, tuple[Call, int]], rounds: int, watch: Stopwatch, budget: float = float("inf")
) -> dict[str, list[float]]:
    """Return each candidate's seconds, one a round.

    Rounds are interleaved, so that whatever else the machine does hits everyone, and every other round runs backwards, so
    that nobody always comes after the same neighbour.

    Parameters
    ----------
    candidates : mapping
        The call and how often a round makes it, by name.
    rounds : int
    watch : Stopwatch
    budget : float
        Seconds; who has used them up is left out of further rounds, so a slow one has fewer, at least one.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    for number in range(rounds):
        for name in order if number % 2 == 0 else reversed(order):
            call, count = candidates[name]
            if sum(times[name]) * count < budget:
                times[name].append(watch(call, count))
    return times
