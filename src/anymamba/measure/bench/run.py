"""Run a benchmark: check every implementation, see whether it is fast enough to be measured, measure all in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from anymamba import backends
from anymamba.errors import AnymambaError, BackendRefusedError, OptionError
from anymamba.measure.accuracy import deviations, outputs_and_gradients, reference_results, relative_error
from anymamba.measure.bench import floors, machine, memory
from anymamba.measure.bench.implementations import Implementation, implementations
from anymamba.measure.bench.results import FAILED, MEASURED, REFUSED, SKIPPED, WRONG, Result, Row
from anymamba.measure.bench.subjects import BOTH, Work
from anymamba.measure.bench.timing import Call, Stopwatch, calls_a_round, stopwatch, time_rounds
from anymamba.measure.cases import Draw

__all__ = ["Plan", "Progress", "bench", "estimate", "exit_code"]

# What others may differ by: TF32 products and fast exponentials are their right, and a comparison is no test of theirs.
_OTHERS = {torch.float64: 1e-6, torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
FULL_SIZE = 4  # times the bound of the small size: sums are longer, and both sides err
# more than the last level of cache of most machines: 60 MB on a card, 100 MB on servers
SWEPT_BYTES = {"cpu": 2**27, "cuda": 2**28}
DRIFT = 0.10  # from the first to the second half of the rounds: then the clocks or another program moved


class Progress(Protocol):
    """Who wants to know how far it is."""

    def step(self, text: str) -> None:
        """Say what is being done now."""


@dataclass(frozen=True)
class Plan:
    """What to measure and how.

    Parameters
    ----------
    work : sequence of Work
    device : torch.device
    dtype : torch.dtype
    rounds : int
    limit : float
        Seconds; an implementation whose one call would take longer is not measured at that size, and one that has taken
        so long in its rounds leaves out the rest of them.
    only : tuple of str
        Names of implementations; empty: all.
    """

    work: Sequence[Work]
    device: torch.device
    dtype: torch.dtype = torch.float32
    rounds: int = 10
    limit: float = 5.0
    only: tuple[str, ...] = ()
    watch: Stopwatch | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if self.rounds < 1:
            raise OptionError(f"--rounds is {self.rounds}, but must be at least 1.")
        if not self.limit > 0:
            raise OptionError(f"--limit is {self.limit}, but must be more than 0.")


def bench(plan: Plan, progress: Progress, candidates: Sequence[Implementation] | None = None) -> Result:
    """Measure what the plan says.

    Parameters
    ----------
    plan : Plan
    progress : Progress
    candidates : sequence of Implementation, optional
        Default: every one that exists on this machine.

    Raises
    ------
    OptionError
        If `plan.only` names one that does not exist here.
    """
    watch = plan.watch or stopwatch(plan.device)
    absent: dict[str, str] = {}
    if candidates is None:
        candidates, absent = implementations(plan.device)
    for name in plan.only:
        if all(candidate.name != name for candidate in candidates):
            names = ", ".join(candidate.name for candidate in candidates)
            raise OptionError(f"--only is {name!r}, but here are: {names}. {absent.get(name, '')}".rstrip())
    chosen = [candidate for candidate in candidates if not plan.only or candidate.name in plan.only]
    progress.step("what this machine can do at best: copy, matrix product")
    rates = floors.copy_rate(plan.device, watch), floors.matrix_rate(plan.device, plan.dtype, watch)
    about = machine.facts(plan.device) | {"copy_gb_per_s": rates[0] / 1e9, "matrix_tflop_per_s": rates[1] / 1e12}
    notes = [note for note in (machine.busy(),) if note]
    before = machine.clock(plan.device)
    rows: list[Row] = []
    slowed: set[str] = set()
    for work in plan.work:
        rows += _measure(plan, work, chosen, watch, rates, progress)
        slowed |= machine.throttled(plan.device)  # right after the load, while its cause is still there
    after = machine.clock(plan.device)
    if slowed:
        notes.append(f"the card slowed its clocks down: {', '.join(sorted(slowed))}")
    if before and after:
        about |= {"clock_mhz_before": before, "clock_mhz_after": after}
    notes += _drifts(rows)
    return Result(tuple(rows), about, machine.versions(), memory.method(plan.device), tuple(notes), absent)


def exit_code(result: Result) -> int:
    """Return 1 if an implementation of ours was wrong or failed, or nothing was measured, else 0."""
    ours = {row.status for row in result.rows if row.implementation in backends.names()}
    return 0 if any(row.status == MEASURED for row in result.rows) and not ours & {WRONG, FAILED} else 1


def estimate(quarter: float, half: float, doublings: int) -> float:
    """Return how long a call takes whose length is doubled `doublings` times, from two shorter ones.

    The growth from one to the next goes on, but no slower than the length and no faster than its square.
    """
    growth = min(max(half / max(quarter, 1e-9), 2.0), 4.0)
    return float(half * growth**doublings)


def _measure(
    plan: Plan, work: Work, candidates: Sequence[Implementation], watch: Stopwatch, rates: tuple[float, float],
    progress: Progress,
) -> list[Row]:  # fmt: skip
    subject, size = work.subject, work.size
    place = f"{subject.name}, {size}, {work.direction}"
    rows: dict[str, Row] = {}
    calls: dict[str, tuple[Call, int]] = {}
    wanted = _truth(work, plan.dtype)
    arguments: dict[str, Any] | None = None
    states: dict[str, torch.Tensor] = {}
    first: tuple[str, list[torch.Tensor]] | None = None
    floor = 0.0
    for candidate in candidates:
        function = candidate.functions.get(subject.name)
        if function is None:
            continue
        progress.step(f"{place}: {candidate.name}, is it right?")
        row = Row(
            subject.name, str(size), size.batch, size.length, size.width, work.direction, str(plan.dtype)[6:],
            candidate.name, candidate.windows, FAILED,
        )  # fmt: skip
        try:
            row = _checked(row, plan, work, candidate, function, wanted)
            if row.status != MEASURED:
                rows[candidate.name] = row
                continue
            expected = _expected(plan, work, function, watch)
            if expected > plan.limit:
                message = f"one call would take about {expected:.3g} s, more than --limit {plan.limit:g}"
                rows[candidate.name] = replace(row, status=SKIPPED, message=message)
                continue
            progress.step(f"{place}: {candidate.name}, memory")
            if arguments is None:
                arguments = subject.arguments(Draw(plan.dtype, plan.device), *size)
                states = {name: arguments[name].clone() for name in subject.changed}
            call = _call(work, function, arguments)
            # a step writes its states: each candidate gets them as they were
            fresh = {name: state.clone() for name, state in states.items()}
            outputs = _outputs(function, arguments | fresh)
            if first is None:
                first = candidate.name, [out.detach().clone() for out in outputs]
            row = _compared(row, plan, work, candidate, outputs, *first)
            if row.status != MEASURED:
                rows[candidate.name] = row
                continue
            floor = floors.least_bytes(arguments, outputs, work.direction == BOTH) / rates[0]
            if subject.changed:  # a step writes its states too
                floor += sum(floors.least_bytes({}, [arguments[name]], False) for name in subject.changed) / rates[0]
            del outputs
            seconds = watch(call, 1)
            peak = memory.peak_bytes(call, plan.device)
            rows[candidate.name] = replace(row, peak_mb=None if peak is None else round(peak / 2**20, 3))
            calls[candidate.name] = call, calls_a_round(seconds)
        except BackendRefusedError as error:
            rows[candidate.name] = replace(row, status=REFUSED, message=error.why)
        except Exception as error:  # someone else's error is a row that says so, not the end of the run
            text = error.what if isinstance(error, AnymambaError) else " ".join(str(error).split())[:300]
            rows[candidate.name] = replace(row, status=FAILED, message=f"{type(error).__name__}: {text}")
    progress.step(f"{place}: {plan.rounds} rounds of {', '.join(calls)}" if calls else f"{place}: nothing to measure")
    times = time_rounds(calls, plan.rounds, watch, plan.limit)
    progress.step(f"{place}: once more with nothing in the caches")
    swept = _swept(calls, plan, watch)
    tokens = size.batch * max(size.length, 1)
    flops = subject.flops(size) * (3 if work.direction == BOTH else 1)
    for name, seconds_of in times.items():
        row = replace(
            rows[name], rounds_ms=tuple(round(value * 1e3, 5) for value in seconds_of), cold_ms=swept.get(name)
        )
        middle = (row.median_ms or 0.0) / 1e3
        if middle > 0:
            row = replace(
                row,
                tokens_per_s=tokens / middle,
                copy_share=floor / middle,
                matrix_share=flops / rates[1] / middle if flops else None,
                floor_ms=max(floor, flops / rates[1]) * 1e3,
            )
        rows[name] = row
    return list(rows.values())


def _truth(work: Work, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    subject = work.subject
    arguments = _direction(work, subject.arguments(Draw(dtype, torch.device("cpu")), *subject.check))
    return reference_results(subject.ours, arguments, 0, subject.changed)


def _checked(
    row: Row, plan: Plan, work: Work, candidate: Implementation, function: Callable[..., Any],
    wanted: dict[str, torch.Tensor],
) -> Row:  # fmt: skip
    """Return the row with its error, and status measured or wrong."""
    subject = work.subject
    arguments = _direction(work, subject.arguments(Draw(plan.dtype, plan.device), *subject.check))
    start = time.perf_counter()
    seen = outputs_and_gradients(function, arguments, 0, subject.changed)
    cold = time.perf_counter() - start
    bounds = (
        (subject.output_bounds[plan.dtype], subject.gradient_bounds[plan.dtype])
        if candidate.ours
        else (_OTHERS[plan.dtype], _OTHERS[plan.dtype])
    )
    worst = max(deviations(seen, wanted, *bounds), key=lambda deviation: deviation.error / deviation.bound)
    return replace(
        row,
        status=MEASURED if worst.passed else WRONG,
        message="" if worst.passed else f"{worst.name} is off by {worst.error:.2g}, may be by {worst.bound:.2g}",
        error=worst.error,
        bound=worst.bound,
        cold_s=round(cold, 4),
    )


def _compared(
    row: Row, plan: Plan, work: Work, candidate: Implementation, outputs: list[torch.Tensor], name: str,
    first: list[torch.Tensor],
) -> Row:  # fmt: skip
    """Return the row with its error at the full size beside the first implementation's, and status measured or wrong.

    The float64 reference would take minutes there. Two that agree at the small size and part at the large one: one of them
    is wrong (an index that overflows, a block that is not reached), and the second is the one that is named.
    """
    if name == candidate.name:
        return row
    bound = FULL_SIZE * (work.subject.output_bounds[plan.dtype] if candidate.ours else _OTHERS[plan.dtype])
    error = max((relative_error(out, wanted) for out, wanted in zip(outputs, first)), default=0.0)
    row = replace(row, full_error=error)
    if error <= bound:
        return row
    return replace(
        row, status=WRONG, message=f"at the full size it parts from {name} by {error:.2g}, may by {bound:.2g}"
    )


def _swept(calls: dict[str, tuple[Call, int]], plan: Plan, watch: Stopwatch) -> dict[str, float]:
    """Return the milliseconds of single calls for which nothing of the arguments is in a cache: median of three."""
    if not calls:
        return {}
    sweep = torch.empty(SWEPT_BYTES.get(plan.device.type, SWEPT_BYTES["cuda"]) // 4, device=plan.device)
    found = {}
    for name, (call, _) in calls.items():
        times = []
        for _ in range(3):
            sweep.fill_(1.0)
            times.append(watch(call, 1))
            if sum(times) > plan.limit:
                break
        found[name] = round(sorted(times)[len(times) // 2] * 1e3, 5)
    return found


def _expected(plan: Plan, work: Work, function: Callable[..., Any], watch: Stopwatch) -> float:
    """Return about how long a call at the full size will take, from calls at a sixteenth of the length and up.

    On a busy machine one short call tells little, and eight times its noise is no estimate: it goes on to longer ones until
    the answer is no longer in doubt.
    """
    size, before = work.size, 0.0
    if size.length < 64:
        return 0.0
    for doublings in (4, 3, 2, 1):
        short = size._replace(length=size.length >> doublings)
        call = _call(work, function, work.subject.arguments(Draw(plan.dtype, plan.device), *short))
        now = watch(call, 1)
        # The first may have compiled something: that takes as long at any length, and most of it at the first length.
        if now <= plan.limit * (10 if doublings == 4 else 1):
            now = min(now, watch(call, 1))
        expected = estimate(before or now / 2, now, doublings)
        if now * 2**doublings > plan.limit or (before and expected <= plan.limit):
            break
        before = now
    return expected


def _direction(work: Work, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments as this direction needs them: nothing requires grad unless it is differentiated."""
    if work.direction == BOTH:
        return arguments
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def _outputs(function: Callable[..., Any], arguments: dict[str, Any]) -> list[torch.Tensor]:
    with torch.no_grad():
        results = function(**arguments)
    return [
        out for out in (results if isinstance(results, (tuple, list)) else [results]) if isinstance(out, torch.Tensor)
    ]


