"""Counts out of pytest's result files, and the table that puts several runs side by side."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROWS = ("passed", "failed", "errors", "skipped", "xfailed")


@dataclass(frozen=True)
class Counts:
    """What one run of a test-suite came to."""

    passed: int = 0
    failed: int = 0
    errors: int = 0
    skipped: int = 0
    xfailed: int = 0
    seconds: float = 0.0
    bad: tuple[str, ...] = ()  # the tests that failed or broke, and why
    skips: Mapping[str, int] = field(default_factory=dict)  # reason -> how many
    files: Mapping[str, tuple[int, float]] = field(default_factory=dict)  # tests/... .py -> tests that ran, seconds

    @property
    def total(self) -> int:
        return self.passed + self.failed + self.errors + self.skipped + self.xfailed

    @property
    def ok(self) -> bool:
        """Nothing failed, and something passed: a run of no tests proves nothing."""
        return self.passed > 0 and self.failed == 0 and self.errors == 0


def read(path: Path) -> Counts:
    """Read a junit file as pytest writes it."""
    numbers = dict.fromkeys(ROWS, 0)
    bad: list[str] = []
    skips: dict[str, int] = {}
    files: dict[str, tuple[int, float]] = {}
    seconds = 0.0
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        took = float(case.get("time", "0"))
        seconds += took
        kind = _kind(case)
        numbers[kind] += 1
        name = _file(case)
        if name and kind != "skipped":
            ran, before = files.get(name, (0, 0.0))
            files[name] = ran + 1, before + took
        if kind in {"failed", "errors"}:
            bad.append(f"{case.get('classname')}::{case.get('name')}: {_why(case)}")
        skip = case.find("skipped")
        if kind == "skipped" and skip is not None:
            reason = (skip.get("message") or "").strip()
            skips[reason] = skips.get(reason, 0) + 1
    return Counts(**numbers, seconds=seconds, bad=tuple(bad), skips=skips, files=files)


def _file(case: ElementTree.Element) -> str | None:
    """Return the file of a test: its module's name ends where a class begins."""
    parts = (case.get("classname") or "").split(".")
    for number, part in enumerate(parts):
        if part.startswith("test_"):
            return "/".join(parts[: number + 1]) + ".py"
    return None


def _why(case: ElementTree.Element) -> str:
    for kind in ("failure", "error"):
        found = case.find(kind)
        if found is not None:
            lines = [line for line in (found.text or "").splitlines() if line.startswith("E ")]
            chained = "During handling of the above exception" in (found.text or "")
            said = lines[-1 if chained else 0][1:].strip() if lines else (found.get("message") or "")
            return said.splitlines()[0][:200] if said else "no message"
    return ""


def _kind(case: ElementTree.Element) -> str:
    if case.find("error") is not None:
        return "errors"
    if case.find("failure") is not None:
        return "failed"
    skip = case.find("skipped")
    if skip is not None:
        return "xfailed" if skip.get("type") == "pytest.xfail" else "skipped"
    return "passed"


def table(columns: Mapping[str, Counts | None]) -> str:
    """The counts side by side; a column without a result shows dashes."""
    heads = list(columns)
    rows = [["", *heads]]
    rows += [[row, *("-" if c is None else str(getattr(c, row)) for c in columns.values())] for row in ROWS]
    rows.append(["total", *("-" if c is None else str(c.total) for c in columns.values())])
    rows.append(["seconds", *("-" if c is None else f"{c.seconds:.0f}" for c in columns.values())])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        " | ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        for row in rows
    ]
    lines.insert(1, "-|-".join("-" * w for w in widths))
    return "\n".join(lines)


def document(columns: Mapping[str, Counts | None], about: Mapping[str, str] | None = None) -> str:
    """The runs as a JSON text, from which benchmarks/summarise.py fills the documents; `about`: what ran, and how."""
    runs = [
        {
            "python": name,
            "passed": counts.passed,
            "failed": counts.failed + counts.errors,
            "skipped": counts.skipped,
            "seconds": round(counts.seconds),
            "skips": dict(sorted(counts.skips.items())),
            "files": {file: [ran, round(seconds, 1)] for file, (ran, seconds) in sorted(counts.files.items())},
        }
        for name, counts in columns.items()
        if counts is not None
    ]
    head = {"date": datetime.date.today().isoformat(), **(about or {})}
    text = json.dumps({**head, "runs": runs}, indent=1, ensure_ascii=False) + "\n"
    return re.sub(r"\[\n +(\d+),\n +([\d.]+)\n +\]", r"[\1, \2]", text)  # a file's two numbers on its line
