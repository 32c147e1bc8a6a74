"""The search: every choice checked and timed once, the best few again, the winner once more beside the usual parameters.

What is kept must be faster than the usual by more than MARGIN in the last comparison, in which nothing was chosen: the best of
many noisy measurements looks faster than it is. A choice whose results are not those of the usual parameters, or that cannot
be launched, is out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

from anymamba import backends
from anymamba.backends import tuned
from anymamba.errors import AnymambaError, OptionError
from anymamba.measure.accuracy import OUTPUT_BOUND, relative_error
from anymamba.measure.bench.subjects import Size
from anymamba.measure.bench.timing import Call, Stopwatch, calls_a_round, stopwatch, time_rounds
from anymamba.measure.cases import Draw
from anymamba.measure.tune.kernels import Kernel

__all__ = ["FINALISTS", "MARGIN", "Found", "Progress", "tune"]

MARGIN = 0.05
FINALISTS = 3
ROUNDS = 7


class Progress(Protocol):
    """Who wants to know how far it is."""

    def step(self, text: str) -> None:
        """Say what is being done now."""


@dataclass(frozen=True)
class Found:
    """What came of one kernel at one size. `parameters` is {} where the usual ones stay."""

    kernel: str
    shape: str
    card: str
    size: str
    dtype: str
    parameters: dict[str, int]
    usual_ms: float
    tuned_ms: float
    tried: int
    offered: int
    dropped: tuple[str, ...] = ()

    @property
    def better(self) -> bool:
        """Whether something is worth keeping."""
        return bool(self.parameters)


def tune(
    kernels: Sequence[Kernel], sizes: Sequence[Size], dtype: torch.dtype, device: torch.device, *, seconds: float,
    progress: Progress, dry_run: bool = False, watch: Stopwatch | None = None, clock: Callable[[], float] = time.monotonic,
) -> list[Found]:  # fmt: skip
    """Search for every kernel and size, and keep what is better, each as soon as it is found.

    Parameters
    ----------
    kernels : sequence of Kernel
    sizes : sequence of Size
    dtype, device
        Of the tensors.
    seconds : float
        For all together; what does not fit is not tried.
    progress : Progress
    dry_run : bool
        Keep nothing.
    watch, clock : callable, optional
        Tests pass their own.

    Raises
    ------
    OptionError
        If there is no time.
    """
    if not seconds > 0:
        raise OptionError(f"--seconds is {seconds}, but must be more than 0.")
    watch = watch or stopwatch(device)
    works = [(kernel, size) for size in sizes for kernel in kernels]
    end, results = clock() + seconds, []
    for number, (kernel, size) in enumerate(works):
        until = clock() + max(end - clock(), 0.0) / (len(works) - number)
        found = _search(kernel, size, dtype, device, until, progress, watch, clock)
        results.append(found)
        if found.better and not dry_run:
            place = kernel.place(size, dtype)
            entry = tuned.Entry(found.parameters, place.source, found.usual_ms, found.tuned_ms)
            tuned.keep({place.name: entry})
    return results


def _search(
    kernel: Kernel, size: Size, dtype: torch.dtype, device: torch.device, until: float, progress: Progress,
    watch: Stopwatch, clock: Callable[[], float],
) -> Found:  # fmt: skip
    place, offered = kernel.place(size, dtype), kernel.offered(size, dtype)
    with torch.no_grad():
        arguments = {
            name: value.detach() if isinstance(value, torch.Tensor) else value
            for name, value in kernel.subject.arguments(Draw(dtype, device), *size).items()
        }

    def call() -> Any:
        with torch.no_grad(), backends.use_backend(kernel.backend):
            return kernel.subject.ours(**arguments)

    def under(parameters: Mapping[str, int]) -> Stopwatch:
        def measure(inner: Call, count: int) -> float:
            with tuned.trial(place.kernel, parameters):
                inner()  # settles the launch, outside of what is timed
                return watch(inner, count)

        return measure

    with tuned.trial(place.kernel, {}):
        wanted = call().clone()
        call()
        usual = watch(call, 1)
    count = calls_a_round(usual)
    dropped: list[str] = []
    times: list[tuple[float, Mapping[str, int]]] = []
    tried = 0
    for parameters in offered:
        if clock() >= until:
            break
        tried += 1
        words = ", ".join(f"{name} {value}" for name, value in parameters.items())
        progress.step(f"{place.kernel}, {size}: {words} ({tried} of {len(offered)})")
        try:
            with tuned.trial(place.kernel, parameters):
                error = relative_error(call(), wanted)
            if not error <= 2 * OUTPUT_BOUND[dtype]:
                dropped.append(f"{words}: its result is off by {error:.1g}")
                continue
            times.append((under(parameters)(call, count), parameters))
        except (AnymambaError, RuntimeError) as error:
            dropped.append(f"{words}: {error.what if isinstance(error, AnymambaError) else error}")
    usual_parameters: Mapping[str, int] = {}
    finalists = [usual_parameters, *(p for _, p in sorted(times, key=lambda timed: timed[0])[:FINALISTS])]
    progress.step(f"{place.kernel}, {size}: the best {len(finalists) - 1} beside the usual")
    best = _compared(finalists, call, count, under)
    winner = min(finalists, key=lambda parameters: best[finalists.index(parameters)])
    last = _compared([usual_parameters, winner], call, count, under) if winner else [best[0], best[0]]
    better = bool(winner) and last[1] < last[0] * (1 - MARGIN)
    return Found(
        place.kernel, place.shape, place.card, str(size), str(dtype)[6:], dict(winner) if better else {},
        round(last[0] * 1e3, 5), round(last[1 if better else 0] * 1e3, 5), tried, len(offered), tuple(dropped),
    )  # fmt: skip


def _compared(
    choices: Sequence[Mapping[str, int]], call: Call, count: int, under: Callable[[Mapping[str, int]], Stopwatch]
) -> list[float]:
    """Return the median of interleaved rounds for each."""
    timed = {str(number): ((lambda number=number: number), count) for number in range(len(choices))}
    rounds = time_rounds(timed, ROUNDS, lambda which, times: under(choices[which()])(call, times))
    return [median(rounds[name]) for name in timed]
