"""Tuning the CUDA kernels, on the emulated card: the real sources are compiled with each choice's macros and launched."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from anymamba import backends
from anymamba.backends import tuned
from anymamba.backends.cuda import causal_conv1d, selective_scan, ssd
from anymamba.backends.cuda.runtime import sources
from anymamba.backends.cuda.runtime.driver import Resources
from anymamba.errors import KernelCompileError
from anymamba.measure.bench.subjects import SUBJECTS, Size
from anymamba.measure.cases import Draw
from anymamba.measure.tune.meaning import meanings
from anymamba.measure.tune.pruning import Pruning
from anymamba.measure.tune.search import tune
from anymamba.measure.tune.works import Task, calls_of_size, only, tasks
from cuda_emulator import emulated, needs_emulator

pytestmark = needs_emulator
CPU, F32, SIZE = torch.device("cpu"), torch.float32, Size(1, 64, 32)


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


def task(name: str, size: Size = SIZE, dtype: torch.dtype = F32) -> Task:
    norms = {"layer_norm": "rms_norm with residual", "layernorm_gated": "gated rms_norm"}
    operator = name.partition(" ")[0]
    calls = calls_of_size(size, dtype, CPU, "cuda", [SUBJECTS[norms.get(operator, operator)]])
    (found,) = (one for one in tasks(calls) if one.place.kernel == f"cuda {name}")
    return found


def scan() -> torch.Tensor:
    subject = SUBJECTS["selective_scan"]
    with torch.no_grad(), backends.use_backend("cuda"):
        out: torch.Tensor = subject.ours(**subject.arguments(Draw(F32, CPU), *SIZE))
    return out


def test_every_operator_of_the_card_is_found_forward_backward_and_decoding() -> None:
    with emulated():
        found = tasks(calls_of_size(Size(1, 16, 32), F32, CPU, "cuda"))
    said = meanings()
    names = {one.place.kernel for one in found}
    assert names >= {
        f"cuda {name}" for name in (
            "selective_scan forward", "selective_scan backward", "causal_conv1d forward", "causal_conv1d backward",
            "ssd forward", "selective_state_update", "causal_conv1d_update", "layer_norm forward", "layer_norm backward",
            "ssd backward", "layernorm_gated forward", "layernorm_gated backward", "swiglu forward", "swiglu backward",
        )
    }  # fmt: skip
    for one in found:
        assert {name for choice in one.offered for name in choice} == set(said[one.place.kernel])


def test_the_convolutions_pieces_are_found_kept_and_compiled_in() -> None:
    with emulated() as runtime:
        one = task("causal_conv1d forward")

        def watch(call: Any, count: int) -> float:
            return 0.5 if tuned._trials["cuda causal_conv1d forward"].get("pieces") == 4 else 1.0

        (found,) = tune([one], seconds=1e6, progress=Silent(), watch=watch)
        assert found.parameters == {"pieces": 4}
        assert found.dropped == ()
        assert found.pruned == 1  # 2 pieces are the usual ones at this length: nothing new to launch
        runtime._kernels.clear()
        subject = SUBJECTS["causal_conv1d"]
        with backends.use_backend("cuda"):
            subject.ours(**subject.arguments(Draw(F32, CPU), *SIZE))
        assert any("PIECES" in name and "'4'" in name for name in map(str, runtime._kernels))


def test_the_scans_shape_obeys_what_is_kept_and_stays_right() -> None:
    with emulated() as runtime:
        one = task("selective_scan forward")
        usual = scan()
        choice = {"lanes": 4, "threads": 64, "min_blocks": 2, "segments": 1}
        assert choice in one.offered
        tuned.keep({one.place.name: tuned.Entry(choice, one.place.source, 2.0, 1.0)})
        shape, segments = selective_scan.forward_shape(16, 4, 1, 64, 64, -1)
        assert (shape.lanes, shape.threads, shape.min_blocks, segments) == (4, 64, 2, 1)
        runtime.driver.launches.clear()
        assert torch.allclose(scan(), usual, atol=1e-5)
        assert runtime.driver.launches[0][1][3] == 64  # threads of a block


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("selective_scan backward", {"lanes": 4, "threads": 64, "min_blocks": 6, "block": 4, "segments": 2}),
        ("selective_scan backward", {"lanes": 16, "threads": 32, "min_blocks": 12, "block": 16, "segments": 1}),
        ("layer_norm forward", {"columns": 16}),
        ("layer_norm backward", {"columns": 4, "threads": 512, "ahead": 1}),
        ("layernorm_gated backward", {"columns": 16, "threads": 0, "ahead": 0}),
        ("swiglu backward", {"threads": 64}),
        ("ssd backward", {"steps": 16, "warps": 4, "stages": 1, "splits": 1}),
        ("causal_conv1d backward", {"blocks": 32}),
        ("causal_conv1d_update", {"threads": 32, "sequences": 8}),
        ("selective_state_update", {"threads": 64, "blocks": 8, "share": 2}),
        (
            "ssd forward",
            {"steps": 16, "columns": 32, "warps": 2, "stages": 2, "state_buffers": 1, "min_blocks": 1, "segments": 2},
        ),
    ],
)
def test_other_choices_give_the_same_results(name: str, choice: Mapping[str, int]) -> None:
    with emulated():
        one = task(name, Size(2, 140, 32) if "conv1d" in name else Size(1, 260, 32))
        assert choice in one.offered
        call = one.call.ready()
        usual = [tensor.clone() for tensor in call.results()]
        with tuned.trial(one.place.kernel, choice):
            seen = call.results()
        for result, wanted in zip(seen, usual):
            assert float((result - wanted).norm()) <= one.call.bound * (float(wanted.norm()) or 1.0)


def test_what_launches_the_same_or_spills_or_does_not_fit_is_ruled_out_before_it_runs() -> None:
    with emulated() as runtime:
        one = task("causal_conv1d_update", Size(2, 0, 32))
        call = one.call.ready()
        pruning = Pruning(one.place.kernel, call)
        launched = len(runtime.driver.launches)
        usual = {"threads": 128, "sequences": 1}
        assert pruning.worth([usual, {"threads": 64, "sequences": 2}, {"threads": 64, "sequences": 4}]) == [
            {"threads": 64, "sequences": 2}  # the batch is 2: four sequences a block are two
        ]
        runtime.driver.resources = lambda function, device: Resources(255, 16, 0)
        assert pruning.worth([{"threads": 32, "sequences": 1}]) == []
        del runtime.driver.resources
        runtime.driver.occupancy = lambda function, threads, shared, device: 0
        assert pruning.worth([{"threads": 256, "sequences": 2}]) == []
        assert len(runtime.driver.launches) == launched


def test_what_cannot_be_compiled_in_the_time_left_is_not_run() -> None:
    with emulated() as runtime:
        one = task("selective_state_update", Size(1, 0, 32))
        pruning = Pruning(one.place.kernel, one.call.ready())
        started = threading.Event()

        def refusing(*arguments: Any) -> Any:
            started.set()
            time.sleep(0.2)
            raise KernelCompileError("no")

        runtime.compiler.compile = refusing
        runtime.cache.get = lambda key: None
        choices = [{"threads": threads, "blocks": 8, "share": 1} for threads in (64, 256)]
        assert pruning.worth(choices, lambda: 0.0) == []
        assert pruning.worth([{"threads": 64, "blocks": 16, "share": 2}]) == []
        assert started.is_set()


def test_every_choice_of_the_scan_fits_a_block_and_its_states() -> None:
    for length in (64, 65536):
        with emulated():
            usual, segments = selective_scan.usual_forward_shape(16, 2, 1, 2048, length, -1)
        for choice in selective_scan.offered(usual, segments, length):
            shape = usual._replace(lanes=choice["lanes"], threads=choice["threads"])
            assert shape.states % shape.lanes == 0
            assert shape.threads % 32 == 0 and shape.threads >= 32
            assert 1 <= choice["segments"] <= 32
            assert shape.shared_bytes(False) <= 99 * 1024  # what every card since Volta has for a block


@pytest.mark.parametrize("dstate", [1, 4, 8, 16, 32, 64, 128, 256])
def test_every_choice_of_the_scans_backward_keeps_the_kernels_conditions(dstate: int) -> None:
    limit = 227 * 1024 if dstate > 128 else 99 * 1024
    choices = selective_scan.offered_backward(dstate, 2, 4096, limit)
    assert choices
    for choice in choices:
        shape = selective_scan._with(selective_scan.backward_shape(dstate), choice)
        own = shape.states // shape.lanes
        assert shape.states >= dstate
        assert shape.states == own * shape.lanes and own & (own - 1) == 0
        assert shape.tile // (shape.vector * shape.lanes) >= 1
        assert shape.threads % shape.tile == 0
        assert shape.shared_bytes() <= limit


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dstate", [16, 64, 128, 256])
def test_every_choice_of_the_dual_scan_keeps_the_kernels_conditions(size: int, dstate: int) -> None:
    limit = 227 * 1024
    usual = ssd._shapes(64, dstate, size, limit)[0]
    choices = ssd.offered(usual, 1, 4096, size, limit)
    assert choices
    for choice in choices:
        strips = choice["steps"] // 16
        columns = choice["columns"] // (choice["warps"] // strips)
        across = min(usual.states // 16, choice["warps"])
        assert choice["warps"] % strips == 0 and columns % 16 == 0
        assert (usual.states // across) % 16 == 0 and (choice["columns"] // (choice["warps"] // across)) % 16 == 0


def test_a_changed_source_makes_what_was_kept_void(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated():
        place = task("causal_conv1d forward").place
        tuned.keep({place.name: tuned.Entry({"pieces": 4}, place.source, 2.0, 1.0)})
        assert tuned.find(place, causal_conv1d.PIECES) == {"pieces": 4}
        read = sources.read
        changed = read("causal_conv1d_forward.cu")._replace(text="// faster now\n")
        monkeypatch.setattr("anymamba.backends.cuda._tuning.read", lambda file: changed)
        tuned.forget()
        assert tuned.find(task("causal_conv1d forward").place, causal_conv1d.PIECES) is None


def test_kernels_of_the_card_are_chosen_by_a_part_of_their_name() -> None:
    with emulated():
        steps = [subject for subject in SUBJECTS.values() if subject.steps and "block" not in subject.name]
        found = tasks(calls_of_size(SIZE, F32, CPU, "cuda", steps))
    assert {one.place.kernel for one in only(found, ["update"])} == {
        "cuda causal_conv1d_update", "cuda selective_state_update"
    }  # fmt: skip
