"""`dev.py` in a Windows Python, on a copy of this checkout: it makes virtual environments in the folder it lies in."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.windows_lab import product, runner
from tools.windows_lab.interpreters import interpreter
from tools.windows_lab.layout import REPOSITORY
from tools.windows_lab.say import say
from tools.windows_lab.turns import Turn
from tools.windows_lab.wine import Wine, windows_path

CAPTURED = "anymamba"  # the folder on the C: drive that a capture shows


def dev(
    found: Wine,
    version: str,
    words: Sequence[str],
    *,
    timeout: float,
    repository: Path = REPOSITORY,
    on_text: Callable[[str], None] | None = None,
    name: str = "",
) -> runner.Outcome:
    """Run `python dev.py WORDS` there; the packages are those of the lock file, from the downloaded wheels."""
    name = name or f"checkout-{version}"
    with Turn(found.layout, f"{name}.lock") as turn:
        turn.alone()  # another command's copy is not to be changed under it
        copy = found.layout.drive_c / name
        _copy(repository, copy)
        constraints = copy / "lab-constraints.txt"
        constraints.write_text(_without_hashes(interpreter(version).lock.read_text(encoding="utf-8")), encoding="utf-8")
        python = found.layout.python(version) / "python.exe"
        # dev.py's own option before what it hands to pytest
        command = found.command(python, "dev.py", words[0], "--constraints", windows_path(constraints), *words[1:])
        say(f"Windows {version}: python dev.py {' '.join(words)}")
        return runner.run(
            command,
            environment=_environment(found, version, copy),
            cwd=copy,
            timeout=timeout,
            on_text=on_text or _print,
        )


def capture_install(found: Wine, version: str, *, timeout: float) -> str:
    """Return what a console shows of `anymamba install` and of the guide's import, in the environment of `dev.py demo`.

    Raises
    ------
    CommandError
        If a step fails.
    """
    outcome = dev(found, version, ["demo"], timeout=timeout, name=CAPTURED)
    if not outcome.ok:
        raise runner.CommandError(outcome, "making the environment")
    copy = found.layout.drive_c / CAPTURED
    scripts = copy / ".venv-demo" / "Scripts"
    shape = "import torch; from mamba_ssm import Mamba; print(Mamba(d_model=16)(torch.randn(2, 64, 16)).shape)"
    shown = []
    for command, prompt in (
        (["anymamba.exe", "uninstall"], None),  # what the demo installed
        (["python.exe", "-c", "import sys, torch; print(sys.version); print(torch.__version__)"],
         'python -c "import sys, torch; print(sys.version); print(torch.__version__)"'),
        (["anymamba.exe", "install"], "anymamba install"),
        (["python.exe", "-c", shape], f'python -c "{shape}"'),
    ):  # fmt: skip
        step = runner.check(
            found.command(scripts / command[0], *command[1:]),
            prompt or "taking out what the demo installed",
            environment=_environment(found, version, copy),
            cwd=copy,
            timeout=timeout,
        )
        if prompt is not None:
            shown.append(f"(.venv-demo) C:\\{CAPTURED}>{prompt}\n{step.output.rstrip()}\n")
    return "\n".join(shown)


def _environment(found: Wine, version: str, copy: Path) -> dict[str, str]:
    environment = product.environment(found, version, copy)
    del environment["PYTHONPATH"]  # the installed product is what this is about
    return environment


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
