"""Running a kernel on several threads: as many as PyTorch uses, each a range of independent work items.

Not numba's own `parallel=True`: its layers need OpenMP or TBB or crash on concurrent calls, and do not survive fork. Kernels
here release the GIL and take a range; this splits the range over PyTorch's own OpenMP threads (`_openmp`), or over plain ones
where those cannot be had: on Windows and macOS, and in a forked process, whose parent's they were. An item's result never
depends on who computes it, so neither the number of threads nor the split changes a bit.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from anymamba.backends.cpu import _openmp
from anymamba.backends.cpu._native import check

if TYPE_CHECKING:
    from anymamba.backends.cpu._native import Code

__all__ = ["run", "run_compiled"]

_pool: ThreadPoolExecutor | None = None
_pool_owner = 0
_pool_size = 0
_lock = threading.Lock()
_forked = False


def run(function: Callable[[int, int], object], items: int, *, at_least: int = 1, most: int = 0) -> None:
    """Call ``function(first, last)`` so that every item in range(items) is covered once; return when all are done.

    Parameters
    ----------
    function : callable
        Computes items first <= i < last.
    items : int
        How many there are.
    at_least : int
        Items worth a thread: fewer run on the calling thread.
    most : int
        At most so many threads, and never more than PyTorch uses; 0: as many as that.
    """
    threads = min(most or torch.get_num_threads(), torch.get_num_threads(), items // max(at_least, 1))
    if threads <= 1:
        if items:
            function(0, items)
        return
    bounds = [items * i // threads for i in range(threads + 1)]
    team = None if _forked else _openmp.team()
    if team is not None:
        _run_on_team(team, function, bounds)
        return
    pool = _workers(threads - 1)
    others = [pool.submit(function, bounds[i], bounds[i + 1]) for i in range(1, threads)]
    try:
        function(bounds[0], bounds[1])
    finally:
        for other in others:  # wait for all before any error leaves: they write into our caller's memory
            other.exception()
    for other in others:
        other.result()


def run_compiled(code: Code, items: int, block: bytes, *, at_least: int = 1, most: int = 0) -> None:
    """Do as `run` for a compiled kernel and the block with its arguments (`_native`): its threads run no Python."""
    threads = min(most or torch.get_num_threads(), torch.get_num_threads(), items // max(at_least, 1))
    if threads <= 1:
        if items:
            check(code.range(0, items, block))
        return
    shared = ctypes.create_string_buffer(block, len(block))
    words = ctypes.cast(shared, ctypes.POINTER(ctypes.c_int64))
    words[1], words[2] = items, threads
    address = ctypes.addressof(shared)
    team = None if _forked else _openmp.compiled_team()
    if team is not None:
        team(code.team, address, threads)
    else:
        work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.team)
        others = [_workers(threads - 1).submit(work, address) for _ in range(1, threads)]
        work(address)
        for other in others:
            other.result()
    check(words[3])


def _run_on_team(
    team: Callable[[Callable[[], None], int], None], function: Callable[[int, int], object], bounds: list[int]
) -> None:
    # Threads take ranges until there are none: right with any number of threads, also fewer than were asked for.
    left = itertools.count()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while (i := next(left)) < len(bounds) - 1:
                function(bounds[i], bounds[i + 1])
        except BaseException as error:  # nothing may leave through OpenMP's frames
            errors.append(error)

    team(work, len(bounds) - 1)
    if errors:
        raise errors[0]


def _workers(count: int) -> ThreadPoolExecutor:
    """Return a pool of at least `count` threads that belongs to this process (threads do not survive fork)."""
    global _pool, _pool_owner, _pool_size  # noqa: PLW0603
    with _lock:
        if _pool is None or _pool_owner != os.getpid() or _pool_size < count:
            _pool = ThreadPoolExecutor(max_workers=count, thread_name_prefix="anymamba")
            _pool_owner, _pool_size = os.getpid(), count
        return _pool


def _after_fork() -> None:
    global _lock, _pool, _forked
    _lock, _pool, _forked = threading.Lock(), None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
