"""The catalogue of known faults: `known/*.toml`, read and checked.

A file is one kind of fault::

    id = "nvcc-missing"                  the file's name
    where = ["setup.py"]                 pip, setup.py, cl, nvcc, gcc, ninja, link, import, run time
    sure = "sure"                        sure: the symptom has this cause and no other; likely; possible: it may be harmless
    after = ["..."]                      faults of which this one can be the mere consequence
    doctor = "nvcc-found"                the doctor's check that sees it beforehand, or
    unseen = "is in the call"            why no check can (one of the two in every entry but wrappers)
    seen = ["owner/project#12"]          public threads with the symptom, or "read in <source>", "measured"
    title.en, title.zh, cause.en, cause.zh
    [[symptom]] pattern                  a regular expression over the log's text (multi-line); named groups fill {name} in
                                         the texts; `needs` is a text that must be there before the pattern is tried
    [[fix]] run, on, en, zh              a command (or an edit, when `run` is empty) for the systems `on` (default: any)

`wrapper = true` marks messages that only say that something before them failed (pip's, ninja's last lines): they explain
nothing, and a log with nothing else is answered with "unknown".
"""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass
from importlib import resources
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["LANGUAGES", "SYSTEMS", "WHERE", "CatalogueError", "Fault", "Fix", "Symptom", "catalogue", "parse"]

LANGUAGES = ("en", "zh")
SYSTEMS = ("windows", "linux", "mac", "wsl")
WHERE = ("conda", "pip", "setup.py", "cl", "nvcc", "gcc", "ninja", "link", "import", "run time")
SURE = ("sure", "likely", "possible")


class CatalogueError(ValueError):
    """An entry of the catalogue is not what it must be (a mistake of ours, found by the tests)."""


@dataclass(frozen=True)
class Symptom:
    """How a fault shows. `needs`: literal text without which the pattern cannot match (makes big logs fast)."""

    pattern: re.Pattern[str]
    needs: str


@dataclass(frozen=True)
class Fix:
    """One cure: a command line, or words when `run` is empty."""

    run: str
    on: tuple[str, ...]  # empty: any system
    text: dict[str, str]


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    id: str
    where: tuple[str, ...]
    sure: str
    symptoms: tuple[Symptom, ...]
    title: dict[str, str]
    cause: dict[str, str]
    fixes: tuple[Fix, ...]
    seen: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    doctor: str = ""
    unseen: str = ""
    wrapper: bool = False


@functools.cache
def catalogue() -> tuple[Fault, ...]:
    """Return every known fault, in the order of their ids.

    Raises
    ------
    CatalogueError
        If a file is not a valid entry.
    """
    folder = resources.files("anymamba.faults") / "known"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    faults = tuple(parse(file.read_text(encoding="utf-8"), file.name.removesuffix(".toml")) for file in files)
    ids = {fault.id for fault in faults}
    for fault in faults:
        unknown = set(fault.after) - ids
        if unknown:
            raise CatalogueError(f"{fault.id}: after names no known fault: {', '.join(sorted(unknown))}")
    return faults


def parse(text: str, name: str) -> Fault:
    """Read one entry; `name` is the file's name and must be its id.

    Raises
    ------
    CatalogueError
        Naming the entry and the key.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CatalogueError(f"{name}: {error}") from error
    _only(
        raw,
        {"id", "where", "sure", "symptom", "title", "cause", "fix", "seen", "after", "doctor", "unseen", "wrapper"},
        name,
    )
    if raw.get("id") != name:
        raise CatalogueError(f"{name}: id is {raw.get('id')!r}; it must be the file's name")
    where = _texts(raw, "where", name)
    if not where or set(where) - set(WHERE):
        raise CatalogueError(f"{name}: where must be some of {', '.join(WHERE)}")
    if raw.get("sure") not in SURE:
        raise CatalogueError(f"{name}: sure must be one of {', '.join(SURE)}")
    symptoms = tuple(_symptom(entry, name) for entry in raw.get("symptom", []))
    if not symptoms:
        raise CatalogueError(f"{name}: no symptom")
    wrapper = bool(raw.get("wrapper", False))
    fixes = tuple(_fix(entry, name) for entry in raw.get("fix", []))
    if not fixes and not wrapper:
        raise CatalogueError(f"{name}: no fix")
    doctor, unseen = str(raw.get("doctor", "")), str(raw.get("unseen", ""))
    if bool(doctor) == bool(unseen) and not wrapper:
        raise CatalogueError(f"{name}: needs one of doctor and unseen")
    return Fault(
        id=name,
        where=where,
        sure=raw["sure"],
        symptoms=symptoms,
        title=_both(raw, "title", name),
        cause=_both(raw, "cause", name),
        fixes=fixes,
        seen=_texts(raw, "seen", name),
        after=_texts(raw, "after", name),
        doctor=doctor,
        unseen=unseen,
        wrapper=wrapper,
    )


def _symptom(raw: dict[str, Any], name: str) -> Symptom:
    _only(raw, {"pattern", "needs"}, name)
    try:
        pattern = re.compile(raw["pattern"], re.MULTILINE)
    except (KeyError, re.error) as error:
        raise CatalogueError(f"{name}: symptom: {error}") from error
    return Symptom(pattern, str(raw.get("needs", "")))


def _fix(raw: dict[str, Any], name: str) -> Fix:
    _only(raw, {"run", "on", "en", "zh"}, name)
    on = _texts(raw, "on", name)
    if set(on) - set(SYSTEMS):
        raise CatalogueError(f"{name}: fix: on must be some of {', '.join(SYSTEMS)}")
    text = {language: str(raw.get(language, "")) for language in LANGUAGES}
    if not all(text.values()):
        raise CatalogueError(f"{name}: fix: needs both languages")
    return Fix(str(raw.get("run", "")), on, text)


def _both(raw: dict[str, Any], key: str, name: str) -> dict[str, str]:
    value = raw.get(key)
    if not isinstance(value, dict) or set(value) != set(LANGUAGES) or not all(value.values()):
        raise CatalogueError(f"{name}: {key} must have exactly {' and '.join(LANGUAGES)}")
    return {language: str(text) for language, text in value.items()}


def _texts(raw: dict[str, Any], key: str, name: str) -> tuple[str, ...]:
    value = raw.get(key, [])
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise CatalogueError(f"{name}: {key} must be a list of texts")
    return tuple(value)


def _only(raw: dict[str, Any], allowed: set[str], name: str) -> None:
    if extra := set(raw) - allowed:
        raise CatalogueError(f"{name}: unknown keys {', '.join(sorted(extra))}")
