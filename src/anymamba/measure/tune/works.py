"""What there is to tune for a model of some size: the kernels that its operators ask for, forward, backward and decoding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from anymamba import backends
from anymamba.backends import tuned
from anymamba.errors import AnymambaError, OptionError
from anymamba.measure.bench.subjects import SUBJECTS, Size, Subject
from anymamba.measure.cases import Draw
from anymamba.measure.tune.calls import Recorded, catching

__all__ = ["Task", "backend_for", "calls_of_size", "only", "tasks"]


class Task(NamedTuple):
    """A kernel to tune, by a call that runs it."""

    call: Recorded
    place: tuned.Place
    offered: Sequence[tuned.Parameters]


def backend_for(device: torch.device) -> str | None:
    """Return the first backend with kernels for tensors on `device` that can be tuned, None if there is none."""
    if backends.unavailable("cuda") is None:
        from anymamba.backends.cuda import device_refusal

        if device_refusal(device) is None:
            return "cuda"
    return "cpu" if device.type == "cpu" and backends.unavailable("cpu") is None else None


OPERATORS = [subject for subject in SUBJECTS.values() if "block" not in subject.name]  # blocks are made of the others


def calls_of_size(
    size: Size, dtype: torch.dtype, device: torch.device, backend: str, subjects: Iterable[Subject] = OPERATORS
) -> list[Recorded]:
    """Return the calls of every operator at this size: forward, backward, a decoding step."""
    found: list[Recorded] = []
    for subject in subjects:
        with catching() as caught, backends.use_backend(backend), contextlib.suppress(AnymambaError):
            _run(subject, size, Draw(dtype, device))  # an operator that this backend refuses has nothing to tune
        found += [call for call, _ in caught]
    return found


def tasks(calls: Iterable[Recorded]) -> list[Task]:
    """Return what can be tuned of these calls, each place once: for the first call that asks for it."""
    found: dict[str, Task] = {}
    for call in calls:
        with tuned.listening() as heard, torch.no_grad():
            call.ready()
        for place, offered in heard:
            if offered:
                found.setdefault(place.name, Task(call, place, offered))
    return list(found.values())


def only(found: Sequence[Task], names: Sequence[str]) -> list[Task]:
    """Return the tasks whose kernel has one of these words in its name; all without any.

    Raises
    ------
    OptionError
        If there is no such kernel here.
    """
    chosen = [task for task in found if not names or any(name in task.place.kernel for name in names)]
    for name in names:
        if not any(name in task.place.kernel for task in found):
            kernels = ", ".join(dict.fromkeys(task.place.kernel for task in found))
            raise OptionError(f"--kernel is {name!r}, but here are: {kernels}.")
    return chosen


def _run(subject: Subject, size: Size, draw: Draw) -> None:
    arguments = subject.arguments(draw, *size)
    results = subject.ours(**arguments)
    outputs = [
        out for out in (results if isinstance(results, (tuple, list)) else [results])
        if isinstance(out, torch.Tensor) and out.requires_grad
    ]  # fmt: skip
    leaves = [value for value in arguments.values() if isinstance(value, torch.Tensor) and value.requires_grad]
    if outputs:
        torch.autograd.grad(outputs, leaves, [torch.randn_like(out) for out in outputs], allow_unused=True)
