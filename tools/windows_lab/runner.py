"""Start a process, read its pipe, and end its whole tree.

Three things make this more than `subprocess.run`:

- Output is always a pipe: a Windows Python under wine dies at start when its stdout is a regular file.
- A service that wine starts may inherit the pipe and keep it open for ever, so reading stops when the *process* has
  ended, not at end of file.
- Wine starts child processes that are children of nobody. A tag in the environment, inherited by every descendant,
  finds them in /proc.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

TAG = "ANYMAMBA_LAB_RUN"
# Started by whichever process comes first, used by all: ending them with that one would pull the floor from under the
# others. They end by themselves with the last program.
SHARED = frozenset(
    {
        "wineserver",
        "wineserver64",
        "services.exe",
        "winedevice.exe",
        "plugplay.exe",
        "svchost.exe",
        "rpcss.exe",
        "explorer.exe",
    }
)
_RUNNING: set[str] = set()  # tags of what `run` has started and not ended
_GRACE = 1.0  # seconds for what a finished process left in its pipe


@dataclass(frozen=True)
class Outcome:
    """How a process ended."""

    command: tuple[str, ...]
    returncode: int
    output: str
    seconds: float
    timed_out: bool

    @property
    def ok(self) -> bool:
        return self.returncode == 0 and not self.timed_out


class CommandError(Exception):
    """A step of the laboratory could not be done: the command, how it ended, and the end of what it said."""

    def __init__(self, outcome: Outcome, what: str) -> None:
        self.outcome = outcome
        end = "ran out of time" if outcome.timed_out else f"ended with {outcome.returncode}"
        tail = "\n".join(outcome.output.splitlines()[-25:])
        super().__init__(f"{what}: {' '.join(outcome.command)} {end} after {outcome.seconds:.0f} s\n{tail}")


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 600.0,
    on_text: Callable[[str], None] | None = None,
    descendants: float = 0.0,
) -> Outcome:
    """Run a command to its end or its time limit; stdout and stderr together, as text.

    Parameters
    ----------
    environment
        The whole environment of the process; this process's own when None.
    timeout
        Seconds; then the process and all its descendants are killed, and `timed_out` says so.
    on_text
        Called with each piece of output as it comes.
    descendants
        Seconds that descendants may go on after the process has ended, before they are killed.
    """
    tag = uuid.uuid4().hex
    full = {**(os.environ if environment is None else environment), TAG: tag}
    pieces: list[str] = []
    start = time.monotonic()
    _RUNNING.add(tag)
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=full,
        cwd=cwd,
        start_new_session=True,
    )
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, pieces, on_text), daemon=True)
    reader.start()
    timed_out = False
    try:
        process.wait(timeout)
        deadline = time.monotonic() + descendants
        while time.monotonic() < deadline and tagged(tag):
            time.sleep(0.1)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        # Also after an ordinary end and after Ctrl-C: nothing of this run may outlive it.
        kill_tagged(tag)
        _RUNNING.discard(tag)
        if process.poll() is None:
            process.kill()
            process.wait()
    reader.join(_GRACE)
    return Outcome(tuple(command), process.returncode, "".join(pieces), time.monotonic() - start, timed_out)


def check(
    command: Sequence[str],
    what: str,
    *,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 600.0,
    descendants: float = 0.0,
) -> Outcome:
    """`run`, and CommandError unless it ended well."""
    outcome = run(command, environment=environment, cwd=cwd, timeout=timeout, descendants=descendants)
    if not outcome.ok:
        raise CommandError(outcome, what)
    return outcome


def stop_all() -> None:
    """End everything that `run` has started in this process, in whichever thread it waits."""
    for tag in tuple(_RUNNING):
        kill_tagged(tag)


def _read(stream: IO[bytes], pieces: list[str], on_text: Callable[[str], None] | None) -> None:
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    descriptor = stream.fileno()
    while chunk := os.read(descriptor, 65536):
        text = decoder.decode(chunk)
        pieces.append(text)
        if on_text is not None:
            on_text(text)


def tagged(tag: str) -> list[int]:
    """The living processes whose environment carries the tag, without wine's shared services."""
    needle = f"{TAG}={tag}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (
                    needle in (entry / "environ").read_bytes().split(b"\0")
                    and _program(entry) not in SHARED
                    and not _is_zombie(entry)
                ):
                    found.append(int(entry.name))
    return found


def kill_tagged(tag: str) -> int:
    """Kill every process that carries the tag, again until none is left; how many there were."""
    killed: set[int] = set()
    for _ in range(50):
        alive = tagged(tag)
        if not alive:
            break
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(0.02)
    return len(killed)


def _program(entry: Path) -> str:
    first = (entry / "cmdline").read_bytes().split(b"\0")[0].decode("utf-8", "replace")
    return first.replace("\\", "/").rpartition("/")[2].lower()


def _is_zombie(entry: Path) -> bool:
    stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
    return stat.rpartition(")")[2].split()[0] in {"Z", "X"}
