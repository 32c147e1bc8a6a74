"""The last line: what will work on this machine, and what would make it better.

Three routes: the port on the GPU, the port on the CPU, and a native build.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anymamba.doctor.result import Result, Status, Way
from anymamba.machine import Machine

__all__ = ["Verdict", "verdicts"]

# Checks about the GPU: they decide the route on the card and say nothing about the CPU.
_ABOUT_GPU = ("gpu-seen", "gpu-architecture", "torch-cuda-build", "torch-cuda-available", "torch-runs-on-card")


@dataclass(frozen=True)
class Verdict:
    """One route. `works` None: it does not apply here (no card). `obstacles` and `better` are ids of results."""

    route: str
    works: bool | None
    obstacles: tuple[str, ...]
    better: tuple[str, ...]


def verdicts(machine: Machine, results: Sequence[Result]) -> tuple[Verdict, ...]:
    """Judge each route by the results that matter for it."""
    port = [result for result in results if result.way.covers(Way.PORT)]
    cpu = [result for result in port if result.id not in _ABOUT_GPU]
    native = [result for result in results if result.way.covers(Way.NATIVE)]
    return (
        _on_gpu(machine, port),
        _judge("port on CPU", cpu),
        _judge("native", native),
    )


def _judge(route: str, results: Sequence[Result]) -> Verdict:
    obstacles = _ids(results, Status.FAIL)
    return Verdict(route, not obstacles, obstacles, _ids(results, Status.WARN))


def _on_gpu(machine: Machine, results: Sequence[Result]) -> Verdict:
    torch, driver = machine.torch, machine.driver
    usable = torch is not None and (torch.cuda_available or torch.mps or torch.xpu)
    if not (usable or driver.cards or driver.on_bus):
        return Verdict("port on GPU", None, (), ())
    verdict = _judge("port on GPU", results)
    if usable or not verdict.works:
        return verdict
    # Nothing failed, yet torch has no GPU: the warnings about the GPU are what stands in the way.
    in_the_way = tuple(one for one in _ids(results, Status.WARN) if one in _ABOUT_GPU)
    return Verdict(verdict.route, False, in_the_way, tuple(one for one in verdict.better if one not in in_the_way))


def _ids(results: Sequence[Result], status: Status) -> tuple[str, ...]:
    return tuple(result.id for result in results if result.status is status)
