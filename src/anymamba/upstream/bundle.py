"""A folder that installs on a machine with no network: the ports as wheels, anymamba, what it needs, and a list with hashes.

anymamba-bundle.json     what is in it and what each file must be
HOW-TO-INSTALL.txt       the two commands to type there
mamba_ssm-….whl …        the ports: pure Python, the same for every platform; their provenance is inside
anymamba-….whl …         the product and its dependencies, for one platform and Python; torch is not among them
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from packaging.version import InvalidVersion, Version

from anymamba import __version__
from anymamba.errors import IntegrityError, NoSuchReleaseError, NotWritableError, OptionError
from anymamba.upstream.cache import sha256_of
from anymamba.upstream.companions import collect_companions, own_wheel
from anymamba.upstream.environment import inspect_environment
from anymamba.upstream.making import make_wheels
from anymamba.upstream.plan import PackagePlan, Plan, check_environment, parse_requirements
from anymamba.upstream.progress import Progress, Silent
from anymamba.upstream.releases import PACKAGES
from anymamba.upstream.target import Target

__all__ = ["LIST", "Bundle", "make_bundle", "plan_from_bundle"]

LIST = "anymamba-bundle.json"
SCHEMA = 1

_HOW_TO = """\
On the machine without network, with Python{python} and PyTorch installed, type in this folder:

    python -m pip install --no-index --find-links . anymamba
    python -m anymamba install --from .
"""


@dataclass(frozen=True)
class Bundle:
    """What a bundle holds: its folder, the ports' versions, and the other files."""

    folder: Path
    packages: dict[str, str]
    others: list[str]


def make_bundle(
    plan: Plan,
    folder: Path,
    target: Target = Target(),  # noqa: B008
    extras: Iterable[str] = (),
    companions: bool = True,
    progress: Progress | None = None,
) -> Bundle:
    """Make the ports of a plan and put them into a new folder, with what the other machine needs.

    Parameters
    ----------
    plan : Plan
    folder : Path
        Absent, empty, or an earlier bundle, which is replaced.
    target : Target
        The machine that dependencies are for.
    extras : iterable of str
        Extras of anymamba to serve, such as ``cpu``.
    companions : bool
        False: the ports only; the other machine has anymamba already.
    progress : Progress, optional

    Raises
    ------
    OptionError, NotWritableError, SourceError, IntegrityError, PatchError
    """
    progress = progress or Silent()
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / LIST).is_file())):
        raise OptionError(f"{folder} is there and is no bundle.", next_step="anymamba bundle ANOTHER_FOLDER")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # beside its place: complete, or not there
        with tempfile.TemporaryDirectory(prefix=".anymamba-", dir=folder.parent, ignore_cleanup_errors=True) as near:
            made = Path(near, "bundle")
            made.mkdir()
            with tempfile.TemporaryDirectory(prefix="anymamba-", ignore_cleanup_errors=True) as staging:
                wheels = make_wheels(plan, Path(staging), progress)
                ports = [Path(shutil.copyfile(wheel, made / wheel.name)) for wheel in wheels]
            others: list[Path] = []
            if companions:
                progress.step("Packing anymamba")
                own = own_wheel(made)
                others = [own, *collect_companions(own, made, target, extras, progress)]
            content = _list(plan, ports, others, target)
            (made / LIST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            python = f" {target.python_version}" if target.python_version else ""
            (made / "HOW-TO-INSTALL.txt").write_text(_HOW_TO.format(python=python), encoding="utf-8")
            if folder.exists():
                folder.rename(Path(near, "before"))
            made.rename(folder)
    except OSError as error:
        raise NotWritableError(
            f"{folder} cannot be written.",
            why=f"{error.strerror or error}: {error.filename or ''}",
            next_step="make room, or name another folder: anymamba bundle DIR",
        ) from error
    return Bundle(folder, {p.name: p.installs for p in plan.packages}, [path.name for path in others])


def plan_from_bundle(folder: Path, requirements: Sequence[str], python: Path) -> Plan:
    """Work out what an install from a bundle would do; no network, no cache.

    Parameters
    ----------
    folder : Path
    requirements : sequence of str
        What of it to install; nothing named: all of it.
    python : Path

    Raises
    ------
    OptionError, NoSuchReleaseError, IntegrityError, MachineError, NotWritableError, InstallError
    """
    environment = inspect_environment(python)
    check_environment(environment)
    offered = {package["name"]: package for package in _read(folder)["packages"]}
    wanted = parse_requirements(requirements) if requirements else dict.fromkeys(offered)
    packages = []
    for name in PACKAGES:
        if name not in wanted:
            continue
        package, specifier = offered.get(name), wanted[name]
        if package is None or (specifier is not None and not specifier.contains(package["version"], prereleases=True)):
            has = ", ".join(f"{there['name']}=={there['version']}" for there in offered.values())
            raise NoSuchReleaseError(
                f"{folder} has no {name}{specifier or ''}.",
                why=f"It has {has}.",
                next_step=f"anymamba install --from {folder}",
            )
        packages.append(
            PackagePlan(
                name=name,
                version=package["version"],
                installs=package["installs"],
                file=package["file"],
                size=package["size"],
                sha256=package["sha256"],
                hash_from="bundle",
                cached=True,
                rules=[(rule[0], rule[1]) for rule in package["rules"]],
                replaces=environment.installed.get(name),
            )
        )
    return Plan(
        product=__version__,
        python=environment.python,
        site_packages=environment.purelib,
        torch=environment.torch or "",
        offline=True,
        packages=packages,
        bundle=str(folder.absolute()),
    )


def _list(plan: Plan, ports: list[Path], others: list[Path], target: Target) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "anymamba": __version__,
        "platform": target.platform,
        "python_version": target.python_version,
        "packages": [
            {
                "name": package.name,
                "version": package.version,
                "installs": package.installs,
                **_fingerprint(wheel),
                "source": {"file": package.file, "sha256": package.sha256},
                "rules": package.rules,
            }
            for package, wheel in zip(plan.packages, ports)
        ],
        "others": [_fingerprint(path) for path in others],
    }


