"""From a plan to wheels in a staging folder: fetched, checked, unpacked, patched, packed. No contact with the environment."""

from __future__ import annotations

import shutil
from pathlib import Path

from anymamba.errors import HashMismatchError, InstallError
from anymamba.upstream.archive import unpack
from anymamba.upstream.cache import cached_source, sha256_of
from anymamba.upstream.extras import build_extra
from anymamba.upstream.index import Index
from anymamba.upstream.pip_settings import read_pip_settings
from anymamba.upstream.plan import PackagePlan, Plan
from anymamba.upstream.port.build import build_port
from anymamba.upstream.progress import Progress
from anymamba.upstream.wheel import build_wheel, check_identity, check_port_wheel

__all__ = ["make_wheel", "make_wheels"]


def make_wheels(plan: Plan, staging: Path, progress: Progress) -> list[Path]:
    """Make the wheel of each package of a plan, each in a folder of its own.

    Raises
    ------
    SourceError, IntegrityError, PatchError, InstallError
    """
    index: Index | None = None
    try:
        wheels = []
        for package in plan.packages:
            folder = staging / package.name
            if plan.bundle is not None:
                progress.step(f"Checking {package.file}")
                wheels.append(_from_bundle(Path(plan.bundle), package, folder))
                continue
            if not package.file:
                progress.step(f"Preparing {package.name} {package.version}")
                folder.mkdir()
                wheels.append(build_extra(package.name, folder))
                continue
            archive = cached_source(package.sha256, package.file) if package.sha256 else None
            if archive is None:
                progress.step(f"Downloading {package.file}")
                index = index or Index(read_pip_settings(Path(plan.python)))
                archive = _download(index, package, progress)
            progress.step(f"Preparing {package.name} {package.version}")
            wheels.append(make_wheel(package.name, package.version, package.sha256, archive, folder))
        return wheels
    finally:
        if index is not None:
            index.__exit__()


def make_wheel(name: str, version: str, sha256: str | None, archive: Path, folder: Path) -> Path:
    """Make the wheel of the port that a source archive becomes; everything is written below `folder`.

    Parameters
    ----------
    name, version : str
        What the archive must say that it is.
    sha256 : str or None
        For the provenance; None: the archive lies in the cache, whose folder names it.
    archive, folder : Path
    """
    for part in ("source", "port"):
        (folder / part).mkdir(parents=True)
    source = unpack(archive, folder / "source")
    check_identity(source, name, version)
    port = build_port(source, name, version, folder / "port")
    return build_wheel(port, source, name, version, sha256 or archive.parent.name, archive.name, folder)


def _from_bundle(bundle: Path, package: PackagePlan, folder: Path) -> Path:
    """Copy a wheel, then check the copy: what was checked is what is installed."""
    folder.mkdir(parents=True)
    wheel = folder / package.file
    if (bundle / package.file).is_file():
        shutil.copyfile(bundle / package.file, wheel)
    if not wheel.is_file() or sha256_of(wheel) != package.sha256:
        raise HashMismatchError(
            f"{package.file} in {bundle} is missing, or not what its list says.",
            why="It was cut off when copied, or altered.",
            next_step="copy the folder again, or make it anew: anymamba bundle DIR",
        )
    check_port_wheel(wheel, package.name, package.installs)
    return wheel


def _download(index: Index, package: PackagePlan, progress: Progress) -> Path:
    offers = [found for found in index.find(package.name) if found.file == package.file]
    if not offers:
        offers = [found for found in index.find(package.name) if found.version == package.version]
    if not offers:
        raise InstallError(f"The index no longer has {package.file}.", next_step="anymamba install, to make a new plan")
    return index.download(offers[0], package.sha256, progress)
