"""The search for kernel parameters, by a clock of the test's own; the kernels are the real ones of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("numba", reason="the CPU's kernels need numba")

from anymamba import backends
from anymamba.backends import tuned
from anymamba.backends.cpu import _tuning, selective_scan
from anymamba.errors import OptionError
from anymamba.measure.bench.subjects import SUBJECTS, Size
from anymamba.measure.cases import Draw
from anymamba.measure.tune.meaning import meanings
from anymamba.measure.tune.search import MARGIN, Found, tune
from anymamba.measure.tune.works import Task, backend_for, calls_of_size, only, tasks

CPU, F32, SIZE = torch.device("cpu"), torch.float32, Size(2, 40, 32)
NAME = "cpu selective_scan forward"
TASKS = tasks(calls_of_size(SIZE, F32, CPU, "cpu"))
SCAN = next(task for task in TASKS if task.place.kernel == NAME)


@pytest.fixture(autouse=True)
def _own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "cache"))
    tuned.forget()
    yield
    monkeypatch.undo()
    tuned.forget()


class Silent:
    def step(self, text: str) -> None:
        pass


def seconds_of(choose: Callable[[Mapping[str, int]], float]) -> Callable[[Any, int], float]:
    """A stopwatch that tells the time from the parameters on trial."""

    def watch(call: Any, count: int) -> float:
        return choose(tuned._trials[NAME])

    return watch


def search(watch: Callable[[Any, int], float], task: Task = SCAN, **changed: Any) -> Found:
    options: dict[str, Any] = {"seconds": 1e6, "progress": Silent(), "watch": watch}
    (found,) = tune([task], **{**options, **changed})
    return found


def best(parameters: Mapping[str, int]) -> float:
    return 0.5 if parameters.get("block") == 32 and parameters.get("threads") == 0 else 1.0


def test_every_operator_of_the_backend_is_found_forward_backward_and_decoding() -> None:
    assert backend_for(CPU) == "cpu"
    assert {task.place.kernel for task in TASKS} == {
        NAME, "cpu selective_scan backward", "cpu causal_conv1d forward, rows", "cpu causal_conv1d backward, rows",
        "cpu ssd forward", "cpu ssd backward", "cpu selective_state_update", "cpu norm forward", "cpu norm backward",
        "cpu swiglu forward", "cpu swiglu backward",
    }  # fmt: skip
    assert len({task.place.name for task in TASKS}) == len(TASKS)


def test_every_parameter_that_is_offered_was_declared_with_its_meaning() -> None:
    said = meanings()
    for task in TASKS:
        for choice in task.offered:
            assert set(choice) == set(said[task.place.kernel])
    assert all(len(meaning) > 10 for names in said.values() for meaning in names.values())


def test_kernels_are_chosen_by_a_part_of_their_name() -> None:
    assert {task.place.kernel for task in only(TASKS, ["swiglu"])} == {"cpu swiglu forward", "cpu swiglu backward"}
    assert only(TASKS, []) == TASKS
    with pytest.raises(OptionError, match=r"swigloo.*swiglu forward"):
        only(TASKS, ["swigloo"])


def test_the_fastest_is_kept_and_used_from_then_on() -> None:
    found = search(seconds_of(best))
    assert found.parameters == {"block": 32, "threads": 0}
    assert (found.usual_ms, found.tuned_ms) == (1000, 500)
    assert found.tried == found.offered == len(selective_scan.FORWARD.offered())
    assert selective_scan.FORWARD.settings(4, 2 * 64, 40, 16) == _tuning.Settings(32, 0)
    other = selective_scan.FORWARD.settings(4, 2 * 64, 4000, 16)
    assert other == _tuning.Settings(selective_scan.BLOCK)  # another class of lengths


def test_the_usual_is_no_choice() -> None:
    assert {"block": selective_scan.BLOCK, "threads": 0} not in selective_scan.FORWARD.offered(4)
    assert selective_scan.BACKWARD.offered(4) == [{"threads": 4}, {"threads": 2}, {"threads": 1}]


def test_a_dry_run_keeps_nothing() -> None:
    assert search(seconds_of(best), dry_run=True).better
    assert tuned.entries() == {}


def test_what_is_faster_by_less_than_the_margin_is_noise() -> None:
    found = search(seconds_of(lambda parameters: 1 - MARGIN * 0.9 if parameters else 1.0))
    assert not found.better
    assert tuned.entries() == {}
    assert found.usual_ms == found.tuned_ms


def test_who_was_fast_once_only_is_found_out_at_the_end() -> None:
    seen: set[tuple[tuple[str, int], ...]] = set()

    def lucky(parameters: Mapping[str, int]) -> float:
        key = tuple(sorted(parameters.items()))
        first = key not in seen
        seen.add(key)
        return 0.1 if first and parameters else 1.0

    assert not search(seconds_of(lucky)).better


def test_wrong_results_and_errors_are_left_out_and_told() -> None:
    def breaking(*arguments: Any, **options: Any) -> Any:
        block = tuned._trials.get(NAME, {}).get("block")
        if block == 16:
            raise RuntimeError("cannot be launched")
        out, *others = selective_scan.selective_scan_forward(*arguments, **options)
        return [out * (1.5 if block == 32 else 1), *others]

    module = ModuleType("breaking")
    module.selective_scan_forward = breaking  # type: ignore[attr-defined]
    found = search(
        seconds_of(lambda parameters: parameters.get("block", 1000)),
        SCAN._replace(call=SCAN.call._replace(module=module)),
    )
    assert found.parameters["block"] == 64
    assert {reason.partition(": ")[2][:10] for reason in found.dropped} == {"cannot be ", "its result"}


def test_what_does_not_fit_the_time_is_not_tried() -> None:
    now = iter(range(1000))
    found = search(seconds_of(best), seconds=8, clock=lambda: float(next(now)))
    assert 0 < found.tried < found.offered


def test_who_has_no_turn_before_the_time_is_over_says_so() -> None:
    now = iter(range(0, 1000, 10))
    first, second = tune(
        [SCAN, SCAN], seconds=15, progress=Silent(), watch=seconds_of(best), clock=lambda: float(next(now))
    )
    assert (second.usual_ms, second.tried, second.offered) == (None, 0, first.offered)
    assert not second.better


def test_no_time_is_refused() -> None:
    with pytest.raises(OptionError, match="--seconds"):
        search(seconds_of(best), seconds=0)


@pytest.mark.parametrize("name", ["causal_conv1d", "selective_scan", "swiglu", "rms_norm with residual"])
def test_no_choice_of_the_cpu_changes_a_bit_of_the_result(name: str) -> None:
    subject, size = SUBJECTS[name], Size(2, 300, 32)  # more than one block, and checkpoints between them

    def results() -> list[torch.Tensor]:
        arguments = subject.arguments(Draw(F32, CPU), *size)
        with backends.use_backend("cpu"):
            outs = subject.ours(**arguments)
            outs = [out for out in (outs if isinstance(outs, tuple) else [outs]) if isinstance(out, torch.Tensor)]
            leaves = [value for value in arguments.values() if isinstance(value, torch.Tensor) and value.requires_grad]
            loss = sum((out.square().sum() for out in outs), start=torch.zeros(()))
            return [*outs, *torch.autograd.grad(loss, leaves)]

    usual = results()
    with tuned.listening() as heard:
        results()
    assert len(heard) == 2
    for place, _ in heard:
        for block in _tuning.BLOCKS:
            for threads in (0, 1, 2, 3):
                with tuned.trial(place.kernel, {"block": block, "threads": threads}):
                    for seen, wanted in zip(results(), usual):
                        assert torch.equal(seen, wanted), (place.kernel, block, threads)


@pytest.mark.parametrize("chunk", [16, 32, 128, 256])
def test_a_chunk_of_any_length_gives_the_same_scan_but_for_rounding(chunk: int) -> None:
    for task in only(TASKS, ["ssd"]):
        call = task.call.ready()
        usual = [tensor.clone() for tensor in call.results()]
        with tuned.trial(task.place.kernel, {"block": chunk}):
            for seen, wanted in zip(call.results(), usual):
                assert float((seen - wanted).norm()) <= task.call.bound * float(wanted.norm())
