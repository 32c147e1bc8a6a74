"""Kernel parameters that `anymamba tune` found better than the usual ones, on this machine: kept, found again, used.

A backend declares a kernel's parameters, with what each means, where it settles the kernel's launch (`declare`), and asks
`find` there. That is all that `anymamba tune` needs: it runs an operator and listens which places are asked for (`listening`).

One JSON file in the cache folder, an entry for each (card, kernel, shape class). A backend asks `find` when it settles how to
run calls of a new shape (never on each call). An entry counts only while the kernel's source is the one it was measured with,
and only if the backend still offers its values; a file that is damaged or cannot be read is as none: the usual values.

Several processes may tune at once: a lock guards reading, merging and replacing the file, so no entry of another is lost.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "SCHEMA", "VARIABLE", "Asked", "Entry", "Parameters", "Place", "declare", "declared", "entries", "find", "fingerprint",
    "forget", "keep", "listening", "on_forget", "path", "power", "read", "reset", "trial", "write",
]  # fmt: skip

SCHEMA = "anymamba-tuned/1"
VARIABLE = "ANYMAMBA_TUNED"
"""Environment variable; 0 leaves the file alone: the usual parameters everywhere."""

Parameters = Mapping[str, int]


class Place(NamedTuple):
    """Where parameters hold.

    Parameters
    ----------
    card : str
        The card or processor, and what of it the choice depends on.
    kernel : str
        "cuda selective_scan forward".
    shape : str
        The shape class: `power` of the sizes that matter.
    source : str
        `fingerprint` of the kernel's source.
    """

    card: str
    kernel: str
    shape: str
    source: str

    @property
    def name(self) -> str:
        """The entry's name in the file."""
        return f"{self.card} | {self.kernel} | {self.shape}"


class Entry(NamedTuple):
    """What the file holds for a place."""

    parameters: dict[str, int]
    source: str
    usual_ms: float
    tuned_ms: float


class Asked(NamedTuple):
    """What a backend asked `find`: where, and what it could do there."""

    place: Place
    offered: Sequence[Parameters]


_declared: dict[str, Mapping[str, str]] = {}
_listeners: list[list[Asked]] = []
_trials: dict[str, Parameters] = {}
_forgetters: list[Callable[[], object]] = []


def power(value: int) -> int:
    """Return the power of two nearest above: sizes of one class."""
    return 1 << max(value - 1, 0).bit_length()


def declare(kernel: str, **meaning: str) -> str:
    """Say which parameters `kernel` has and what each means, in words; return its name."""
    _declared[kernel] = meaning
    return kernel


def declared() -> Mapping[str, Mapping[str, str]]:
    """Return the meaning of every parameter of every kernel that was declared: of the backends' modules imported so far."""
    return _declared


@contextlib.contextmanager
def listening() -> Iterator[list[Asked]]:
    """Note what `find` is asked in this context, each place once; for one thread, while it calls an operator."""
    heard: list[Asked] = []
    _listeners.append(heard)
    _settle_anew()
    try:
        yield heard
    finally:
        _listeners.remove(heard)


def fingerprint(*texts: str) -> str:
    """Return a short digest of a kernel's source."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def find(place: Place, offered: Sequence[Parameters]) -> Parameters | None:
    """Return the parameters to use instead of the usual ones, None if there are none.

    Parameters
    ----------
    place : Place
    offered : sequence of mapping
        What the backend can do for this shape; anything else in the file is ignored.
    """
    for heard in _listeners:
        if all(asked.place != place for asked in heard):
            heard.append(Asked(place, offered))
    tried = _trials.get(place.kernel)
    if tried is not None:
        return tried or None
    if os.environ.get(VARIABLE) == "0":
        return None
    entry = _loaded().get(place.name)
    if entry is None or entry.source != place.source or entry.parameters not in offered:
        return None
    return entry.parameters


@contextlib.contextmanager
def trial(kernel: str, parameters: Parameters) -> Iterator[None]:
    """Use these parameters for `kernel` in this process, {} for the usual ones; for one thread, while it measures."""
    before = _trials.get(kernel)
    _trials[kernel] = parameters
    _settle_anew()
    try:
        yield
    finally:
        if before is None:
            _trials.pop(kernel, None)
        else:
            _trials[kernel] = before
        _settle_anew()


def on_forget(clear: Callable[[], object]) -> None:
    """Have `clear` called when parameters may have changed: whoever remembers what `find` answered registers it."""
    _forgetters.append(clear)


def forget() -> None:
    """Read the file again, and let everyone who remembers what it said ask again."""
    _loaded.cache_clear()
    _settle_anew()


def path() -> Path:
    """Return the file."""
    from anymamba.machine.folders import cache_folder  # here: it brings much that a call of an operator does not need

    return cache_folder() / "tuned.json"


def entries() -> dict[str, Entry]:
    """Return the entries in the file, by name; {} if there is no file or it is damaged."""
    return read(path())


def read(file: Path) -> dict[str, Entry]:
    """Return the entries in a file that `write` wrote; {} if there is no such file or it is damaged."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            return {}
        return {
            str(name): Entry(
                {str(key): int(number) for key, number in value["parameters"].items()}, str(value["source"]),
                float(value["usual_ms"]), float(value["tuned_ms"]),
            )
            for name, value in document["entries"].items()
        }  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write(file: Path, found: Mapping[str, Entry]) -> None:
    """Write entries to a file of their own, for another machine with the same card."""
    document = {"schema": SCHEMA, "entries": {name: entry._asdict() for name, entry in found.items()}}
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8", newline="\n")


def keep(found: Mapping[str, Entry]) -> None:
    """Add entries to the file, or replace those of the same name."""
    if found:
        _change(lambda old: {**old, **found})


def reset() -> int:
    """Remove every entry; return how many there were."""
    count = len(entries())
    _change(lambda old: {})
    return count


def _settle_anew() -> None:
    for clear in _forgetters:
        clear()


@functools.cache
def _loaded() -> dict[str, Entry]:
    return entries()


def _change(change: Callable[[dict[str, Entry]], dict[str, Entry]]) -> None:
    from filelock import FileLock

    target = path()
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(target) + ".lock"):
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "entries": {name: entry._asdict() for name, entry in sorted(change(entries()).items())},
        }
        handle, name = tempfile.mkstemp(dir=target.parent, prefix="tuned-", suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            json.dump(document, file, indent=1)
        Path(name).replace(target)
    forget()
