"""Which language a command answers in: the one asked for, else the system's where we have it, else English."""

from __future__ import annotations

from enum import Enum

from anymamba.machine.system import read_system

__all__ = ["Language", "answer_in"]


class Language(str, Enum):
    """The languages there are."""

    EN = "en"
    ZH = "zh"


def answer_in(asked: Language | None) -> str:
    """Return "en" or "zh"."""
    if asked is not None:
        return asked.value
    return "zh" if read_system().language.startswith("zh") else "en"
