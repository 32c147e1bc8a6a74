"""Write the lock files anew: every package of every Windows Python, with hashes.

Needs `uv` (`pip install uv`), which resolves for another system than its own; nothing else of the laboratory does.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tools.windows_lab import runner
from tools.windows_lab.interpreters import INTERPRETERS, Interpreter
from tools.windows_lab.layout import REPOSITORY


def lock(interpreter: Interpreter, uv: str) -> None:
    """Resolve pyproject.toml and the interpreter's extra requirements for Windows; write the lock file."""
    with tempfile.TemporaryDirectory() as temporary:
        extra = Path(temporary) / "extra.in"
        extra.write_text("\n".join(interpreter.extra) + "\n", encoding="utf-8")
        runner.check(
            [
                *(uv, "pip", "compile", "--python-platform", "windows", "--python-version", interpreter.version),
                *("--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", "--upgrade", "--quiet"),
                *(str(REPOSITORY / "pyproject.toml"), "--extra", "cpu", str(extra)),
                *("--output-file", str(interpreter.lock)),
            ],
            f"resolving for Windows Python {interpreter.version}",
            timeout=300,
        )


def lock_all() -> None:
    """Write every lock file; FileNotFoundError without uv."""
    uv = shutil.which("uv")
    if uv is None:
        raise FileNotFoundError("`uv` is not on PATH; `pip install uv` in any environment of yours, then call again")
    for interpreter in INTERPRETERS:
        lock(interpreter, uv)
