"""What need not be run: CUDA choices told apart by what they would launch and by the compiler's reports.

A rehearsal of the call under a choice notes its launches and runs none. A choice that launches what another does is the same.
The variants of the others are compiled side by side; one that does not fit a multiprocessor, or keeps more in local memory than
the usual parameters (registers spilled), is out before it has run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple, cast

from anymamba.backends import tuned
from anymamba.backends.cuda.runtime import Kernel, Variant, runtime
from anymamba.backends.cuda.runtime.kernel import Runtime, use_runtime
from anymamba.errors import AnymambaError

__all__ = ["Pruning"]

TOGETHER = min(os.cpu_count() or 1, 16)
"""Compiled at a time."""


class _Launch(NamedTuple):
    variant: Variant
    device: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    values: tuple[Any, ...]


class _Rehearsal:
    """Stands for a runtime: kernels that note their launches."""

    def __init__(self, real: Runtime) -> None:
        self.real = real
        self.launches: list[_Launch] = []

    def load(self, variant: Variant, device: int) -> _Noting:
        return _Noting(self, variant, device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class _Noting:
    """Stands for a kernel."""

    def __init__(self, rehearsal: _Rehearsal, variant: Variant, device: int) -> None:
        self._rehearsal, self._variant, self.device = rehearsal, variant, device

    def pack(self, *values: Any) -> bytes:
        return b""

    def plan(self, grid: Any, block: Any, shared_bytes: int, *values: Any) -> Callable[..., None]:
        self._rehearsal.launches.append(_Launch(self._variant, self.device, grid, block, shared_bytes, values))
        return lambda *pointers: None

    def launch(self, grid: Any, block: Any, shared_bytes: int, parameters: bytes, stream: int | None = None) -> None:
        self.plan(grid, block, shared_bytes)

    def __getattr__(self, name: str) -> Any:  # what a launch is settled by: asked of the compiled kernel
        return getattr(self._rehearsal.real.load(self._variant, self.device), name)


class Pruning:
    """Chooses what is worth running, for one kernel and one call.

    Parameters
    ----------
    kernel : str
    call : callable
    """

    def __init__(self, kernel: str, call: Callable[[], object]) -> None:
        self._kernel, self._call = kernel, call
        usual = self._rehearse({})
        self._seen = {usual}
        self._spilled = max((self._compiled(launch).local_bytes for launch in usual), default=0)

    def worth(
        self, choices: Sequence[Mapping[str, int]], left: Callable[[], float] = lambda: float("inf")
    ) -> list[Mapping[str, int]]:
        """Return those of `choices` that launch something new, which fits, of what can be compiled in the time `left`."""
        new: list[tuple[Mapping[str, int], tuple[_Launch, ...]]] = []
        for choice in choices:
            try:
                launches = self._rehearse(choice)
            except AnymambaError:
                continue
            if launches not in self._seen:
                self._seen.add(launches)
                new.append((choice, launches))
        current = runtime()
        variants = {launch.variant: launch.device for _, launches in new for launch in launches}
        with ThreadPoolExecutor(max_workers=TOGETHER) as pool:
            made = {
                pool.submit(current.image, variant, current.capability(index)): variant
                for variant, index in variants.items()
            }
            seconds = left()
            done, late = wait(made, None if seconds == float("inf") else max(seconds, 0.0))
            for one in late:
                one.cancel()  # those that run already are waited for
        compiled = {made[one] for one in done if one.exception() is None}
        return [
            choice
            for choice, launches in new
            if all(launch.variant in compiled and self._fits(launch) for launch in launches)
        ]

    def _fits(self, launch: _Launch) -> bool:
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        try:
            kernel = runtime().load(launch.variant, launch.device)
            if kernel.resources().local_bytes > self._spilled:
                return False
            return kernel.occupancy(threads, launch.shared_bytes) > 0
        except AnymambaError:
            return False

    def _compiled(self, launch: _Launch) -> Any:
        kernel: Kernel = runtime().load(launch.variant, launch.device)
        return kernel.resources()

    def _rehearse(self, choice: Mapping[str, int]) -> tuple[_Launch, ...]:
        rehearsal = _Rehearsal(runtime())
        with use_runtime(cast(Runtime, rehearsal)), tuned.trial(self._kernel, choice):
            self._call()
        return tuple(rehearsal.launches)
