"""The result file: one entry a compile, found again by what it is of, so that a later call goes on where this one stopped."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "Entry", "Record"]

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "windows-compile.json"


@dataclass(frozen=True)
class Entry:
    """One compile or link.

    Attributes
    ----------
    build : str
        Key of the build.
    unit : str
        Source file, or the extension's name for a link.
    without : str
        The rule left out; empty for the product's own command.
    wanted : str
        "compiles", "links", or the error that must come.
    as_wanted : bool
    error : str
        The first error; empty when there was none.
    inputs : str
        Digest of the command line, the rules and their edits: when the product's plan changes, it is compiled again.
    """

    build: str
    unit: str
    without: str
    wanted: str
    as_wanted: bool
    error: str
    seconds: float
    date: str
    inputs: str
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.build, self.unit, self.without


class Record:
    """The entries of a result file, written after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        self.builds: dict[str, Any] = saved.get("builds", {})
        self.tools: dict[str, str] = saved.get("tools", {})
        self.not_compiled: list[str] = saved.get("not_compiled", [])
        self.entries = [Entry(**entry) for entry in saved.get("entries", [])]

    def find(self, key: tuple[str, str, str], inputs: str) -> Entry | None:
        """Return the entry of this build, unit and rule left out, if it was made of the same inputs."""
        return next((entry for entry in self.entries if entry.key == key and entry.inputs == inputs), None)

    def add(self, entry: Entry) -> None:
        """Put an entry in, in place of an earlier one of the same."""
        self.entries = [one for one in self.entries if one.key != entry.key] + [entry]
        words = f"{entry.build}: {entry.unit}" + (f" without {entry.without}" if entry.without else "")
        self.not_compiled = [one for one in self.not_compiled if one != words]
        self.save()

    def save(self) -> None:
        """Write the file, whole or not at all."""
        document = {
            "tools": self.tools,
            "builds": dict(sorted(self.builds.items())),
            "not_compiled": self.not_compiled,
            "entries": [asdict(entry) for entry in sorted(self.entries, key=lambda one: one.key)],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(self.path.name + ".new")
        new.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        new.replace(self.path)
