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
    asked: dict[str, set[str]] = {}  # extras, by package
    level = _requirements(own, extras, target)
    while level:  # all that is new at once: pip takes longer to start than to fetch
        spread: dict[str, set[str]] = {}  # whose requirements come next, for which extras
        for requirement in level:
            name = canonicalize_name(requirement.name)
            if name in _NEVER:
                continue
            wanted[name] = wanted.get(name, SpecifierSet()) & requirement.specifier
            new = requirement.extras - asked.setdefault(name, set())
            asked[name] |= new
            have = files.get(name)
            if have is None or not wanted[name].contains(parse_wheel_filename(have.name)[1], prereleases=True):
                spread[name] = asked[name]
            elif new:
                spread.setdefault(name, set()).update(new)
        fetch = [
            name
            for name in spread
            if name not in files
            or not wanted[name].contains(parse_wheel_filename(files[name].name)[1], prereleases=True)
        ]
        if fetch:
            progress.step(f"Downloading {', '.join(fetch)}")
        for path in _download([f"{name}{wanted[name]}" for name in fetch], folder, target):
            name = canonicalize_name(parse_wheel_filename(path.name)[0])
            if name in files and files[name] != path:
                files[name].unlink()
            files[name] = path
        level = [r for name, more in spread.items() for r in _requirements(files[name], more, target)]
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
    return _pip(["wheel", "--no-deps"], "--wheel-dir", [str(checkout)], folder, "anymamba could not be built")[0]


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


def _download(requirements: list[str], folder: Path, target: Target) -> list[Path]:
    if not requirements:
        return []
    options = ["download", "--no-deps", "--only-binary", ":all:", *target.pip_options]
    otherwise = f"pip finds no wheels of {', '.join(requirements)} for the target"
    return _pip(options, "--dest", requirements, folder, otherwise)


def _pip(options: list[str], into: str, what: list[str], folder: Path, otherwise: str) -> list[Path]:
    """Let pip put a file for each of `what` into a folder of its own, and take them from there."""
    with tempfile.TemporaryDirectory(prefix="anymamba-", ignore_cleanup_errors=True) as place:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", *options]
        done = subprocess.run(
            [*command, into, place, *what],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        files = list(Path(place).glob("*.whl"))
        if done.returncode != 0 or len(files) != len(what):
            raise SourceError(
                f"{otherwise}.",
                why="\n".join(done.stderr.strip().splitlines()[-3:]),
                next_step="check `pip config list`, or choose another --python-version",
            )
        return [Path(shutil.copyfile(file, folder / file.name)) for file in files]
