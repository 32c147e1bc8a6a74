"""What of a CPU kernel can be tuned: the steps of its tile (or chunk), and on how many threads it runs.

    FORWARD = _tuning.tunable("swiglu", __name__, sizes=("rows", "columns"))
    ...
    how = FORWARD.settings(xy.element_size(), rows, dim)
    run(work_items, rows, at_least=how.at_least(ROWS_A_THREAD), most=how.threads)

`anymamba tune` needs no more than this to find a kernel, try what it offers and keep the best.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from pathlib import Path
from typing import NamedTuple

import torch

from anymamba.backends import tuned
from anymamba.machine.system import processor_name

__all__ = ["BLOCKS", "Settings", "Tunable", "tunable"]

BLOCKS = (16, 32, 64, 128)
"""Steps brought into a tile at a time: long ones amortise what a block costs, short ones stay in the first-level cache.
Divisors of CHECKPOINT_LENGTH: checkpoints lie between blocks. No value changes a bit of the result."""

THREADS = "threads that share the work, however little it is; 0: as many as PyTorch uses, where each has enough to do"


class Settings(NamedTuple):
    """How to run a kernel. `threads` 0: as many as PyTorch uses, and fewer for little work."""

    block: int
    threads: int = 0

    def at_least(self, items: int) -> int:
        """Return the work items worth a thread: `items`, unless the threads were measured."""
        return 1 if self.threads else items


class Tunable(NamedTuple):
    """A kernel whose settings can be tuned; made by `tunable`."""

    kernel: str
    module: str
    block: int
    blocks: tuple[int, ...]
    sizes: tuple[str, ...]
    threads: bool

    def place(self, itemsize: int, *sizes: int) -> tuned.Place:
        """Return where settings for calls of these sizes are kept."""
        words = ", ".join(
            [f"{name} {tuned.power(size)}" for name, size in zip(self.sizes, sizes)] + [f"{itemsize} bytes"]
        )
        return tuned.Place(_card(torch.get_num_threads()), self.kernel, words, _source(self.module))

    def offered(self, threads: int | None = None) -> list[dict[str, int]]:
        """Return every choice but the usual: each block with each number of threads, halving from PyTorch's own."""
        most = torch.get_num_threads() if threads is None else threads
        if not self.threads:
            return [{"block": block} for block in self.blocks if block != self.block]
        counts = [0]
        while most >= 1 and counts[-1] != 1:
            counts.append(most)
            most //= 2
        if not self.blocks:
            return [{"threads": number} for number in counts[1:]]
        every = [{"block": block, "threads": number} for number in counts for block in self.blocks]
        return [choice for choice in every if choice != {"block": self.block, "threads": 0}]

    def settings(self, itemsize: int, *sizes: int) -> Settings:
        """Return how to run a call: tuned, or with the usual block on PyTorch's threads."""
        return _settings(self, itemsize, sizes, torch.get_num_threads())


def tunable(
    kernel: str, module: str, *, block: int = 0, blocks: tuple[int, ...] = (), meaning: str = "",
    sizes: tuple[str, ...] = ("channels", "length"), threads: bool = True,
) -> Tunable:  # fmt: skip
    """Declare a kernel of `module` (its `__name__`).

    Parameters
    ----------
    kernel : str
        "selective_scan forward".
    module : str
    block : int
        The usual block; 0 if it has none.
    blocks : tuple of int
        What may be chosen instead.
    meaning : str
        Of the block.
    sizes : tuple of str
        What the sizes are called that `place` and `settings` take.
    threads : bool
        Whether the kernel's threads can be chosen.
    """
    name = f"cpu {kernel}"
    tuned.declare(name, **({"block": meaning} if blocks else {}), **({"threads": THREADS} if threads else {}))
    return Tunable(name, module, block, blocks, sizes, threads)


@functools.lru_cache(maxsize=4096)
def _settings(kernel: Tunable, itemsize: int, sizes: tuple[int, ...], threads: int) -> Settings:
    found = tuned.find(kernel.place(itemsize, *sizes), kernel.offered(threads))
    return Settings(kernel.block) if found is None else Settings(found.get("block", 0), found.get("threads", 0))


tuned.on_forget(_settings.cache_clear)


@functools.cache
def _source(module: str) -> str:
    folder = Path(__file__).parent
    own = Path(inspect.getfile(importlib.import_module(module)))
    return tuned.fingerprint(
        *(file.read_text(encoding="utf-8") for file in (own, folder / "_tiles.py", folder / "_math.py"))
    )


@functools.cache
def _card(threads: int) -> str:
    return f"{processor_name()}, {threads} threads"
