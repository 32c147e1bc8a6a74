"""Which tests a run of limited time begins with: a rule over the last recorded run, no list kept by hand.

First what the caller names (what behaves differently on Windows); then all other files, those first that hold the most tests
a second in the slowest Windows Python. pytest ends the run when its time is up (`--minutes`, tests/conftest.py) and says how
many tests were not begun.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tools.windows_lab.layout import REPOSITORY

RECORD = REPOSITORY / "benchmarks" / "results" / "windows.json"


def ordered(first: Sequence[str], repository: Path = REPOSITORY, record: Path = RECORD) -> list[str]:
    """Return `first`, then every other test file, the cheapest tests first; files that no record knows come before."""
    cost = _cost(record)
    files = [path.relative_to(repository).as_posix() for path in (repository / "tests").rglob("test_*.py")]
    named = tuple(name.rstrip("/") for name in first)
    rest = [file for file in files if not any(file == name or file.startswith(name + "/") for name in named)]
    return [*first, *sorted(rest, key=lambda file: (cost.get(file, 0.0), file))]


def _cost(record: Path) -> dict[str, float]:
    """Return the seconds a test of each file, in the Windows Python where they are the most."""
    if not record.is_file():
        return {}
    cost: dict[str, float] = {}
    for run in json.loads(record.read_text(encoding="utf-8"))["runs"]:
        if run["python"].startswith("Windows"):
            for file, (ran, seconds) in run.get("files", {}).items():
                cost[file] = max(cost.get(file, 0.0), seconds / max(ran, 1))
    return cost
