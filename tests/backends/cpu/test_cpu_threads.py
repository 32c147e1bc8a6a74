"""Work is split over as many threads as PyTorch uses; an error in one comes out, after all have stopped."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("numba", reason="numba (the extra anymamba[cpu]) is not installed")

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
