"""Install a plan, or take it back: build the wheels aside, change the environment undoably, prove, or leave it as it was."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anymamba.errors import InstallError, NotWritableError, VerificationFailedError
from anymamba.faults import brief
from anymamba.upstream import proof
from anymamba.upstream.environment import WHEN_TOLD, Environment, inspect_environment, run_in
from anymamba.upstream.making import make_wheels
from anymamba.upstream.plan import Plan
from anymamba.upstream.port.families import EXTENSIONS
from anymamba.upstream.progress import Progress, Silent
from anymamba.upstream.state import State

__all__ = ["Installation", "install", "install_wheels", "prove", "uninstall"]


@dataclass(frozen=True)
class Installation:
    """What an install did: the versions that are there now, and what the proof reported."""

    packages: dict[str, str]
    proof: dict[str, Any]


Prove = Callable[[str, dict[str, str]], dict[str, Any]]


def prove(python: str, versions: dict[str, str]) -> dict[str, Any]:
    """Run the proof in a fresh process of the environment.

    Raises
    ------
    VerificationFailedError
    """
    wanted = [f"{name}=={version}" for name, version in versions.items()]
    result = run_in(python, ["-m", proof.__name__, *wanted])
    answer = next((line for line in result.stdout.splitlines() if line.startswith(proof.PREFIX)), None)
    report: dict[str, Any] = json.loads(answer.removeprefix(proof.PREFIX)) if answer else {}
    if result.returncode != 0 or not report or report.get("failed"):
        why = report.get("failed") or (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        raise _failed(
            VerificationFailedError,
            "The installed packages do not work here; everything was put back as it was.",
            "",
            result.stderr,
            str(why),
        )
    return report


def install(plan: Plan, progress: Progress | None = None, prove: Prove = prove) -> Installation:
    """Carry out a plan.

    Raises
    ------
    SourceError, IntegrityError, PatchError
        Before the environment is touched.
    EnvironmentLockedError, NotWritableError, InstallError, VerificationFailedError
        With the environment as it was.
    """
    progress = progress or Silent()
    environment = inspect_environment(Path(plan.python))
    state = State(environment)
    versions = {package.name: package.installs for package in plan.packages}
    with (
        _disk_errors(),
        state.locked(),
        tempfile.TemporaryDirectory(prefix="anymamba-", ignore_cleanup_errors=True) as staging,
    ):
        wheels = make_wheels(plan, Path(staging), progress)
        return _put_in(environment, state, versions, wheels, progress, prove)


def install_wheels(
    python: Path, wheels: Mapping[str, Path], progress: Progress | None = None, prove: Prove = prove
) -> Installation:
    """Install wheels that were built already, as undoably and as proved as a plan's.

    Parameters
    ----------
    python : Path
    wheels : mapping
        For each package, its wheel; each in a folder with no other wheel of that name and version.

    Raises
    ------
    EnvironmentLockedError, NotWritableError, InstallError, VerificationFailedError
        With the environment as it was.
    """
    environment = inspect_environment(python)
    state = State(environment)
    versions = {name: wheel.name.split("-")[1] for name, wheel in wheels.items()}
    with _disk_errors(), state.locked():
        return _put_in(environment, state, versions, list(wheels.values()), progress or Silent(), prove)


def _put_in(
    environment: Environment, state: State, versions: dict[str, str], wheels: Sequence[Path], progress: Progress, prove: Prove
) -> Installation:  # fmt: skip
    progress.step("Installing " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    with state.installing(list(versions)):
        _pip_install(environment.python, wheels, state)
        progress.step("Verifying in a fresh process")
        report = prove(environment.python, versions)
    return Installation(versions, report)


def uninstall(
    python: Path,
    names: Sequence[str] = tuple(EXTENSIONS),
    progress: Progress | None = None,
) -> dict[str, list[str]]:
    """Remove our ports and restore what was there before them.

    Returns
    -------
    dict
        For each package, the entries of site-packages that came back.

    Raises
    ------
    InstallError
        Nothing of ours is there.
    EnvironmentLockedError, NotWritableError
        With the environment as it was.
    """
    progress = progress or Silent()
    environment = inspect_environment(python)
    state = State(environment)
    nothing = InstallError(
        f"Nothing of anymamba's is installed for {environment.python}.", next_step="anymamba install"
    )
    if not state.broken and not _ours(environment, state, names):
        raise nothing
    with _disk_errors(), state.locked():
        progress.step("Restoring what was there before")
        ours = _ours(inspect_environment(python), state, names)
        if not ours:
            raise nothing
        return state.restoring(ours)


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotWritableError(
            f"The disk failed: {error.strerror or error}.",
            why=f"{error.filename or 'a file'}. The environment is as it was, or will be put right by the next command.",
            next_step="make room or get access, then run the same command again",
        ) from error


def _ours(environment: Environment, state: State, names: Sequence[str]) -> list[str]:
    kept = state.kept()
    found = []
    for name in names:
        present = environment.installed.get(name)
        # a port; or nothing, where a port was and the user removed it with pip
        if (present is None and name in kept) or (present is not None and present.kind == "port"):
            found.append(name)
    return found


def _failed(kind: type[InstallError], what: str, out: str, error: str, said: str = "") -> InstallError:
    """Make the error of a step that a program failed at: the known fault in what it printed, else its last words."""
    known = brief(f"{out}\n{error}\n{said}\n")
    if known is None:
        last = said or "\n".join(error.strip().splitlines()[-5:])
        return kind(what, why=last, next_step="anymamba doctor")
    return kind(what, why=f"{known.what}. {known.why}", next_step=known.next_step or "anymamba doctor")


def _pip_install(python: str, wheels: Sequence[Path], state: State) -> None:
    # Nothing of the user's pip settings may matter here (a target folder, required hashes, an index): files go in as they are.
    quiet = ["--isolated", "--disable-pip-version-check", "--no-input", "--quiet"]
    # By name and version from folders, not by path: else pip notes the path, and `pip freeze` would show it for ever.
    places = [option for wheel in wheels for option in ("--find-links", str(wheel.parent))]
    wanted = ["==".join(wheel.name.split("-")[:2]) for wheel in wheels]
    offline = ["--no-deps", "--no-index", "--ignore-installed", "--no-warn-script-location"]
    arguments = ["-c", WHEN_TOLD, "pip", *quiet, "install", *offline, *places, *wanted]
    result = run_in(python, arguments, variables={"PIP_CONFIG_FILE": os.devnull}, started=state.working)
    if result.returncode != 0:
        raise _failed(
            InstallError,
            "pip could not install the wheels; everything was put back as it was.",
            result.stdout,
            result.stderr,
        )
