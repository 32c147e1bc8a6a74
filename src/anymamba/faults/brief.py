"""The engine's answer in three lines, for the end of something that failed: what, why, the command to type."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import BinaryIO

from anymamba.faults.explain import Outcome, explain

__all__ = ["Brief", "brief", "this_system"]


@dataclass(frozen=True)
class Brief:
    """A known fault in short. `next_step` is a command, or words where no command cures it."""

    id: str
    what: str
    why: str
    next_step: str


def brief(source: BinaryIO | bytes | str, *, language: str = "en", system: str | None = None) -> Brief | None:
    """Explain a log or a traceback in short.

    Parameters
    ----------
    source : binary file, bytes or str
    language : {"en", "zh"}
    system : {"windows", "linux", "mac", "wsl"}, optional
        By default the one the log is from, else this one.

    Returns
    -------
    Brief or None
        None when the cause is unknown or only possible: an error must not end in a guess.
    """
    explanation = explain(source)
    finding = explanation.cause
    if explanation.outcome is not Outcome.EXPLAINED or finding is None or finding.fault.sure == "possible":
        return None
    fixes = finding.fixes(system or explanation.system or this_system())
    run, fix = fixes[0] if fixes else ("", None)
    return Brief(
        finding.fault.id,
        finding.title(language),
        finding.cause(language),
        run or (fix.text[language] if fix is not None else ""),
    )


def this_system() -> str:
    """Return the system whose fixes apply here: windows, mac, wsl or linux."""
    from anymamba.machine.system import read_system

    if read_system().wsl:
        return "wsl"
    return {"Windows": "windows", "Darwin": "mac"}.get(platform.system(), "linux")
