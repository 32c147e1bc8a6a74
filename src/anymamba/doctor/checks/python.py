"""Is this Python one that the product, torch and pip can work with?"""

from __future__ import annotations

from anymamba.doctor.result import Result, Status, Way, for_system
from anymamba.machine import Machine

_OLDEST, _NEWEST = (3, 10), (3, 14)


def python_version(machine: Machine) -> Result:
    """Between the oldest and newest version that we test."""
    release = machine.python.release
    status = Status.OK if _OLDEST <= release <= _NEWEST else Status.FAIL if release < _OLDEST else Status.WARN
    return Result(
        "python-version",
        "Python version",
        status,
        Way.BOTH,
        seen=f"{machine.python.implementation} {machine.python.version}",
        wanted="3.10 to 3.14",
        why="" if status is Status.OK else "anymamba is tested on these; torch has wheels for a few Pythons only",
        fix="" if status is Status.OK else "make an environment with Python 3.12 and install torch and anymamba there",
    )


def python_kind(machine: Machine) -> Result | None:
    """64-bit CPython with the GIL: the only kind torch fully supports."""
    python = machine.python
    odd = [
        word
        for word, is_so in (
            (python.implementation, python.implementation != "CPython"),
            ("32-bit", python.bits != 64),
            ("free-threaded", python.free_threaded),
        )
        if is_so
    ]
    if not odd:
        return None
    return Result(
        "python-kind",
        "Python build",
        Status.WARN if odd == ["free-threaded"] else Status.FAIL,
        Way.BOTH,
        seen=", ".join(odd),
        wanted="64-bit CPython",
        why="torch has no wheels for this build (free-threaded ones: for some versions only)",
        fix="install 64-bit CPython from python.org or conda and start again in a fresh environment",
    )


def python_environment(machine: Machine) -> Result:
    """An environment of one's own, which pip may change."""
    python = machine.python
    trouble = ""
    if python.externally_managed:
        trouble = "the system's package manager owns this Python: pip will refuse (externally-managed-environment)"
    elif python.environment == "store":
        trouble = "the Microsoft Store's Python redirects its folders: long paths and compiled extensions break there"
    return Result(
        "python-environment",
        "Environment",
        Status.WARN if trouble else Status.OK,
        Way.BOTH,
        seen=f"{python.environment}: {python.prefix}",
        wanted="a virtual or conda environment",
        why=trouble,
        fix=for_system(
            machine,
            windows=r"py -3 -m venv .venv & .venv\Scripts\activate",
            linux="python3 -m venv .venv && . .venv/bin/activate",
        )
        if trouble
        else "",
    )


def python_pip(machine: Machine) -> Result:
    """Pip itself: it installs the wheel that we make."""
    there = machine.python.pip is not None
    return Result(
        "python-pip",
        "pip",
        Status.OK if there else Status.FAIL,
        Way.BOTH,
        seen=machine.python.pip or "not in this environment",
        wanted="any",
        why="" if there else "wheels are installed with pip (environments made by uv come without it)",
        fix="" if there else "python -m ensurepip --upgrade    (or: uv pip install pip)",
    )


def python_headers(machine: Machine) -> Result:
    """Python.h, for extensions."""
    there = machine.python.headers
    return Result(
        "python-headers",
        "Python headers",
        Status.OK if there else Status.FAIL,
        Way.NATIVE,
        seen="Python.h found" if there else "no Python.h",
        wanted="Python.h",
        why="" if there else "extensions are compiled against it",
        fix=""
        if there
        else for_system(
            machine,
            windows="install Python from python.org (embeddable packages have no headers)",
            linux=f"sudo apt install python{'.'.join(map(str, machine.python.release))}-dev",
            mac="brew install python",
        ),
    )
