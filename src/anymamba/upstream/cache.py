"""Where downloaded sources are kept, so that a second install needs no network.

`<cache>/sources/<sha256>/<file name>`: the folder's name is the promise that the content must keep.
`ANYMAMBA_CACHE_DIR` moves the whole cache.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from anymamba.machine.folders import cache_folder

__all__ = ["cached_source", "cached_versions", "sha256_of", "source_path"]


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
