"""Upstream's real packages ported into a folder, as `anymamba install` puts them in site-packages, for tests of its modules."""

from __future__ import annotations

import sys
from pathlib import Path

from anymamba.upstream.archive import unpack
from anymamba.upstream.index import Index
from anymamba.upstream.pip_settings import read_pip_settings
from anymamba.upstream.port.build import build_port
from anymamba.upstream.progress import Silent
from anymamba.upstream.releases import DEFAULTS, known

__all__ = ["build_upstream"]


def build_upstream(folder: Path) -> Path:
    """Fetch (or take from the cache), port, and return the folder to put on `sys.path`."""
    python = Path(sys.executable)
    into = folder / "ported"
    into.mkdir()
    with Index(read_pip_settings(python)) as index:
        for name, version in DEFAULTS.items():
            release = known(name, version)
            assert release is not None
            found = next(found for found in index.find(name) if found.file == release.file)
            archive = index.download(found, release.sha256, Silent())
            sources = folder / name
            sources.mkdir()
            build_port(unpack(archive, sources), name, version, into)
    return into
