"""`dev.py` in a Windows Python, on a copy of this checkout: it makes virtual environments in the folder it lies in."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tools.windows_lab import product, runner
from tools.windows_lab.interpreters import interpreter
from tools.windows_lab.layout import REPOSITORY
from tools.windows_lab.say import say
from tools.windows_lab.wine import Wine, windows_path


def dev(
    found: Wine, version: str, words: list[str], *, timeout: float, repository: Path = REPOSITORY
) -> runner.Outcome:
    """Run `python dev.py WORDS` there; the packages are those of the lock file, from the downloaded wheels."""
    copy = found.layout.drive_c / f"checkout-{version}"
    _copy(repository, copy)
    constraints = copy / "lab-constraints.txt"
    constraints.write_text(_without_hashes(interpreter(version).lock.read_text(encoding="utf-8")), encoding="utf-8")
    python = found.layout.python(version) / "python.exe"
    environment = product.environment(found, version, copy)
    del environment["PYTHONPATH"]  # the installed product is what this is about
    command = found.command(python, "dev.py", *words, "--constraints", windows_path(constraints))
    say(f"Windows {version}: python dev.py {' '.join(words)}")
    return runner.run(command, environment=environment, cwd=copy, timeout=timeout, on_text=_print)


def _copy(repository: Path, copy: Path) -> None:
    """What git would: nothing that is ignored. Virtual environments of an earlier run stay, as on a person's machine."""
    listed = runner.check(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], "listing the checkout", cwd=repository
    )
    for entry in copy.iterdir() if copy.is_dir() else ():
        if not entry.name.startswith(".venv"):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for name in listed.output.splitlines():
        source = repository / name
        if source.is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy / name)


def _without_hashes(lock: str) -> str:
    # pip asks for the hash of every file, this checkout's folder too, as soon as one is given.
    return "\n".join(re.findall(r"^(\S+==\S+)", lock, re.MULTILINE)) + "\n"


def _print(text: str) -> None:
    print(text, end="", flush=True)
