"""Folders and variables that Triton, pip and our own kernel cache need: HOME, the cache, free disk, temp, site-packages."""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Folders", "read_folders"]


@dataclass(frozen=True)
class Folders:
    """Folders of this user and this interpreter. Sizes in GB; None where they cannot be read."""

    home_variable: str | None  # the variable HOME; Windows does not set it
    home: str | None  # the home folder by any means
    triton_cache_variable: str | None  # TRITON_CACHE_DIR
    cache: str
    cache_writable: bool
    cache_free_gb: float | None
    temporary: str
    temporary_free_gb: float | None
    site_packages: str
    site_packages_writable: bool
    working: str
    shadowed: tuple[str, ...] = ()  # packages that the working folder hides: `import` finds the folder, not the package


_SHADOWABLE = ("torch", "triton", "numpy", "mamba_ssm", "causal_conv1d", "einops", "transformers")


def read_folders(*, environ: Mapping[str, str] = os.environ, working: Path | None = None) -> Folders:
    """Read the folders; nothing is created."""
    cache = cache_folder(environ)
    working = working or _working()
    site_packages = Path(sysconfig.get_path("purelib"))
    temporary = Path(tempfile.gettempdir())
    return Folders(
        home_variable=environ.get("HOME"),
        home=_home(),
        triton_cache_variable=environ.get("TRITON_CACHE_DIR"),
        cache=str(cache),
        cache_writable=_writable(cache),
        cache_free_gb=_free(cache),
        temporary=str(temporary),
        temporary_free_gb=_free(temporary),
        site_packages=str(site_packages),
        site_packages_writable=_writable(site_packages),
        working=str(working),
        shadowed=tuple(name for name in _SHADOWABLE if _shadows(working, name)),
    )


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where anymamba keeps downloads and compiled kernels: ANYMAMBA_CACHE_DIR or the system's own place."""
    chosen = environ.get("ANYMAMBA_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    try:
        import platformdirs  # here, so that compiled kernels find their folder on a machine that has nothing but torch

        folder = Path(platformdirs.user_cache_path("anymamba", appauthor=False))
    except (ImportError, RuntimeError, OSError, KeyError):  # or a service account without a home folder
        folder = Path()
    # Without HOME some systems answer "~/.cache"; a folder of that name in the working directory helps nobody.
    return folder if folder.is_absolute() else Path(tempfile.gettempdir(), "anymamba")


def _shadows(working: Path, name: str) -> bool:
    return (working / f"{name}.py").is_file() or (working / name / "__init__.py").is_file()


def _working() -> Path:
    try:
        return Path.cwd()
    except OSError:  # the folder was deleted under us
        return Path(tempfile.gettempdir())


def _home() -> str | None:
    try:
        return str(Path.home())
    except RuntimeError:
        return None


def _existing(folder: Path) -> Path | None:
    for candidate in (folder, *folder.parents):
        if candidate.is_dir():
            return candidate
    return None


def _writable(folder: Path) -> bool:
    """Try it: on Windows os.access does not look at access control lists."""
    existing = _existing(folder)
    if existing is None:
        return False
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".anymamba-"):
            return True
    except OSError:
        return False


def _free(folder: Path) -> float | None:
    existing = _existing(folder)
    if existing is None:
        return None
    try:
        return round(shutil.disk_usage(existing).free / 1e9, 1)
    except OSError:
        return None
