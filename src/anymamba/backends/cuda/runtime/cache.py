"""Where compiled kernels of this backend are kept on disk."""

from __future__ import annotations

from pathlib import Path

from anymamba.backends.disk_cache import DiskCache, key_of
from anymamba.machine.folders import cache_folder

__all__ = ["DiskCache", "default_directory", "key_of"]


def default_directory() -> Path:
    """Return the folder for compiled kernels."""
    return cache_folder() / "cuda"
