"""Work on anymamba from a fresh checkout; needs Python 3.10 or newer and nothing else.

    python dev.py demo     make .venv-demo, install anymamba there, run the main job, print the guide's shape
    python dev.py test     make .venv-test, install anymamba with its development tools there, run every check

`test` runs ruff, mypy, pytest and, on Linux, beside them as many of the tests as 12 minutes allow in Windows Python under wine
(all: `--windows-all`). Arguments it does not know go to pytest: `python dev.py test -k conv`. pip's own settings
(PIP_INDEX_URL, pip.conf, ...) hold.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
# In Windows Python: all cheap tests, then these, which need Windows, then the others, until the time is up
# (tools/windows_lab/choice.py); `--windows-all` runs all of them.
WINDOWS_FIRST = ["tests/windows"]
WINDOWS_MINUTES = 12
CONSTRAINTS = ROOT / "constraints" / "dev.txt"
GUIDE = """
import torch
from mamba_ssm import Mamba

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(2, 64, 16, device=device)
model = Mamba(d_model=16, d_state=16, d_conv=4, expand=2).to(device)
y = model(x)
print(y.shape)
assert y.shape == x.shape and bool(torch.isfinite(y).all())
"""


def main() -> int:
    """Parse the arguments and run the step; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    demo = steps.add_parser("demo", help="install into a fresh virtual environment and run the main job")
    test = steps.add_parser("test", help="run every check; unknown arguments go to pytest")
    for step in (demo, test):
        step.add_argument(
            "--constraints", type=Path, default=CONSTRAINTS, help="pip constraints (default: %(default)s)"
        )
        step.add_argument("--fresh", action="store_true", help="make the virtual environment anew")
    test.add_argument(
        "--bare", action="store_true", help="pytest alone, with what it cannot do without; skips tell the rest"
    )
    test.add_argument("--no-windows", action="store_true", help="leave out the Windows lab")
    test.add_argument(
        "--windows-all", action="store_true", help="the whole suite in the Windows lab, not only its part"
    )
    test.add_argument("--no-lint", action="store_true", help="leave out ruff and mypy")
    arguments, rest = parser.parse_known_args()
    if rest and arguments.step != "test":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if arguments.step == "demo":
            return run_demo(arguments.constraints, fresh=arguments.fresh)
        return run_tests(
            arguments.constraints,
            rest,
            fresh=arguments.fresh,
            lint=not arguments.no_lint,
            bare=arguments.bare,
            windows=None
            if arguments.no_windows or sys.platform != "linux"
            else (
                ["--timeout=7200"] if arguments.windows_all else [f"--minutes={WINDOWS_MINUTES}", "--", *WINDOWS_FIRST]
            ),
        )
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130


def run_demo(constraints: Path, *, fresh: bool) -> int:
    """Do what a user does, in .venv-demo."""
    python = environment(ROOT / ".venv-demo", [str(ROOT)], constraints, fresh=fresh)
    anymamba = [str(python), "-m", "anymamba"]
    for command in ([*anymamba, "install"], [str(python), "-c", GUIDE], [*anymamba, "doctor"]):
        code = call(command)
        if code and command[-1] != "doctor":  # doctor's findings about this machine are news, not a failed demo
            return code
    print(f"\nDone. Try it: {python}", flush=True)
    return 0


def run_tests(
    constraints: Path, pytest_arguments: list[str], *, fresh: bool, lint: bool, bare: bool, windows: list[str] | None
) -> int:
    """Run every check, the quick ones first and Windows beside all of them; return the first non-zero exit code."""
    extra = "test" if bare else "dev"
    python = str(environment(ROOT / ".venv-test", ["-e", f"{ROOT}[{extra}]"], constraints, fresh=fresh))
    checks = [[python, "-m", "pytest", *pytest_arguments]]
    if lint and not bare:
        checks[:0] = [
            [python, "-m", "ruff", "check", "."],
            [python, "-m", "ruff", "format", "--check", "."],
            [python, "-m", "mypy"],
        ]
    if windows is None:
        return first_failure(checks)
    command = [python, "-m", "tools.windows_lab", "test", *windows]
    log = ROOT / ".venv-test" / "windows.txt"
    say(f"$ {subprocess.list2cmdline(command)}\n  goes on beside the rest; what it says comes at the end")
    with log.open("wb") as output, subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output) as beside:
        try:
            code = first_failure(checks)
            if code == 0:
                code = beside.wait()
                say(log.read_text(encoding="utf-8", errors="replace"))
        finally:
            if beside.poll() is None:
                beside.terminate()  # it ends what it started
    return code


def first_failure(checks: list[list[str]]) -> int:
    """Run commands until one fails; return its exit code."""
    for check in checks:
        code = call(check)
        if code:
            return code
    return 0


def environment(folder: Path, packages: list[str], constraints: Path, *, fresh: bool) -> Path:
    """Return the Python of the virtual environment `folder`, made and filled when what it is made from has changed."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    recipe = hashlib.sha256()
    for part in (constraints, ROOT / "pyproject.toml"):
        recipe.update(part.read_bytes())
    recipe.update("\0".join([sys.version, *packages]).encode())
    stamp = folder / "made-from.txt"
    editable = "-e" in packages
    if not fresh and editable and stamp.is_file() and stamp.read_text(encoding="utf-8") == recipe.hexdigest():
        return python
    if fresh or not python.is_file():
        say(f"Making {folder}")
        venv.create(folder, with_pip=True, clear=folder.exists())
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "-c", str(constraints)]
    say("Installing torch and anymamba (the first time takes a minute or more)")
    for what in (["torch", "numpy"], packages):
        code = call([*pip, *what])
        if code:
            sys.exit(code)
    stamp.write_text(recipe.hexdigest(), encoding="utf-8")
    return python


def call(command: list[str]) -> int:
    """Run a command with this terminal's streams, say what it was and how long it took; return its exit code."""
    shown = subprocess.list2cmdline([part if "\n" not in part else "<the guide's script>" for part in command])
    say(f"$ {shown}")
    started = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, "PYTHONUTF8": "1"}).returncode
    say(f"  exit code {code}, {time.monotonic() - started:.0f} s")
    return code


def say(text: str) -> None:
    """Print a line at once, whatever the console's code page."""
    sys.stdout.write(text.encode("ascii", "replace").decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
