"""Work is split over as many threads as PyTorch uses; an error in one comes out, after all have stopped."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("numba", reason="numba (the extra anymamba[cpu]) is not installed")

from anymamba.backends.cpu import _openmp
from anymamba.backends.cpu._threads import run


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("items", [0, 1, 2, 7, 100])
def test_every_item_is_done_once(threads: int, items: int) -> None:
    before = torch.get_num_threads()
    done: list[int] = []
    lock = threading.Lock()

    def work(first: int, after: int) -> None:
        with lock:
            done.extend(range(first, after))

    try:
        torch.set_num_threads(threads)
        run(work, items)
    finally:
        torch.set_num_threads(before)
    assert sorted(done) == list(range(items))


def test_an_error_in_any_range_comes_out() -> None:
    def work(first: int, after: int) -> None:
        if after == 10:
            raise ValueError("the last range")

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with pytest.raises(ValueError, match="the last range"):
            run(work, 10)
    finally:
        torch.set_num_threads(before)


def test_many_python_threads_may_call_at_once() -> None:
    counts = []

    def work(first: int, after: int) -> None:
        counts.append(after - first)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: run(work, 6), range(50)))
    assert sum(counts) == 300


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        done: list[int] = []
        run(lambda first, after: done.append(after - first), 10)
        child = os.fork()
        if child == 0:
            counts: list[int] = []
            run(lambda first, after: counts.append(after - first), 10)
            os._exit(0 if sum(counts) == 10 else 1)
        until = time.monotonic() + 20
        finished, status = os.waitpid(child, os.WNOHANG)
        while not finished and time.monotonic() < until:
            time.sleep(0.02)
            finished, status = os.waitpid(child, os.WNOHANG)
        if not finished:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert finished, "the forked process waits for threads that it does not have"
        assert status == 0
        assert sum(done) == 10
    finally:
        torch.set_num_threads(before)


def test_without_openmp_plain_threads_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_openmp, "team", lambda: None)
    names: set[str] = set()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run(lambda first, after: (names.add(threading.current_thread().name), time.sleep(0.05)), 2)
    finally:
        torch.set_num_threads(before)
    assert any(name.startswith("anymamba") for name in names)


def test_a_team_of_any_size_does_every_item_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP may give fewer threads than were asked for: here one."""
    monkeypatch.setattr(_openmp, "team", lambda: lambda work, threads: work())
    done: list[int] = []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        run(lambda first, after: done.extend(range(first, after)), 9)
    finally:
        torch.set_num_threads(before)
    assert sorted(done) == list(range(9))