def _call(work: Work, function: Callable[..., Any], arguments: dict[str, Any]) -> Call:
    """Return the call that is timed: forward without autograd, or forward and the gradients of all that requires grad."""
    if work.direction != BOTH:
        plain = _direction(work, arguments)

        def forward() -> Any:
            with torch.no_grad():
                return function(**plain)

        return forward
    leaves = [value for value in arguments.values() if isinstance(value, torch.Tensor) and value.requires_grad]
    gradients = [torch.ones_like(out) for out in _outputs(function, arguments)]

    def both() -> Any:
        results = function(**arguments)
        outputs = results if isinstance(results, (tuple, list)) else [results]
        outputs = [out for out in outputs if isinstance(out, torch.Tensor)]
        return torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)

    return both


def _drifts(rows: Sequence[Row]) -> list[str]:
    """Return a note if the second half of the rounds was slower than the first for most rows: heat or company."""
    slower = 0
    counted = [row.rounds_ms for row in rows if len(row.rounds_ms) >= 6]
    for times in counted:
        half = len(times) // 2
        slower += sorted(times[-half:])[half // 2] > sorted(times[:half])[half // 2] * (1 + DRIFT)
    if not counted or slower * 2 <= len(counted):
        return []
    return [
        f"{slower} of {len(counted)} rows became slower by more than {DRIFT:.0%} during the run: clocks, heat or company"
    ]
