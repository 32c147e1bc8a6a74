"""Where downloaded sources are kept, so that a second install needs no network.

`<cache>/sources/<sha256>/<file name>`: the folder's name is the promise that the content must keep.
`ANYMAMBA_CACHE_DIR` moves the whole cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from anymamba.errors import NotWritableError
from anymamba.machine.folders import cache_folder

__all__ = ["Part", "cache_contents", "cached_source", "cached_versions", "clear_cache", "sha256_of", "source_path"]

PARTS = ("sources", "git", "cuda", "numba", "tuned")
"""Everything the product keeps. Nothing else is counted or deleted: a user may let ANYMAMBA_CACHE_DIR be any folder."""


@dataclass(frozen=True)
class Part:
    """A folder of the cache."""

    name: str
    files: int
    size: int


def cache_contents() -> list[Part]:
    """Return what the cache holds: sources, kernels, measurements, each with its number of files and bytes."""
    folder = cache_folder()
    parts = []
    for name in PARTS:
        files = [path for path in (folder / name).rglob("*") if path.is_file() and not path.is_symlink()]
        if files:
            parts.append(Part(name, len(files), sum(path.stat().st_size for path in files)))
    return parts


def clear_cache() -> None:
    """Delete what the cache holds; the folder stays.

    Raises
    ------
    NotWritableError
        Something is in use, or belongs to another account; the rest is gone.
    """
    folder, left = cache_folder(), []
    for name in PARTS:
        if (folder / name).is_dir():
            shutil.rmtree(folder / name, onerror=lambda _function, path, _error: left.append(str(path)))
    if left:
        raise NotWritableError(
            f"{len(left)} entries of the cache cannot be deleted, such as {left[0]}.",
            why="A running program may use them, or another account own them.",
            next_step="end programs that use anymamba, then: anymamba cache clear",
        )


def source_path(sha256: str, file: str) -> Path:
    """Return where the archive with this content is, or would be, kept."""
    return cache_folder() / "sources" / sha256 / file


def cached_source(sha256: str, file: str) -> Path | None:
    """Return the kept archive if it is there and still has its content; a damaged one is removed."""
    path = source_path(sha256, file)
    if not path.is_file():
        return None
    if sha256_of(path) != sha256:
        with contextlib.suppress(OSError):  # Windows: another program has it open
            path.unlink()
        return None
    return path


def cached_versions(name: str) -> dict[str, Path]:
    """Return the kept archives of a package by the version in their file name."""
    found: dict[str, Path] = {}
    sources = cache_folder() / "sources"
    if not sources.is_dir():
        return found
    for path in sorted(sources.glob("*/*")):
        stem, _, version = path.name.removesuffix(".tar.gz").removesuffix(".zip").rpartition("-")
        if stem.replace("-", "_") == name:
            found[version] = path
    return found


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
