"""The search: every choice checked and timed once, the best few again, the winner once more beside the usual parameters.

What is kept must be faster than the usual by more than MARGIN in the last comparison, in which nothing was chosen: the best of
many noisy measurements looks faster than it is. A choice whose results are not those of the usual parameters, or that cannot
be launched, is out. Choices are tried in a mixed order, so that little time sees a bit of everything; on a card the compiler's
reports are read first (`pruning`), and what is timed is the replay of a captured graph: the kernels without Python.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

from anymamba.backends import tuned
from anymamba.errors import AnymambaError, OptionError
from anymamba.measure.bench.timing import Call, Stopwatch, calls_a_round, replays, stopwatch, time_rounds
from anymamba.measure.tune.works import Task

__all__ = ["FINALISTS", "MARGIN", "Found", "Progress", "tune"]

MARGIN = 0.05
FINALISTS = 3
ROUNDS = 7
AT_A_TIME = 16  # choices looked at together before they run


class Progress(Protocol):
    """Who wants to know how far it is."""

    def step(self, text: str) -> None:
        """Say what is being done now."""


@dataclass(frozen=True)
class Found:
    """What came of one kernel at one size. `parameters` is {} where the usual ones stay; no times: no time was left for it."""

    kernel: str
    shape: str
    card: str
    size: str
    dtype: str
    parameters: dict[str, int]
    usual_ms: float | None
    tuned_ms: float | None
    tried: int
    offered: int
    pruned: int = 0
    dropped: tuple[str, ...] = ()

    @property
    def better(self) -> bool:
        """Whether something is worth keeping."""
        return bool(self.parameters)


def tune(
    tasks: Sequence[Task], *, seconds: float, progress: Progress, dry_run: bool = False,
    watch: Stopwatch | None = None, clock: Callable[[], float] = time.monotonic,
) -> list[Found]:  # fmt: skip
    """Search for every task, and keep what is better, each as soon as it is found.

    Parameters
    ----------
    tasks : sequence of Task
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
    end, results = clock() + seconds, []
    for number, task in enumerate(tasks):
        until = clock() + max(end - clock(), 0.0) / (len(tasks) - number)
        device = task.call.device
        suited = watch or (replays if device.type == "cuda" else stopwatch(device))
        found = _search(task, until, progress, suited, clock)
        results.append(found)
        if found.better and not dry_run:
            assert found.usual_ms is not None and found.tuned_ms is not None
            entry = tuned.Entry(found.parameters, task.place.source, found.usual_ms, found.tuned_ms)
            tuned.keep({task.place.name: entry})
    return results


@torch.no_grad()
def _search(task: Task, until: float, progress: Progress, watch: Stopwatch, clock: Callable[[], float]) -> Found:
    place, size = task.place, task.call.size
    if clock() >= until:
        dtype = str(task.call.dtype)[6:]
        return Found(place.kernel, place.shape, place.card, size, dtype, {}, None, None, 0, len(task.offered))
    progress.step(f"{place.kernel}, {size}: the usual parameters")
    call = task.call.ready()

    def under(parameters: Mapping[str, int]) -> Stopwatch:
        def measure(inner: Call, count: int) -> float:
            with tuned.trial(place.kernel, parameters):
                inner()  # settles the launch, outside of what is timed
                return watch(inner, count)

        return measure

    with tuned.trial(place.kernel, {}):
        wanted = [tensor.clone() for tensor in call.results()]
    usual = under({})(call, 1)
    count = calls_a_round(usual)
    worth = _worth(task, call, lambda: until - clock())
    dropped: list[str] = []
    times: list[tuple[float, Mapping[str, int]]] = []
    tried = pruned = 0
    order = random.Random(0).sample(list(task.offered), len(task.offered))
    for start in range(0, len(order), AT_A_TIME):
        if clock() >= until:
            break
        together = order[start : start + AT_A_TIME]
        progress.step(f"{place.kernel}, {size}: compiling ({start} of {len(order)} seen)")
        chosen = worth(together)
        pruned += len(together) - len(chosen)
        for parameters in chosen:
            if clock() >= until:
                break
            tried += 1
            words = ", ".join(f"{name} {value}" for name, value in parameters.items())
            progress.step(f"{place.kernel}, {size}: {words} ({tried + pruned} of {len(order)})")
            try:
                with tuned.trial(place.kernel, parameters):
                    error = _error(call.results(lambda: _poison(wanted)), wanted)
                if not error <= task.call.bound:
                    dropped.append(f"{words}: its result is off by {error:.1g}")
                    continue
                times.append((under(parameters)(call, count), parameters))
            except (AnymambaError, RuntimeError) as error:
                dropped.append(f"{words}: {error.what if isinstance(error, AnymambaError) else error}")
    usual_parameters: Mapping[str, int] = {}
    finalists = [usual_parameters, *(p for _, p in sorted(times, key=lambda timed: timed[0])[:FINALISTS])]
    progress.step(f"{place.kernel}, {size}: the best {len(finalists) - 1} beside the usual")
    best = _compared(finalists, call, count, under) if times else [usual]
    winner = min(finalists, key=lambda parameters: best[finalists.index(parameters)])
    last = _compared([usual_parameters, winner], call, count, under) if winner else [best[0], best[0]]
    better = bool(winner) and last[1] < last[0] * (1 - MARGIN)
    return Found(
        place.kernel, place.shape, place.card, size, str(task.call.dtype)[6:], dict(winner) if better else {},
        round(last[0] * 1e3, 5), round(last[1 if better else 0] * 1e3, 5), tried, len(task.offered), pruned, tuple(dropped),
    )  # fmt: skip


def _worth(
    task: Task, call: Call, left: Callable[[], float]
) -> Callable[[Sequence[Mapping[str, int]]], Sequence[Mapping[str, int]]]:
    if task.call.backend != "cuda":
        return lambda choices: choices
    from anymamba.measure.tune.pruning import Pruning

    pruning = Pruning(task.place.kernel, call)
    return lambda choices: pruning.worth(choices, left)


def _poison(like: Sequence[torch.Tensor]) -> None:
    """Leave NaN in the memory that a caching allocator will give the results: what is not written cannot look right."""
    for tensor in [torch.empty_like(one) for one in like]:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))


def _error(seen: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return the worst relative error of a tensor, computed where it lies; infinite for a NaN."""
    worst = 0.0
    for one, other in zip(seen, wanted):
        if not other.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(one, other) else float("inf"))
            continue
        wide = torch.float64 if other.dtype == torch.float64 else torch.float32
        scale = float(other.to(wide).norm()) or 1.0
        error = float((one.to(wide) - other.to(wide)).norm()) / scale
        worst = max(worst, error if error == error else float("inf"))  # noqa: PLR0124 - NaN is not itself
    return worst


def _compared(
    choices: Sequence[Mapping[str, int]], call: Call, count: int, under: Callable[[Mapping[str, int]], Stopwatch]
) -> list[float]:
    """Return the median of interleaved rounds for each."""
    timed: dict[str, tuple[Any, int]] = {
        str(number): ((lambda number=number: number), count) for number in range(len(choices))
    }
    rounds = time_rounds(timed, ROUNDS, lambda which, times: under(choices[which()])(call, times))
    return [median(rounds[name]) for name in timed]
