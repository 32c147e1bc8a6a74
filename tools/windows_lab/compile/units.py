"""One compile step or link under wine, and what the compiler said first."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.windows_lab import runner
from tools.windows_lab.wine import Wine

__all__ = ["Said", "first_error", "link", "missed", "run_step", "says"]

_ERROR = re.compile(r"\b(fatal )?error\b( [A-Z]+\d+)?\s*:|^nvcc fatal", re.IGNORECASE)


@dataclass(frozen=True)
class Said:
    """How a step ended: the exit code was 0 and the file is there, or the first error of what was said."""

    ok: bool
    error: str
    output: str
    seconds: float


def first_error(output: str) -> str:
    """Return the first line that is an error, without the folder names before it; empty when there is none."""
    for line in output.splitlines():
        if _ERROR.search(line):
            return re.sub(r"[A-Za-z]:[\\/](?:[^\\/:*?\"<>|()]+[\\/])+", "", line.strip())[:300]
    return ""


def says(output: str, pattern: str) -> bool:
    """Return whether one line of the output has the pattern."""
    return any(re.search(pattern, line) for line in output.splitlines())


def run_step(
    found: Wine,
    command: Sequence[str],
    folder: Path,
    output: str,
    environment: Mapping[str, str],
    *,
    timeout: float,
) -> Said:
    """Run one command line in the build folder."""
    made = folder / output
    made.unlink(missing_ok=True)
    made.parent.mkdir(parents=True, exist_ok=True)
    outcome = runner.run(found.command(*command), environment=environment, cwd=folder, timeout=timeout)
    ok = outcome.ok and made.is_file() and made.stat().st_size > 0
    error = first_error(outcome.output)
    if not ok and not error:
        last = [line.strip() for line in outcome.output.splitlines() if line.strip()][-1:]
        error = "ran out of time" if outcome.timed_out else (last[0][:300] if last else f"exit {outcome.returncode}")
    return Said(ok, "" if ok else error, outcome.output, outcome.seconds)


# A CPU build of torch has no c10_cuda.lib and torch_cuda.lib; both are made here of the names that the objects ask for.
_ABSENT = ("c10_cuda", "torch_cuda")
_UNRESOLVED = re.compile(r"unresolved external symbol (?:\".*?\" \()?(?:__imp_)?(\?[^\s)]+)")


def missed(output: str) -> list[str]:
    """Return the C++ names, as the linker knows them, that it found nowhere."""
    return sorted(set(_UNRESOLVED.findall(output)))


def link(
    found: Wine,
    command: Sequence[str],
    folder: Path,
    output: str,
    environment: Mapping[str, str],
    torch_libraries: Path,
    *,
    timeout: float = 300.0,
) -> tuple[Said, list[str]]:
    """Run a link; the names that only a CUDA build of torch has are resolved by import libraries made for it.

    Returns
    -------
    said : Said
    stood_in : list of str
        Those names, as the linker knows them.
    """
    absent = [name for name in _ABSENT if not (torch_libraries / f"{name}.lib").is_file()]
    if not absent:
        return run_step(found, command, folder, output, environment, timeout=timeout), []
    standins = folder / "standins"
    shutil.rmtree(standins, ignore_errors=True)
    standins.mkdir()
    librarian = str(command[0]).rpartition("\\")[0] + "\\lib.exe"
    names: dict[str, list[str]] = {name: [] for name in absent}
    said = Said(False, "", "", 0.0)
    for _ in range(2):
        for name, exports in names.items():
            text = f"LIBRARY {name}.dll\nEXPORTS\n" + "".join(f"  {one}\n" for one in exports or ["unused"])
            (standins / f"{name}.def").write_text(text, encoding="utf-8")
            made = run_step(
                found,
                [librarian, "/nologo", "/MACHINE:X64", f"/DEF:standins\\{name}.def", f"/OUT:standins\\{name}.lib"],
                folder,
                f"standins/{name}.lib",
                environment,
                timeout=timeout,
            )
            if not made.ok:
                return made, []
        said = run_step(found, [*command, "/LIBPATH:standins"], folder, output, environment, timeout=timeout)
        wanted = missed(said.output)
        if said.ok or not wanted:
            break
        for one in wanted:
            names["c10_cuda" if "c10_cuda" in names and "@cuda@c10@@" in one else absent[-1]].append(one)
    return said, sorted(one for exports in names.values() for one in exports)
