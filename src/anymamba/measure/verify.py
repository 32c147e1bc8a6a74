"""Is what runs here right? Proof by running, not by version numbers.

Three parts, each a stream of rows: the guide's script on the installed mamba_ssm; every operator on every backend, dtype and
device against the float64 reference; whole models (`anymamba.measure.models`): training, and generation step by step. A part
that fails is a row that says so, never the end of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

import torch

from anymamba import backends
from anymamba.errors import AnymambaError, BackendRefusedError
from anymamba.measure import models
from anymamba.measure.accuracy import (
    GRADIENT_BOUND,
    OUTPUT_BOUND,
    Deviation,
    deviations,
    outputs_and_gradients,
    reference_results,
)
from anymamba.measure.cases import Case, Draw, all_cases

__all__ = ["SCHEMA", "Plan", "Row", "Status", "make_plan", "passed", "to_json", "verify"]

SCHEMA = "anymamba-verify/1"
"""Name and version of the JSON form; the number changes when a field changes its meaning or goes away."""

QUICK_DTYPES = (torch.float32, torch.bfloat16)


class Status(str, Enum):
    """How a row ended."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"  # the backend said that it cannot, and why
    SKIPPED = "skipped"  # nothing to check here, e.g. mamba_ssm is not installed


@dataclass(frozen=True)
class Row:
    """One thing that was checked.

    Parameters
    ----------
    part : str
        "guide", "operators" or "models".
    name : str
        The operator, or what was done with a model.
    case : str
        Which call of the operator.
    backend, dtype, device : str
        Where it ran; backend "" is the automatic choice.
    status : Status
    error, bound : float, optional
        The relative error of the tensor that comes closest to its bound, or passes it.
    tensor : str
        Which tensor that is.
    message : str
        What was seen, or why it failed, was refused or skipped.
    """

    part: str
    name: str
    case: str
    backend: str
    dtype: str
    device: str
    status: Status
    error: float | None = None
    bound: float | None = None
    tensor: str = ""
    message: str = ""


@dataclass(frozen=True)
class Plan:
    """What to check.

    Parameters
    ----------
    quick : bool
        One typical call an operator, float32 and bfloat16, the smallest models.
    backends : sequence of str
        Names; empty: every one that works on this machine.
    devices : sequence of torch.device
    """

    quick: bool
    backends: tuple[str, ...]
    devices: tuple[torch.device, ...]

    def cases(self) -> list[tuple[Case, torch.dtype]]:
        """Return every case with every dtype that will be checked."""
        return [
            (case, dtype)
            for case in all_cases()
            if case.quick or not self.quick
            for dtype in case.dtypes
            if dtype in QUICK_DTYPES or not self.quick
        ]

    def __len__(self) -> int:
        """How many rows there will be."""
        on_devices = len(self.backends) * len(self.devices)
        return len(self.cases()) * on_devices + (len(models.CHECKS) + 1) * len(self.devices)


def make_plan(quick: bool, names: Sequence[str] = (), devices: Sequence[torch.device] = ()) -> Plan:
    """Return the plan for these wishes; empty means everything that works here.

    Raises
    ------
    UnknownBackendError
        If there is no backend of such a name.
    """
    for name in names:
        with backends.use_backend(name):
            pass
    from anymamba.measure.selection import present_devices

    available = tuple(name for name in backends.names() if backends.unavailable(name) is None)
    return Plan(quick, tuple(names) or available, tuple(devices) or tuple(present_devices()))


def verify(plan: Plan) -> Iterator[Row]:
    """Check what the plan says, one row after the other."""
    for device in plan.devices:
        yield _model_row("guide", models.guide_script, device)
    for case, dtype in plan.cases():
        for device in plan.devices:
            yield from _operator_rows(case, dtype, device, plan.backends)
    for device in plan.devices:
        for check in models.CHECKS:
            yield _model_row("models", check, device)


def passed(rows: Sequence[Row]) -> bool:
    """Whether nothing failed and something was proved."""
    statuses = {row.status for row in rows}
    return Status.FAILED not in statuses and Status.PASSED in statuses


def to_json(rows: Sequence[Row], seconds: float) -> dict[str, Any]:
    """Return plain values for `json.dumps`."""
    from anymamba import __version__

    return {
        "schema": SCHEMA,
        "anymamba": __version__,
        "torch": torch.__version__,
        "passed": passed(rows),
        "seconds": round(seconds, 3),
        "counts": {status.value: sum(row.status is status for row in rows) for status in Status},
        "rows": [{**asdict(row), "status": row.status.value, "error": _finite(row.error)} for row in rows],
    }


def _finite(error: float | None) -> float | str | None:
    # JSON has no infinity
    return "inf" if error == float("inf") else error


def _operator_rows(case: Case, dtype: torch.dtype, device: torch.device, names: Sequence[str]) -> Iterator[Row]:
    unknown = Row("operators", case.operator.name, case.name, "", _short(dtype), str(device), Status.FAILED)
    try:
        wanted = reference_results(case.function, case.arguments(Draw(dtype, torch.device("cpu"))), 0, case.changed)
    except Exception as error:  # the reference itself is broken: no backend can be judged
        for name in names:
            yield replace(unknown, backend=name, message=f"the float64 reference failed: {_words(error)}")
        return
    output_bound = case.output_bounds.get(dtype, OUTPUT_BOUND[dtype])
    gradient_bound = case.gradient_bounds.get(dtype, GRADIENT_BOUND[dtype])
    for name in names:
        row = replace(unknown, backend=name)
        try:
            with backends.use_backend(name):
                seen = outputs_and_gradients(case.function, case.arguments(Draw(dtype, device)), 0, case.changed)
            worst = _worst(deviations(seen, wanted, output_bound, gradient_bound))
        except BackendRefusedError as error:
            yield replace(row, status=Status.REFUSED, message=error.why)
        except Exception as error:
            yield replace(row, message=_words(error))
        else:
            yield replace(
                row,
                status=Status.PASSED if worst.passed else Status.FAILED,
                error=worst.error,
                bound=worst.bound,
                tensor=worst.name,
                message="" if worst.passed else f"{worst.name} is wrong",
            )


def _worst(found: list[Deviation]) -> Deviation:
    return max(found, key=lambda deviation: deviation.error / deviation.bound)


def _model_row(part: str, check: models.Check, device: torch.device) -> Row:
    row = Row(part, check.name, "", "", "fp32", str(device), Status.FAILED)
    try:
        outcome = check.run(device)
    except models.NotInstalledError as error:
        return replace(row, status=Status.SKIPPED, message=str(error))
    except Exception as error:
        return replace(row, message=_words(error))
    status = Status.PASSED if outcome.passed else Status.FAILED
    return replace(row, status=status, error=outcome.error, bound=outcome.bound, message=outcome.seen)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}[dtype]


def _words(error: BaseException) -> str:
    """Return an error in one line."""
    text = error.what if isinstance(error, AnymambaError) else str(error)
    return f"{type(error).__name__}: {' '.join(text.split())}"
