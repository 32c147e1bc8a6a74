"""How facts ask other programs: with a time limit, without a shell, and without ever failing on their bytes.

`cl.exe` and friends answer in the console's code page, PowerShell in UTF-16; a question whose answer cannot be decoded
strictly is still a question answered.
"""

from __future__ import annotations

import locale
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Answer", "Ask", "ask"]


class Answer(NamedTuple):
    """What a program said. `code` is None when it could not be started or took too long (`error` says which)."""

    code: int | None
    out: str
    error: str

    @property
    def ok(self) -> bool:
        """Whether the program ended with 0."""
        return self.code == 0


Ask = Callable[[Sequence[str]], Answer]
"""The type of `ask`; tests pass their own."""


def ask(
    command: Sequence[str],
    *,
    seconds: float = 8,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Answer:
    """Run `command` and return its answer; a program that is missing, hangs or crashes is an answer too."""
    # Windows only: no console window may flash up when this runs under pythonw or an IDE.
    flags = getattr(subprocess, "CREATE_NO_WINDOW", 0)
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            cwd=folder,
            env=None if environment is None else dict(environment),
            creationflags=flags,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        return Answer(None, _text(expired.stdout), f"no answer in {seconds:g} s")
    except OSError as failure:
        return Answer(None, "", str(failure))
    return Answer(done.returncode, _text(done.stdout), _text(done.stderr))


def _text(raw: bytes | None) -> str:
    if not raw:
        return ""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        encoding = "mbcs" if sys.platform == "win32" else locale.getpreferredencoding(False)
        text = raw.decode(encoding, errors="replace")
    return text.replace("\r\n", "\n")