def _fingerprint(path: Path) -> dict[str, Any]:
    return {"file": path.name, "size": path.stat().st_size, "sha256": sha256_of(path)}


def _read(folder: Path) -> dict[str, Any]:
    path = folder / LIST
    if not path.is_file():
        raise OptionError(f"{folder} is not a bundle: it has no {LIST}.", next_step="anymamba bundle DIR makes one")
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA or Version(content["anymamba"]) > Version(__version__):
            raise IntegrityError(
                f"{folder} was made by anymamba {content['anymamba']}; this is {__version__}.",
                next_step=f"python -m pip install --no-index --find-links {folder} --upgrade anymamba",
            )
        for package in content["packages"]:
            _check_entry(package)
    except (ValueError, KeyError, TypeError, IndexError, InvalidVersion) as error:
        raise IntegrityError(
            f"{path} is damaged.", why=f"{type(error).__name__}: {error}", next_step="make it anew: anymamba bundle DIR"
        ) from error
    return content


def _check_entry(package: dict[str, Any]) -> None:
    """Let nothing through that does not name a plain file of the folder and one of our packages."""
    file = package["file"]
    if file != PurePosixPath(file).name or file != PureWindowsPath(file).name:
        raise ValueError(f"{file!r} is not a file's name")
    if package["name"] not in PACKAGES or Version(package["installs"]).public != str(Version(package["version"])):
        raise ValueError(f"{package['name']} {package['installs']} is not a port of ours")
    if not isinstance(package["sha256"], str) or not isinstance(package["size"], int):
        raise TypeError("sha256 and size are missing")
    for rule in package["rules"]:
        str(rule[0]) + str(rule[1])
