"""What a check answers, and the small words all checks share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from anymamba.machine import Machine

__all__ = ["Result", "Status", "Way", "for_system"]


class Status(str, Enum):
    """How a check ended. Only FAIL means that something the user wants will not work."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"


class Way(str, Enum):
    """Which way of getting mamba_ssm a check matters for."""

    PORT = "port"  # `anymamba install`: no compiler
    NATIVE = "native"  # upstream's own C++/CUDA, built here
    BOTH = "both"

    def covers(self, other: Way) -> bool:
        """Whether a check of this way matters to someone who wants `other`."""
        return Way.BOTH in (self, other) or self is other


@dataclass(frozen=True)
class Result:
    """One check's answer. `fix` is one command line or one edit for this machine's system; empty when nothing is to do."""

    id: str
    title: str
    status: Status
    way: Way
    seen: str
    wanted: str = ""
    why: str = ""
    fix: str = ""


def for_system(machine: Machine, *, windows: str, linux: str, mac: str | None = None) -> str:
    """Return the text for this machine's system."""
    return {"Windows": windows, "Darwin": linux if mac is None else mac}.get(machine.system.name, linux)
