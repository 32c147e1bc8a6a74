"""Does each operator really run here? Proved by calling it, not by version numbers."""

from __future__ import annotations

from anymamba.doctor.result import Result, Status, Way
from anymamba.machine import Machine


def operators_run(machine: Machine) -> Result | None:
    """Every operator, forward and backward, on every device; the first failure is quoted."""
    runs = machine.operators
    if not runs:
        return None
    done = [run for run in runs if run.ok]
    failed = [run for run in runs if run.ok is False]
    untried = [run for run in runs if run.ok is None]
    devices = dict.fromkeys(run.device for run in runs)
    seen = "; ".join(
        f"{device}: {sum(run.device == device for run in done)} of {sum(run.device == device for run in runs)}"
        + _backends({run.backend for run in done if run.device == device})
        for device in devices
    )
    if untried:
        seen += f"; not tried: {', '.join(dict.fromkeys(run.operator for run in untried))}"
    if not failed:
        return Result("operators-run", "Operators", Status.OK if done else Status.INFO, Way.PORT, seen, "all run")
    first = failed[0]
    return Result(
        "operators-run",
        "Operators",
        Status.FAIL,
        Way.PORT,
        seen=seen,
        wanted="all run",
        why=f"{first.operator} on {first.device}: {first.problem}",
        fix="anymamba verify    (every operator, backend and dtype); anymamba backends    (who refuses what and why)",
    )


def _backends(names: set[str]) -> str:
    found = sorted({part for name in names for part in name.split(", ") if part})
    return f" ({', '.join(found)})" if found else ""
