"""Processes that stay: started once for a test session, given functions to run together as the ranks of a process group."""

from __future__ import annotations

import datetime
import io
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Pool", "RankFailedError", "start_group"]


class RankFailedError(Exception):
    """A rank's function raised; the text is every rank's traceback, or what it returned."""

    def __init__(self, outcomes: list[tuple[bool, Any]]) -> None:
        self.outcomes = outcomes
        super().__init__("\n".join(f"rank {rank}: {outcome}" for rank, (_, outcome) in enumerate(outcomes)))


def start_group(rank: int, size: int, file: Path, timeout: float) -> None:
    """Join the gloo group that meets at a file."""
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback is not None:  # the machine's own name may lead nowhere
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=file.as_uri(), rank=rank, world_size=size, timeout=datetime.timedelta(seconds=timeout)
    )


def _pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data))


def _work(rank: int, size: int, file: Path, timeout: float, pipe: Connection) -> None:
    start_group(rank, size, file, timeout)
    groups = {count: dist.new_group(list(range(count))) for count in range(1, size + 1)}
    while True:
        task = pipe.recv()
        if task is None:
            break
        function, count, data = task
        try:
            outcome = (True, function(groups[count], *_unpack(data)))
            answer = _pack(outcome)
        except BaseException:
            answer = _pack((False, traceback.format_exc()))
        pipe.send_bytes(answer)
    dist.destroy_process_group()


class Pool:
    """Up to `size` ranks.

    Parameters
    ----------
    size : int
    folder : Path
        Empty: where the ranks meet.
    timeout : float
        Seconds that the group waits for a rank.
    """

    def __init__(self, size: int, folder: Path, timeout: float = 60) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, size, folder / "meeting", timeout, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
        """Run ``function(group, *arguments)`` on the first `size` ranks together; return what each returned."""
        outcomes = self.outcomes(function, size, *arguments)
        if not all(good for good, _ in outcomes):
            raise RankFailedError(outcomes)
        return [value for _, value in outcomes]

    def outcomes(self, function: Callable[..., Any], size: int, *arguments: Any) -> list[tuple[bool, Any]]:
        """Return whether each rank's function returned, and its value or traceback."""
        data = _pack(arguments)
        for pipe in self._pipes[:size]:
            pipe.send((function, size, data))
        return [_unpack(pipe.recv_bytes()) for pipe in self._pipes[:size]]

    def close(self) -> None:
        """Let all ranks end."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
