"""Run ninja: live progress, a log that is always kept, a watchdog, and no process left behind.

A compiler that hangs gives no output and uses no processor time; one that works hard for half an hour does. So the watchdog
looks at both, for the whole tree of processes below ninja.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from anymamba.errors import MachineError
from anymamba.upstream.native.commands import Step

__all__ = ["BuildFailedError", "Hang", "HangError", "Outcome", "Report", "Snapshot", "run_ninja"]


class BuildFailedError(MachineError):
    """A compiler failed; `log` is where everything that it said is kept."""

    log: Path | None = None


class HangError(BuildFailedError):
    """A compiler neither said nor did anything for too long."""


@dataclass(frozen=True)
class Snapshot:
    """How far a build is.

    Attributes
    ----------
    done, total : int
        Files made, of those to make in this run.
    current : tuple of str
        The source files in the compilers' hands.
    elapsed : float
        Seconds.
    remaining : float or None
        An estimate; None before the first file is done.
    """

    done: int
    total: int
    current: tuple[str, ...]
    elapsed: float
    remaining: float | None


@dataclass(frozen=True)
class Hang:
    """Who hangs."""

    process: str
    pid: int
    source: str
    seconds: float
    cause: str


@dataclass
class Outcome:
    """How a run of ninja ended."""

    code: int
    seconds: float
    peak_bytes: int = 0
    killed: bool = False  # the system ended a compiler: most often for lack of memory
    hang: Hang | None = None
    failed: list[str] = field(default_factory=list)


Report = Callable[[Snapshot], object]

_STATUS = re.compile(r"^\[(\d+)/(\d+)\] ")
# what gcc, nvcc and cl say when the system took a process or refused it memory
_KILLED = re.compile(
    r"died due to signal 9|Killed\b|signal terminated program|out of memory|C1060|C1002|virtual memory exhausted"
    r"|cannot allocate memory|std::bad_alloc|insufficient memory",
    re.IGNORECASE,
)
_POLL_SECONDS = 0.5
_IDLE_SHARE = 0.005  # of a processor: what a waiting process may use and still count as idle


def run_ninja(
    ninja: str,
    folder: Path,
    steps: Sequence[Step],
    log: Path,
    *,
    jobs: int,
    targets: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    hang_seconds: float = 600,
    report: Report | None = None,
    poll_seconds: float = _POLL_SECONDS,
) -> Outcome:
    """Run ninja in a build folder until it ends, or hangs, or somebody presses Ctrl-C.

    Parameters
    ----------
    ninja : str
    folder : Path
        Holds build.ninja.
    steps : sequence of Step
        What it was written from.
    log : Path
        Everything that the compilers say is added to it, as bytes.
    jobs : int
    targets : sequence of str
        Outputs to make; default: all.
    environment : mapping, optional
    hang_seconds : float
        How long the whole tree may neither speak nor compute.
    report : callable, optional
        Is told how far it is, twice a second.

    Returns
    -------
    Outcome
        With `hang` set, and no process left, when it hung.
    """
    words = {**(environment or os.environ), "NINJA_STATUS": "[%f/%t] ", "PYTHONUNBUFFERED": "1"}
    command = [ninja, "-j", str(jobs), *targets]
    total = _to_make(ninja, folder, targets, words)
    start = time.monotonic()
    options: dict[str, object] = (
        {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
        if sys.platform == "win32"
        else {"start_new_session": True}  # Ctrl-C comes to us alone; we end the tree
    )
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as kept:
        process = subprocess.Popen(
            command, cwd=folder, env=words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            **options,  # type: ignore[call-overload]
        )  # fmt: skip
        try:
            with _ended_like_ctrl_c():
                watch = _Watch(process, steps, total, start, kept, hang_seconds, report or (lambda _: None))
                return watch.until_end(poll_seconds)
        finally:
            if process.poll() is None:
                _end_tree(process.pid)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _to_make(ninja: str, folder: Path, targets: Sequence[str], environment: Mapping[str, str]) -> int:
    """Ask ninja how many files it would make: it tells of the first only when that is done, minutes later."""
    done = subprocess.run(
        [ninja, "-n", *targets], cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    found = [_STATUS.match(line) for line in done.stdout.decode("utf-8", errors="replace").splitlines()]
    return max((int(status[2]) for status in found if status), default=0)


class _Watch:
    def __init__(
        self, process: subprocess.Popen[bytes], steps: Sequence[Step], total: int, start: float, kept: IO[bytes],
        hang_seconds: float, report: Report,
    ) -> None:  # fmt: skip
        self._process, self._steps, self._start, self._kept = process, steps, start, kept
        self._hang_seconds, self._report = hang_seconds, report
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._done, self._total = 0, total
        self._outcome = Outcome(0, 0)
        self._alive_since = start  # when something last happened
        self._used: dict[tuple[int, float], float] = {}

    def until_end(self, poll_seconds: float) -> Outcome:
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        last_look = 0.0
        ended = False
        while not ended:
            try:
                line = self._lines.get(timeout=poll_seconds)
                ended = line is None
                if line is not None:
                    self._alive_since = time.monotonic()
                    self._take(line)
            except queue.Empty:
                pass
            now = time.monotonic()
            if now - last_look >= poll_seconds:
                self._look(now - last_look)
                last_look = now
                if now - self._alive_since > self._hang_seconds:
                    self._outcome.hang = self._name_hang(now - self._alive_since)
                    _end_tree(self._process.pid)
                    break
        self._outcome.code = self._process.wait()
        self._outcome.seconds = time.monotonic() - self._start
        return self._outcome

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def _take(self, line: bytes) -> None:
        self._kept.write(line)
        self._kept.flush()
        text = line.decode("utf-8", errors="replace")
        status = _STATUS.match(text)
        if status:
            self._done, self._total = int(status[1]), int(status[2])
        elif text.startswith("FAILED: "):
            self._outcome.failed.append(re.sub(r"^FAILED: (\[code=\d+\] )?", "", text).strip())
        if _KILLED.search(text):
            self._outcome.killed = True

    def _look(self, seconds: float) -> None:
        """Add up what the tree has used, and tell where the build is."""
        memory, busy = 0, 0.0
        current: list[str] = []
        for child in _tree(self._process.pid):
            try:
                times, identity = child.cpu_times(), (child.pid, child.create_time())
                memory += child.memory_info().rss
                words = child.cmdline()
            except psutil.Error:
                continue
            used = times.user + times.system
            # a process that was not there is life too
            busy += used - self._used.get(identity, used - 1.0)
            self._used[identity] = used
            if (source := self._source_of(words)) and source not in current:
                current.append(source)
        if busy > max(_IDLE_SHARE * seconds, 0.009):
            self._alive_since = time.monotonic()
        self._outcome.peak_bytes = max(self._outcome.peak_bytes, memory)
        elapsed = time.monotonic() - self._start
        remaining = elapsed / self._done * (self._total - self._done) if self._done else None
        self._report(Snapshot(self._done, self._total, tuple(current), elapsed, remaining))

    def _source_of(self, words: Sequence[str]) -> str:
        for step in self._steps:
            if step.source and any(word.endswith(step.inputs[0]) for word in words):
                return step.source
        return ""

    def _name_hang(self, seconds: float) -> Hang:
        tree = _tree(self._process.pid)
        if not tree:
            return Hang("ninja", self._process.pid, "", seconds, "ninja waits, and has no compiler left")
        parents = set()
        for child in tree:
            with contextlib.suppress(psutil.Error):
                parents.add(child.ppid())
        leaf = next((child for child in tree if child.pid not in parents), tree[-1])
        name, status, source = "a compiler", "", ""
        try:
            name, status = leaf.name(), str(leaf.status())
            for process in (leaf, *leaf.parents()):
                if source := self._source_of(process.cmdline()):
                    break
        except psutil.Error:
            pass
        return Hang(name, leaf.pid, source, seconds, _likely_cause(status))


def _likely_cause(status: str) -> str:
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "it was stopped (by a debugger, or Ctrl-Z in its terminal)"
    if psutil.virtual_memory().percent > 95 or (psutil.swap_memory().total and psutil.swap_memory().percent > 90):
        return "memory is full, and the machine is moving pages to disk"
    if status == psutil.STATUS_DISK_SLEEP:
        return "it waits for the disk: a network drive, or a virus scanner looking at its files"
    if sys.platform == "win32":
        return "it waits for something: a crash dialogue behind other windows, mspdbsrv.exe, or a virus scanner"
    return "it waits for something that does not come: a lock, a licence server, or a broken pipe"


@contextlib.contextmanager
def _ended_like_ctrl_c() -> Iterator[None]:
    """Let a closed terminal and a polite kill end the compilers as Ctrl-C does: ninja is in a session of its own."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before: dict[int, object] = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None:
                before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


def _tree(pid: int) -> list[psutil.Process]:
    try:
        children: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return children


def _end_tree(pid: int) -> None:
    """End ninja first, so that it starts nothing more, then all that is below it."""
    children = _tree(pid)
    with contextlib.suppress(psutil.Error):
        children.insert(0, psutil.Process(pid))
    for child in children:
        with contextlib.suppress(psutil.Error):
            child.terminate()
    _, left = psutil.wait_procs(children, timeout=2)
    for child in left:
        with contextlib.suppress(psutil.Error):
            child.kill()
    psutil.wait_procs(left, timeout=5)
