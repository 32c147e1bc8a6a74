"""The compiled extension modules that are installed, and Triton's own: does each load, and how new a C library does it want?

Each is imported in a process of its own, after torch, as a program does: an ImportError that mamba_ssm swallows ("'NoneType'
object is not callable") is seen here, and a module that crashes hurts nobody. Our own Python modules of these names need no
such trial.
"""

from __future__ import annotations

import importlib.util
import mmap
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from anymamba.machine._programs import Answer, ask

__all__ = ["COMPILED", "Extension", "glibc_wanted", "read_extensions"]

COMPILED = ("selective_scan_cuda", "causal_conv1d_cuda", "triton")
"""The last is a package whose library (libtriton) is loaded when it is imported."""

_SECONDS = 60.0


@dataclass(frozen=True)
class Extension:
    """One compiled module. `problem`: the last words of an import that failed; `glibc`: the newest it names, (2, 32)."""

    name: str
    file: str
    loads: bool
    problem: str = ""
    glibc: tuple[int, int] | None = None


def read_extensions(
    *, locate: Callable[[str], str | None] | None = None, load: Callable[[str], Answer] | None = None
) -> tuple[Extension, ...]:
    """Import every compiled module that is installed.

    Parameters
    ----------
    locate, load : callable, optional
        Return the file that would be imported; import it in a process. Tests pass their own.
    """
    found = []
    for name in COMPILED:
        file = (locate or _locate)(name)
        if file is None or (file.endswith(".py") and name != "triton"):  # ours, over anymamba.ops
            continue
        answer = (load or _load)(name)
        problem = "" if answer.ok else _last_words(answer)
        found.append(Extension(name, file, answer.ok, problem, glibc_wanted(Path(file))))
    return tuple(found)


def glibc_wanted(file: Path) -> tuple[int, int] | None:
    """Return the newest version of glibc's symbols that an ELF file names, or None (another system's file, or none named)."""
    try:
        with file.open("rb") as stream:
            if stream.read(4) != b"\x7fELF":
                return None
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                found = {int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d{1,3})", content)}
    except (OSError, ValueError):
        return None
    return (2, max(found)) if found else None


def _locate(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec is not None else None


def _load(name: str) -> Answer:
    # faulthandler: a crash in a DLL leaves a line, not silence
    return ask([sys.executable, "-X", "faulthandler", "-c", f"import torch, {name}"], seconds=_SECONDS)


def _last_words(answer: Answer) -> str:
    lines = [line.strip() for line in answer.error.splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if re.match(r"\w*(Error|Exception|error)\b", line)), "")
    return said or (lines[-1] if lines else f"the process ended with {answer.code}")
