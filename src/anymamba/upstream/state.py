"""What an environment remembers of our installs, and how a change to it stays undoable until it is final.

In `<site-packages>/.anymamba/`:

    lock             held by the one command at work; the system releases it when that command dies
    journal.json     there while a change is under way; whoever finds it with the lock free undoes that change
    installed.json   for each of our ports: what was there before the first of them, kept below original/
    aside/           what a change has put aside

Files are renamed, not copied: nothing of a half-done install mixes with them, and undoing is a rename again. Every step may
be the last before a power cut; undoing is written so that it can itself be cut off and begun anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from anymamba.errors import EnvironmentLockedError, NotWritableError
from anymamba.upstream.environment import Environment
from anymamba.upstream.footprint import footprint

__all__ = ["Change", "Move", "State"]

FOLDER = ".anymamba"


@dataclass(frozen=True)
class Move:
    """A file or folder put aside, and the place where it belongs."""

    place: str
    aside: str


@dataclass
class Change:
    """A change under way, as the journal holds it.

    Attributes
    ----------
    names : list of str
        The packages concerned.
    moves : list of Move
        What is put aside first.
    returns : list of Move
        What is brought back then (uninstall).
    record_before : dict
        installed.json as it was.
    """

    names: list[str]
    moves: list[Move]
    returns: list[Move] = field(default_factory=list)
    record_before: dict[str, list[dict[str, str]]] = field(default_factory=dict)


class State:
    """The state folder of an environment."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._roots = (environment.purelib, environment.platlib)
        self._folder = Path(environment.purelib) / FOLDER
        self._journal = self._folder / "journal.json"
        self._record = self._folder / "installed.json"
        self._worker = self._folder / "worker.json"
        self._aside = self._folder / "aside"

    @property
    def broken(self) -> bool:
        """Return whether a change was cut off."""
        return self._journal.exists()

    def kept(self) -> list[str]:
        """Return the packages of which the state before our ports is remembered."""
        return list(self._read(self._record))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the environment's lock; undo first what a killed command left.

        Raises
        ------
        EnvironmentLockedError, NotWritableError
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._folder / "lock")
            lock.acquire(timeout=0)
        except Timeout as error:
            raise EnvironmentLockedError(
                f"Another anymamba is changing {self._environment.purelib}.",
                next_step="wait for it to end, then run the same command again",
            ) from error
        except OSError as error:
            raise self._not_writable(error) from error
        try:
            self._heal()
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def installing(self, names: list[str]) -> Iterator[None]:
        """Put aside what belongs to the packages; leaving without an error makes the change final, else it is undone."""
        record = self._read(self._record)
        stamp = time.time_ns()
        moves: list[Move] = []
        after = dict(record)
        for name in names:
            present = self._environment.installed.get(name)
            ours = present is not None and present.kind == "port" and name in record
            kept = self._aside / str(stamp) if ours else self._folder / "original" / f"{name}-{stamp}"
            mine = self._moves(name, kept)
            moves += mine
            if not ours:
                after[name] = [asdict(move) for move in mine]
        with self._change(Change(names, moves, record_before=record)):
            yield
            self._write(self._record, after)
        self._forget_unrecorded(after)

    def restoring(self, names: list[str]) -> dict[str, list[str]]:
        """Remove the packages' ports and bring back what was there before; return the names of what came back."""
        record = self._read(self._record)
        returns = {name: [Move(**move) for move in record.get(name, [])] for name in names}
        # a folder of its own: what an earlier change put aside may still be there, held by another program
        aside = self._aside / str(time.time_ns())
        moves = [move for name in names for move in self._moves(name, aside)]
        change = Change(names, moves, [move for group in returns.values() for move in group], record)
        with self._change(change):
            for move in change.returns:
                self._rename(move.aside, move.place)
            self._write(self._record, {name: kept for name, kept in record.items() if name not in names})
        self._forget_unrecorded(self._read(self._record))
        return {name: [Path(move.place).name for move in group] for name, group in returns.items()}

    def working(self, pid: int) -> None:
        """Note the process that changes files on our behalf: after our own death it must end before anything is undone."""
        with contextlib.suppress(psutil.Error):
            self._write(self._worker, {"pid": pid, "started": psutil.Process(pid).create_time()})

    # --- the change itself

    @contextlib.contextmanager
    def _change(self, change: Change) -> Iterator[None]:
        try:
            self._write(self._journal, asdict(change))
            for move in change.moves:
                self._rename(move.place, move.aside)
            yield
            self._journal.unlink()
        except BaseException:
            with _uninterrupted():
                self._undo(change)
            raise
        self._tidy()

    def _heal(self) -> None:
        if not self._journal.exists():
            self._tidy()
            return
        self._end_worker()
        data = self._read(self._journal)
        moves, returns = ([Move(**move) for move in data[key]] for key in ("moves", "returns"))
        with _uninterrupted():
            self._undo(Change(data["names"], moves, returns, data["record_before"]))

    def _undo(self, change: Change) -> None:
        for move in reversed(change.returns):
            if not os.path.lexists(move.aside) and os.path.lexists(move.place):
                self._rename(move.place, move.aside)
        # what never left its place is the old; everything else of these packages is the new
        stayed = {move.place for move in change.moves if not os.path.lexists(move.aside)}
        for name in change.names:
            for entry in footprint(name, self._roots):
                if str(entry) not in stayed:
                    _remove(entry)
        for move in change.moves:
            if os.path.lexists(move.aside):
                _remove(Path(move.place))
                self._rename(move.aside, move.place)
        if self._read(self._record) != change.record_before:  # on a full disk, undoing must not need room
            self._write(self._record, change.record_before)
        self._forget_unrecorded(change.record_before)
        self._journal.unlink(missing_ok=True)
        self._tidy()

    def _moves(self, name: str, into: Path) -> list[Move]:
        entries = footprint(name, self._roots)
        return [Move(str(entry), str(into / f"{name}-{i:03d}-{entry.name}")) for i, entry in enumerate(entries)]

    def _rename(self, source: str, target: str) -> None:
        try:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            Path(source).rename(target)  # both lie in one file system
        except OSError as error:
            raise self._not_writable(error) from error

    def _end_worker(self) -> None:
        worker = self._read(self._worker)
        with contextlib.suppress(psutil.Error, KeyError):
            process = psutil.Process(worker["pid"])
            if abs(process.create_time() - worker["started"]) < 1:
                process.kill()
                process.wait(timeout=30)

    def _forget_unrecorded(self, record: dict[str, list[dict[str, str]]]) -> None:
        used = {str(Path(move["aside"]).parent) for kept in record.values() for move in kept}
        originals = self._folder / "original"
        for folder in originals.iterdir() if originals.is_dir() else ():
            if str(folder) not in used:
                _discard(folder)
        with contextlib.suppress(OSError):
            originals.rmdir()

    def _tidy(self) -> None:
        _discard(self._aside)
        _discard(self._worker)
        for unfinished in self._folder.glob("*.new"):  # of a writer that was killed
            _discard(unfinished)
        if self._record.exists() and not self._read(self._record):
            self._record.unlink()

    def _not_writable(self, error: OSError) -> NotWritableError:
        return NotWritableError(
            f"{self._environment.purelib} cannot be changed; it is as it was.",
            why=f"{error.strerror}: {error.filename}. A running program may use it, or another account own it.",
            next_step="end programs that have mamba_ssm loaded (notebooks, training), or use a virtual environment",
        )

    @staticmethod
    def _read(path: Path) -> dict[str, Any]:
        if not path.is_file():
            return {}
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content

    @staticmethod
    def _write(path: Path, content: Any) -> None:
        new = path.with_suffix(".new")
        with new.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _discard(path: Path) -> None:
    """Remove what nobody needs any more, as far as it can be: what another program holds open is left to the next change.

    On Windows a virus scanner or a search index has new files open for a moment; that must not fail a finished change.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait: undoing must not itself be cut off by impatience."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
