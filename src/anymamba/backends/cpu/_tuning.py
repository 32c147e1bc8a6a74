"""What of a CPU kernel can be tuned: the steps of a tile, and on how many threads it runs."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from anymamba.backends import tuned
from anymamba.machine.system import processor_name

__all__ = ["BLOCKS", "Settings", "offered", "place", "settings"]

BLOCKS = (16, 32, 64, 128)
"""Steps brought into a tile at a time: long ones amortise what a block costs, short ones stay in the first-level cache.
Divisors of CHECKPOINT_LENGTH: checkpoints lie between blocks. No value changes a bit of the result."""


class Settings(NamedTuple):
    """How to run a kernel. `threads` 0: as many as PyTorch uses."""

    block: int
    threads: int = 0


def place(kernel: str, module: ModuleType, channels: int, seqlen: int, itemsize: int) -> tuned.Place:
    """Return where parameters for such calls are kept; `channels` is the batch times the channels."""
    shape = f"channels {tuned.power(channels)}, length {tuned.power(seqlen)}, {itemsize} bytes"
    return tuned.Place(_card(torch.get_num_threads()), f"cpu {kernel}", shape, _source(module))


def offered(threads: int | None = None) -> list[dict[str, int]]:
    """Return every choice: each block with each number of threads, halving from PyTorch's own."""
    count = torch.get_num_threads() if threads is None else threads
    counts = [0]
    while count > 1:
        count //= 2
        counts.append(count)
    return [{"block": block, "threads": number} for number in counts for block in BLOCKS]


def settings(kernel: str, module: ModuleType, usual: int, channels: int, seqlen: int, itemsize: int) -> Settings:
    """Return how to run a call: tuned, or with the usual block on PyTorch's threads."""
    return _settings(kernel, module, usual, channels, seqlen, itemsize, torch.get_num_threads())


@functools.lru_cache(maxsize=4096)
def _settings(
    kernel: str, module: Any, usual: int, channels: int, seqlen: int, itemsize: int, threads: int
) -> Settings:
    found = tuned.find(place(kernel, module, channels, seqlen, itemsize), offered(threads))
    return Settings(usual) if found is None else Settings(found["block"], found["threads"])


tuned.on_forget(_settings.cache_clear)


@functools.cache
def _source(module: Any) -> str:
    folder = Path(__file__).parent
    own = Path(inspect.getfile(module))
    return tuned.fingerprint(
        *(file.read_text(encoding="utf-8") for file in (own, folder / "_tiles.py", folder / "_math.py"))
    )


@functools.cache
def _card(threads: int) -> str:
    return f"{processor_name()}, {threads} threads"
