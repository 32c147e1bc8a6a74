"""Upstream's real packages ported into a folder, as `anymamba install` puts them in site-packages, for tests of its modules."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from anymamba.upstream.archive import unpack
from anymamba.upstream.index import Index
from anymamba.upstream.pip_settings import read_pip_settings
from anymamba.upstream.port.build import build_port
from anymamba.upstream.progress import Silent
from anymamba.upstream.releases import DEFAULTS, known

__all__ = ["build_upstream", "port_on_path"]

_PARTS = ("mamba_ssm", "causal_conv1d", "causal_conv1d_cuda", "selective_scan_cuda")


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


@contextmanager
def port_on_path(folder: Path) -> Iterator[None]:
    """Put a port where it is imported from: nothing to do where one is installed, else one is built, for this long.

    transformers 4 asks for the installed distribution too, which one that is only built lacks.
    """
    if importlib.util.find_spec("mamba_ssm") is not None:
        yield
        return
    built = str(build_upstream(folder))
    sys.path.insert(0, built)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(built)
        for name in [name for name in sys.modules if name.partition(".")[0] in _PARTS]:
            del sys.modules[name]
