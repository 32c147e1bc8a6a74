"""A build.ninja: what depends on what, and the command lines, word for word."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from anymamba.upstream.native.commands import Step

__all__ = ["write_ninja"]


def write_ninja(folder: Path, steps: Sequence[Step], *, windows: bool) -> Path:
    """Write build.ninja into a build folder and return its path."""
    lines = ["ninja_required_version = 1.5", "", "rule run", "  command = $command", "  description = $what", ""]
    for step in steps:
        command = subprocess.list2cmdline(step.command) if windows else shlex.join(step.command)
        first, *rest = step.inputs
        implicit = f" | {' '.join(map(_path, rest))}" if step.source and rest else ""
        inputs = _path(first) + implicit if step.source else " ".join(map(_path, step.inputs))
        lines += [
            f"build {_path(step.output)}: run {inputs}",
            f"  command = {command.replace('$', '$$')}",
            f"  what = {(step.source or step.output).replace('$', '$$')}",
            "",
        ]
    path = folder / "build.ninja"
    path.write_text("\n".join(lines), encoding="utf-8", newline="\n")
    return path


def _path(text: str) -> str:
    return text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
