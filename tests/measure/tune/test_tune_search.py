"""The search for kernel parameters, by a clock of the test's own; the kernels are the real ones of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba", reason="the CPU's kernels need numba")

from anymamba import backends
from anymamba.backends import tuned
from anymamba.backends.cpu import _tuning, causal_conv1d
from anymamba.errors import OptionError
from anymamba.measure.bench.subjects import SUBJECTS, Size
from anymamba.measure.cases import Draw
from anymamba.measure.tune.kernels import Kernel, kernels
from anymamba.measure.tune.search import MARGIN, Found, tune

CPU, F32, SIZE = torch.device("cpu"), torch.float32, Size(2, 40, 32)
CONV = next(kernel for kernel in kernels(CPU) if kernel.subject.name == "causal_conv1d")
NAME = "cpu causal_conv1d forward"


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


def search(watch: Callable[[Any, int], float], kernel: Kernel = CONV, **changed: Any) -> Found:
    options: dict[str, Any] = {"seconds": 1e6, "progress": Silent(), "watch": watch}
    (found,) = tune([kernel], [SIZE], F32, CPU, **{**options, **changed})
    return found


def best(parameters: Mapping[str, int]) -> float:
    return 0.5 if parameters.get("block") == 32 and parameters.get("threads") == 0 else 1.0


def test_the_fastest_is_kept_and_used_from_then_on() -> None:
    found = search(seconds_of(best))
    assert found.parameters == {"block": 32, "threads": 0}
    assert (found.usual_ms, found.tuned_ms) == (1000, 500)
    assert found.tried == found.offered == len(_tuning.offered())
    how = _tuning.settings(causal_conv1d.FORWARD, causal_conv1d, 128, 2 * 64, 40, 4)
    assert how == _tuning.Settings(32, 0)
    other = _tuning.settings(causal_conv1d.FORWARD, causal_conv1d, 128, 2 * 64, 4000, 4)
    assert other == _tuning.Settings(128)  # another class of lengths


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
    subject = CONV.subject

    def breaking(**arguments: Any) -> Any:
        block = tuned._trials[NAME].get("block")
        if block == 16:
            raise RuntimeError("cannot be launched")
        return subject.ours(**arguments) * (1.5 if block == 32 else 1)

    found = search(
        seconds_of(lambda parameters: parameters.get("block", 1000)),
        replace(CONV, subject=replace(subject, ours=breaking)),
    )
    assert found.parameters["block"] == 64
    assert {reason.partition(": ")[2][:10] for reason in found.dropped} == {"cannot be ", "its result"}


def test_what_does_not_fit_the_time_is_not_tried() -> None:
    now = iter(range(1000))
    found = search(seconds_of(best), seconds=8, clock=lambda: float(next(now)))
    assert 0 < found.tried < found.offered


def test_no_time_is_refused() -> None:
    with pytest.raises(OptionError, match="--seconds"):
        search(seconds_of(best), seconds=0)


@pytest.mark.parametrize("name", ["causal_conv1d", "selective_scan"])
def test_no_choice_changes_a_bit_of_the_result(name: str) -> None:
    subject, size = SUBJECTS[name], Size(2, 300, 32)  # more than one block, and checkpoints between them
    (kernel,) = (kernel for kernel in kernels(CPU) if kernel.subject.name == name)
    place = kernel.place(size, F32)

    def results() -> list[torch.Tensor]:
        arguments = subject.arguments(Draw(F32, CPU), *size)
        with backends.use_backend("cpu"):
            out = subject.ours(**arguments)
            leaves = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
            return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    usual = results()
    for parameters in _tuning.offered(4):
        with tuned.trial(place.kernel, parameters):
            for seen, wanted in zip(results(), usual):
                assert torch.equal(seen, wanted), parameters


def test_the_place_is_the_one_that_the_operator_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    find = tuned.find
    monkeypatch.setattr(tuned, "find", lambda place, offered: asked.append(place.name) or find(place, offered))
    for kernel in kernels(CPU):
        for dtype in (F32, torch.bfloat16, torch.float64):
            tuned.forget()
            asked.clear()
            with torch.no_grad(), backends.use_backend("cpu"):
                kernel.subject.ours(**kernel.subject.arguments(Draw(dtype, CPU), *SIZE))
            assert asked == [kernel.place(SIZE, dtype).name]
