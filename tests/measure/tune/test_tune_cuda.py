"""Tuning the CUDA kernels, on the emulated card: the real sources are compiled with each choice's macros and launched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from anymamba import backends
from anymamba.backends import tuned
from anymamba.backends.cuda import causal_conv1d, selective_scan
from anymamba.backends.cuda.runtime import sources
from anymamba.measure.bench.subjects import Size
from anymamba.measure.cases import Draw
from anymamba.measure.tune.kernels import Kernel, kernels
from anymamba.measure.tune.search import tune
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


def kernel(name: str) -> Kernel:
    return next(kernel for kernel in kernels(CPU) if kernel.subject.name == name)


def run(one: Kernel) -> torch.Tensor:
    with torch.no_grad(), backends.use_backend("cuda"):
        out: torch.Tensor = one.subject.ours(**one.subject.arguments(Draw(F32, CPU), *SIZE))
    return out


def test_the_convolutions_pieces_are_found_kept_and_compiled_in() -> None:
    with emulated() as runtime:
        one = kernel("causal_conv1d")

        def watch(call: Any, count: int) -> float:
            return 0.5 if tuned._trials["cuda causal_conv1d forward"].get("pieces") == 4 else 1.0

        (found,) = tune([one], [SIZE], F32, CPU, seconds=1e6, progress=Silent(), watch=watch)
        assert found.parameters == {"pieces": 4}
        assert found.dropped == ()
        runtime._kernels.clear()
        run(one)
        assert any("PIECES" in name and "'4'" in name for name in map(str, runtime._kernels))


def test_the_scans_shape_obeys_what_is_kept_and_stays_right() -> None:
    with emulated() as runtime:
        one = kernel("selective_scan")
        usual = run(one)
        choice = {"lanes": 4, "threads": 64, "min_blocks": 2, "segments": 1}
        assert choice in one.offered(SIZE, F32)
        place = one.place(SIZE, F32)
        tuned.keep({place.name: tuned.Entry(choice, place.source, 2.0, 1.0)})
        shape, segments = selective_scan.forward_shape(16, 4, 1, 64, 64, -1)
        assert (shape.lanes, shape.threads, shape.min_blocks, segments) == (4, 64, 2, 1)
        runtime.driver.launches.clear()
        assert torch.allclose(run(one), usual, atol=1e-5)
        assert runtime.driver.launches[0][1][3] == 64  # threads of a block


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


def test_a_changed_source_makes_what_was_kept_void(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated():
        one = kernel("causal_conv1d")
        place = one.place(SIZE, F32)
        tuned.keep({place.name: tuned.Entry({"pieces": 4}, place.source, 2.0, 1.0)})
        assert tuned.find(place, causal_conv1d.PIECES) == {"pieces": 4}
        read = sources.read
        changed = read("causal_conv1d_forward.cu")._replace(text="// faster now\n")
        monkeypatch.setattr("anymamba.backends.cuda._tuning.read", lambda file: changed)
        assert tuned.find(one.place(SIZE, F32), causal_conv1d.PIECES) is None
