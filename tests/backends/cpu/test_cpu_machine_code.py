"""Kernels as machine code: compiled once a machine, called without numba, on any number of threads, never past their block."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba", reason="numba (the extra anymamba[cpu]) is not installed")

from anymamba.backends.cpu import _build, _native, _openmp, _threads
from anymamba.backends.cpu._compile import kernel
from anymamba.backends.cpu._scratch import begin, buffer, end

OTHER_SYSTEMS_THREADS = "plain threads"


@kernel
def _squares(first, after, scale, shift, negative, source, target):
    scratch = begin()
    row = buffer(scratch, 4, source)
    for i in range(first, after):
        for j in range(4):
            row[j] = source[i] * scale + shift
        target[i] += -row[3] if negative else row[3]
    end(scratch)


@pytest.fixture(params=[1, 2, 3, 8])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _result(items: int) -> torch.Tensor:
    source, target = torch.arange(items + 1, dtype=torch.float32), torch.zeros(items + 1)
    _squares.over(items, 3, 0.5, True, source, target)
    return target


def _wanted(items: int) -> torch.Tensor:
    return torch.cat([-(torch.arange(items, dtype=torch.float32) * 3 + 0.5), torch.zeros(1)])


@pytest.mark.parametrize("team", ["OpenMP", OTHER_SYSTEMS_THREADS])
@pytest.mark.parametrize("items", [0, 1, 2, 7, 100])
def test_every_item_is_done_once(threads: int, items: int, team: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if team == OTHER_SYSTEMS_THREADS:
        monkeypatch.setattr(_openmp, "compiled_team", lambda: None)
    assert torch.equal(_result(items), _wanted(items))


def test_a_team_of_fewer_threads_than_asked_for_does_every_item(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    def alone(code: int, argument: int, threads: int) -> None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code)(argument)

    monkeypatch.setattr(_openmp, "compiled_team", lambda: alone)
    monkeypatch.setattr(_threads.torch, "get_num_threads", lambda: 4)
    assert torch.equal(_result(9), _wanted(9))


def test_many_python_threads_may_call_at_once() -> None:
    with ThreadPoolExecutor(8) as pool:
        assert all(torch.equal(found, _wanted(33)) for found in pool.map(lambda _: _result(33), range(50)))


def test_no_memory_for_a_buffer_is_an_error_of_python() -> None:
    @kernel
    def greedy(first, after, elements, target):
        scratch = begin()
        room = buffer(scratch, elements, target)
        room[0] = first
        target[0] = room[0]
        end(scratch)

    with pytest.raises(MemoryError, match="no memory for its buffers"):
        greedy(0, 1, 1 << 58, torch.zeros(1))


def test_a_damaged_entry_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path))
    built: list[str] = []
    real = _build.build

    def counted(*arguments: object) -> bytes:
        built.append("")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(_build, "build", counted)
    _native.code(_squares, "ifbss")
    _native.code(_squares, "ifbss")
    assert len(built) == 1
    (entry,) = (tmp_path / "cpu").iterdir()
    data = bytearray(entry.read_bytes())
    data[-1] ^= 1
    entry.write_bytes(data)
    code = _native.code(_squares, "ifbss")
    assert len(built) == 2
    assert code.team


def test_what_would_call_into_a_runtime_that_is_not_there_is_refused() -> None:
    @kernel
    def asks(first, after, target):
        target[first] = int(str(after))

    with pytest.raises(Exception, match=r"what it should not|NRT|not supported|[Cc]annot|No implementation"):
        asks(0, 1, torch.zeros(1))


def test_a_later_process_does_not_import_numba(tmp_path: Path) -> None:
    call = (
        "import sys, torch; from anymamba.backends import use_backend; from anymamba.ops import causal_conv1d_fn\n"
        "with use_backend('cpu'): causal_conv1d_fn(torch.ones(1, 8, 16), torch.ones(8, 4))\n"
        "print('numba' in sys.modules)"
    )
    environment = {**os.environ, "ANYMAMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    seen = [
        subprocess.run(
            [sys.executable, "-c", call], env=environment, check=True, capture_output=True, text=True, encoding="utf-8"
        ).stdout.strip()
        for _ in range(2)
    ]
    assert seen == ["True", "False"]
