"""anymamba itself and everything it needs but torch, as wheels in a folder, for this machine or another.

pip chooses the file for each requirement; which requirements there are is followed here, because pip judges environment
markers (`; sys_platform == "win32"`) by the machine it runs on, not by the one that the wheels are for.
"""

from __future__ import annotations

import email.parser
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename

import anymamba
from anymamba.errors import MachineError, SourceError
from anymamba.upstream.progress import Progress
from anymamba.upstream.target import Target
from anymamba.upstream.wheel import pack_wheel

__all__ = ["collect_companions", "own_wheel"]

_NEVER = {"torch"}  # which build is right is the user's choice


def collect_companions(
    own: Path, folder: Path, target: Target, extras: Iterable[str], progress: Progress
) -> list[Path]:
    """Download what a wheel needs on the target, and what that needs, into `folder`; return the files.

    Parameters
    ----------
    own : Path
        The wheel to begin with.
    folder : Path
    target : Target
    extras : iterable of str
        Extras of the first wheel to serve too.
    progress : Progress

    Raises
    ------
    SourceError
        pip finds no wheel of something.
    """
    files: dict[str, Path] = {}
    wanted: dict[str, SpecifierSet] = {}
    seen: dict[str, set[str]] = {}
    queue = _requirements(own, extras, target)
    while queue:
        requirement = queue.pop(0)
        name = canonicalize_name(requirement.name)
        if name in _NEVER:
            continue
        wanted[name] = wanted.get(name, SpecifierSet()) & requirement.specifier
        new_extras = requirement.extras - seen.setdefault(name, set())
        seen[name] |= requirement.extras
        have = files.get(name)
        if have is None or not wanted[name].contains(parse_wheel_filename(have.name)[1], prereleases=True):
            if have is not None:
                have.unlink()
            progress.step(f"Downloading {name}")
            files[name] = have = _download(f"{requirement.name}{wanted[name]}", folder, target)
            new_extras = seen[name]
        elif not new_extras:
            continue
        queue += _requirements(have, new_extras, target)
    return sorted(files.values())


def own_wheel(folder: Path) -> Path:
    """Write the wheel of the anymamba that runs now: its installed files packed again, or its checkout built.

    Raises
    ------
    MachineError
        It is neither installed nor a checkout, or the checkout cannot be built.
    """
    try:
        dist = metadata.distribution("anymamba")
        files = {path.as_posix(): path for path in dist.files or ()}
    except metadata.PackageNotFoundError:
        files = {}
    if "anymamba/__init__.py" in files:
        info = next(path.partition("/")[0] for path in files if path.endswith(".dist-info/METADATA"))
        left_out = {f"{info}/{name}" for name in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")}
        content = {
            name: Path(str(dist.locate_file(path))).read_bytes()
            for name, path in sorted(files.items())
            if name.startswith(("anymamba/", f"{info}/")) and not name.endswith(".pyc") and name not in left_out
        }
        return pack_wheel(folder / f"{info.removesuffix('.dist-info')}-py3-none-any.whl", info, content)
    checkout = Path(anymamba.__file__).parents[2]
    if not (checkout / "pyproject.toml").is_file():
        raise MachineError("This anymamba is neither installed nor a checkout.", next_step="pip install anymamba")
    return _pip(["wheel", "--no-deps"], ["--wheel-dir"], str(checkout), folder, "anymamba could not be built")


def _requirements(wheel: Path, extras: Iterable[str], target: Target) -> list[Requirement]:
    """Return what a wheel needs on the target."""
    with zipfile.ZipFile(wheel) as zipped:
        name = next(entry for entry in zipped.namelist() if entry.endswith(".dist-info/METADATA"))
        headers = email.parser.Parser().parsestr(zipped.read(name).decode("utf-8", "replace"), headersonly=True)
    stated = [Requirement(text) for text in headers.get_all("Requires-Dist", [])]
    markers = target.markers
    environments = [{**markers, "extra": extra} for extra in ("", *extras)]
    return [
        requirement
        for requirement in stated
        if requirement.marker is None or any(requirement.marker.evaluate(environment) for environment in environments)
    ]


def _download(requirement: str, folder: Path, target: Target) -> Path:
    options = ["download", "--no-deps", "--only-binary", ":all:", *target.pip_options]
    return _pip(options, ["--dest"], requirement, folder, f"pip finds no wheel of {requirement} for the target")


def _pip(options: list[str], into: list[str], what: str, folder: Path, otherwise: str) -> Path:
    """Let pip put one file into a folder of its own, and take it from there."""
    with tempfile.TemporaryDirectory(prefix="anymamba-", ignore_cleanup_errors=True) as place:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", *options]
        done = subprocess.run(
            [*command, *into, place, what],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        files = list(Path(place).glob("*.whl"))
        if done.returncode != 0 or len(files) != 1:
            raise SourceError(
                f"{otherwise}.",
                why="\n".join(done.stderr.strip().splitlines()[-3:]),
                next_step="check `pip config list`, or choose another --python-version",
            )
        return Path(shutil.copyfile(files[0], folder / files[0].name))
