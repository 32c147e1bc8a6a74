"""Which tests a run of limited time begins with: a rule over the last recorded run, no list kept by hand.

First the files whose tests took less than a second each in the slowest Windows Python: nine tests of ten, in a few minutes.
Then what the caller names (the tests that need Windows: each starts processes there), then the rest, the cheapest first.
pytest ends the run when its time is up (`--minutes`, tests/conftest.py) and says how many tests were not begun.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tools.windows_lab.layout import REPOSITORY

CHEAP = 1.0  # seconds a test, on a busy machine
RECORD = REPOSITORY / "benchmarks" / "results" / "windows.json"


def ordered(first: Sequence[str], repository: Path = REPOSITORY, record: Path = RECORD) -> list[str]:
    """Return the cheap files, `first`, and every other test file; files that no record knows are taken for cheap."""
    cost = _cost(record)
    files = [path.relative_to(repository).as_posix() for path in (repository / "tests").rglob("test_*.py")]
    named = tuple(name.rstrip("/") for name in first)
    rest = [file for file in files if not any(file == name or file.startswith(name + "/") for name in named)]
    rest.sort(key=lambda file: (cost.get(file, 0.0), file))
    cheap = [file for file in rest if cost.get(file, 0.0) < CHEAP]
    return [*cheap, *first, *rest[len(cheap) :]]


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
