"""How a benchmark is made, with a clock of the test's own: no time of this machine decides anything here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from anymamba.errors import OptionError
from anymamba.measure.bench import floors, machine, memory, run
from anymamba.measure.bench.floors import least_bytes
from anymamba.measure.bench.implementations import Implementation
from anymamba.measure.bench.results import Row
from anymamba.measure.bench.run import Plan, _drifts, bench, estimate, exit_code
from anymamba.measure.bench.subjects import BOTH, FORWARD, PRESETS, STEP, SUBJECTS, Size, Work, preset
from anymamba.measure.bench.timing import calls_a_round, time_rounds

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _short_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(floors.COPIED, "cpu", 2**12)
    monkeypatch.setitem(run.SWEPT_BYTES, "cpu", 2**12)


class Silent:
    def step(self, text: str) -> None:
        pass


def plan(*work: Work, watch: Callable[[Any, int], float] | None = None, **changed: Any) -> Plan:
    """A plan whose every call takes a millisecond, by its clock."""

    def millisecond(call: Any, count: int) -> float:
        call()
        return 1e-3

    return Plan(work, CPU, watch=watch or millisecond, **{"rounds": 2, **changed})


CONV = SUBJECTS["causal_conv1d"]
SMALL = Work(CONV, Size(2, 16, 8), FORWARD)


def right(name: str = "right") -> Implementation:
    return Implementation(name, "yes", {CONV.name: CONV.ours}, ours=True)


def test_a_row_that_is_right_is_timed_and_its_figures_follow_from_the_clock() -> None:
    result = bench(plan(SMALL), Silent(), [right()])
    (row,) = result.rows
    assert row.status == "measured"
    assert row.rounds_ms == (1.0, 1.0)
    assert row.spread == 0
    assert row.tokens_per_s == pytest.approx(2 * 16 / 1e-3)
    # x, weight and bias read, the output written, at the rate of a copy of 2 * 16 KiB in a millisecond
    moved = 4 * (2 * 16 * 16 + 16 * 4 + 16 + 2 * 16 * 16)
    assert row.copy_share == pytest.approx(moved / (2 * 2**14 / 1e-3) / 1e-3)
    assert exit_code(result) == 0


def test_who_has_used_up_the_time_is_left_out_of_further_rounds() -> None:
    calls = {"fast": (lambda: None, 1), "slow": (lambda: time.sleep(0), 1)}
    times = time_rounds(calls, 4, lambda call, count: 1.0 if call is calls["fast"][0] else 3.0, budget=5.0)
    assert times == {"fast": [1.0] * 4, "slow": [3.0] * 2}


def test_only_what_is_wrong_of_ours_makes_the_command_fail() -> None:
    def wrong(**arguments: Any) -> Any:
        return CONV.ours(**arguments) * 1.5

    for name, code in (("torch", 1), ("someone", 0)):
        candidates = [right(), Implementation(name, "yes", {CONV.name: wrong})]
        assert exit_code(bench(plan(SMALL), Silent(), candidates)) == code
    assert exit_code(bench(plan(SMALL), Silent(), [])) == 1


def test_a_wrong_implementation_is_named_and_never_timed() -> None:
    timed = []

    def wrong(**arguments: Any) -> Any:
        timed.append(arguments["x"].shape)
        return CONV.ours(**arguments) * 1.5

    result = bench(plan(SMALL), Silent(), [right(), Implementation("wrong", "yes", {CONV.name: wrong})])
    row = result.rows[1]
    assert (row.status, row.rounds_ms) == ("wrong", ())
    assert "output 0 is off by 0.5" in row.message
    assert timed == [(2, 32, 37)]  # only the check's own size


def test_what_is_right_when_small_and_wrong_at_the_full_size_is_named_and_never_timed() -> None:
    def overflowing(x: torch.Tensor, **others: Any) -> torch.Tensor:
        out: torch.Tensor = CONV.ours(x=x, **others)
        return out if x.shape[2] < 64 else out * (torch.arange(x.shape[2]) < 64)

    broken = Implementation("broken", "yes", {CONV.name: overflowing}, ours=True)
    work = Work(CONV, Size(2, 100, 8), FORWARD)
    first, second = bench(plan(work), Silent(), [right(), broken]).rows
    assert (first.status, first.full_error) == ("measured", None)
    assert second.status == "wrong"
    assert "at the full size it parts from right" in second.message
    assert second.rounds_ms == ()
    again = bench(plan(work), Silent(), [right(), right("other")]).rows[1]
    assert (again.status, again.full_error) == ("measured", 0.0)


def test_a_step_is_compared_from_the_same_states() -> None:
    step = SUBJECTS["causal_conv1d_update"]
    two = [Implementation(name, "yes", {step.name: step.ours}, ours=True) for name in ("a", "b")]
    rows = bench(plan(Work(step, Size(2, 0, 16), STEP)), Silent(), two).rows
    assert [row.full_error for row in rows] == [None, 0.0]


def test_a_call_is_also_timed_with_nothing_in_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[bool] = []
    fill = torch.Tensor.fill_

    def noting(tensor: torch.Tensor, value: float) -> torch.Tensor:
        swept.append(True)
        return fill(tensor, value)

    monkeypatch.setattr(torch.Tensor, "fill_", noting)

    def watch(call: Any, count: int) -> float:
        call()
        fresh = bool(swept)
        swept.clear()
        return 3e-3 if fresh else 1e-3

    (row,) = bench(plan(SMALL, watch=watch), Silent(), [right()]).rows
    assert (row.cold_ms, row.median_ms) == (3.0, 1.0)


def test_a_wrong_gradient_is_wrong_only_where_gradients_are_measured() -> None:
    def half(**arguments: Any) -> Any:
        out = CONV.ours(**arguments)
        return out.detach() + (out - out.detach()) * 0.5

    candidates = [Implementation("half", "yes", {CONV.name: half}, ours=True)]
    result = bench(plan(SMALL, Work(CONV, SMALL.size, BOTH)), Silent(), candidates)
    assert [row.status for row in result.rows] == ["measured", "wrong"]


def test_an_error_is_a_row_that_says_so() -> None:
    def breaks(**arguments: Any) -> Any:
        raise RuntimeError("no such\nkernel image")

    result = bench(plan(SMALL), Silent(), [Implementation("breaks", "no", {CONV.name: breaks}), right()])
    assert [(row.status, row.message) for row in result.rows] == [
        ("failed", "RuntimeError: no such kernel image"),
        ("measured", ""),
    ]


def test_what_is_too_slow_is_left_out_before_the_full_size_runs() -> None:
    lengths = []

    def slow(**arguments: Any) -> Any:
        lengths.append(arguments["x"].shape[-1])
        return CONV.ours(**arguments)

    def watch(call: Any, count: int) -> float:
        lengths.clear()
        call()
        return lengths[-1] ** 2 * 1e-3 if lengths else 1e-3  # quadratic: 16 s at 128, 1 s at 32

    work = Work(CONV, Size(1, 512, 8), FORWARD)
    result = bench(
        plan(work, watch=watch, limit=200.0), Silent(), [Implementation("slow", "yes", {CONV.name: slow}), right()]
    )
    assert [row.status for row in result.rows] == ["skipped", "measured"]
    assert "about 262 s" in result.rows[0].message


def test_one_slow_moment_of_a_busy_machine_leaves_nothing_out() -> None:
    lengths: list[int] = []

    def traced(**arguments: Any) -> Any:
        lengths.append(arguments["x"].shape[-1])
        return CONV.ours(**arguments)

    def watch(call: Any, count: int) -> float:
        lengths.clear()
        call()
        return 0.55 if lengths[-1:] == [64] else 1e-3  # an eighth of the length: 500 times what it should take

    candidates = [Implementation("right", "yes", {CONV.name: traced}, ours=True)]
    result = bench(plan(Work(CONV, Size(1, 512, 8), FORWARD), watch=watch, limit=5.0), Silent(), candidates)
    assert [row.status for row in result.rows] == ["measured"]


def test_the_estimate_goes_on_growing_as_it_grew_between_its_bounds() -> None:
    assert estimate(1.0, 2.0, 3) == 16
    assert estimate(1.0, 4.0, 3) == 256
    assert estimate(1.0, 1.0, 3) == 8  # overheads hide the growth: at least with the length
    assert estimate(1.0, 9.0, 1) == 36


def test_every_subject_runs_on_the_reference_and_torch_and_is_right() -> None:
    works = [
        Work(subject, Size(1, 0 if subject.steps else 8, 32), direction)
        for subject in SUBJECTS.values()
        for direction in ((STEP,) if subject.steps else (FORWARD, BOTH))
    ]
    result = bench(plan(*works, rounds=1, only=("torch",)), Silent())
    assert [(row.subject, row.message) for row in result.rows if row.status != "measured"] == []
    assert len(result.rows) == len(works)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_hold_steps_or_lengths_and_obey_the_sizes_asked_for(name: str) -> None:
    for work in preset(name, card=False, batch=3, length=40, width=96):
        assert work.size == Size(3, 0 if work.subject.steps else 40, 96)
        assert (work.direction == STEP) == work.subject.steps


def test_the_guides_table_is_batch_32_length_256() -> None:
    assert {work.size[:2] for work in preset("guide", card=True)} == {(32, 256)}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"name": "big"}, "--preset"),
        ({"name": "guide", "batch": 0}, "--batch"),
        ({"name": "ops", "width": 33}, "--width"),
    ],
)
def test_wishes_that_mean_nothing_are_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        preset(**asked, card=False)


def test_rounds_are_interleaved_and_every_other_one_runs_backwards() -> None:
    order: list[str] = []
    calls = {name: ((lambda name=name: order.append(name)), 1) for name in "abc"}

    def watch(call: Any, count: int) -> float:
        call()
        return float(len(order))

    times = time_rounds(calls, 3, watch)
    assert "".join(order) == "abc" + "cba" + "abc"
    assert times["a"] == [1.0, 6.0, 7.0]


def test_fast_calls_are_made_often_enough_for_the_clock_and_slow_ones_once() -> None:
    assert [calls_a_round(seconds) for seconds in (0.0, 1e-6, 1e-3, 1.0)] == [50, 50, 20, 1]


def test_the_peak_is_what_was_held_at_once() -> None:
    assert memory.peak_of([(3, -100), (1, 100), (2, 50), (4, 20)]) == 150
    assert memory.peak_of([]) == 0


def test_the_peak_of_a_call_on_the_cpu_is_its_tensors() -> None:
    def call() -> torch.Tensor:
        first = torch.empty(1000)  # 4000 bytes, and the second on top of it
        second = torch.empty(2000)
        del first
        return torch.empty(500) + second[:500]

    peak = memory.peak_bytes(call, CPU)
    assert peak is not None and 12000 <= peak < 12000 + 1024  # blocks are whole cache lines


def test_the_least_bytes_count_arguments_results_and_gradients() -> None:
    x, weight = torch.ones(10, requires_grad=True), torch.ones(5)
    assert least_bytes({"x": x, "weight": weight, "flag": True}, [x], False) == 4 * (15 + 10)
    assert least_bytes({"x": x, "weight": weight}, [x], True) == 2 * 4 * 25 + 40


def test_rows_that_become_slower_are_noted() -> None:
    def row(times: tuple[float, ...]) -> Row:
        return Row("s", "", 1, 1, 1, FORWARD, "float32", "torch", "yes", "measured", rounds_ms=times)

    assert _drifts([row((1, 1, 1, 1.3, 1.3, 1.3))])
    assert not _drifts([row((1, 1, 1, 1.3, 1.0, 1.0))])
    assert not _drifts([row((1, 2))])


def test_an_implementation_that_is_not_here_is_refused_with_the_names_that_are() -> None:
    with pytest.raises(OptionError, match="here are: right"):
        bench(plan(SMALL, only=("wrong",)), Silent(), [right()])


@pytest.mark.parametrize("old_driver", [False, True])
def test_a_card_that_slows_itself_down_is_noted(monkeypatch: pytest.MonkeyPatch, old_driver: bool) -> None:
    def smi(fields: str) -> str:
        if fields.startswith("clocks_event") and old_driver:
            return "unknown"
        return ", ".join("Active" if "power_cap" in field else "Not Active" for field in fields.split(","))

    monkeypatch.setattr(machine, "_nvidia", smi)
    assert machine.throttled(torch.device("cuda")) == {"its power limit"}
    assert machine.throttled(torch.device("cpu")) == set()
    monkeypatch.setattr(machine, "_nvidia", lambda fields: "unknown")
    assert machine.throttled(torch.device("cuda")) == set()


def test_what_compiles_in_its_first_call_is_not_taken_for_slow() -> None:
    """A kernel for a length not seen yet takes a second to compile and microseconds to run."""
    seen: set[int] = set()

    def compiling(x: torch.Tensor, **others: Any) -> torch.Tensor:
        if x.shape[-1] not in seen:
            seen.add(x.shape[-1])
            time.sleep(0.06)
        return x

    work = Work(SUBJECTS["causal_conv1d"], Size(1, 256, 16), FORWARD)
    plan = Plan([work], torch.device("cpu"), limit=0.1)
    assert run._expected(plan, work, compiling, run.stopwatch(plan.device)) < 0.05
