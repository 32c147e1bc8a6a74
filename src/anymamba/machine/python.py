"""The Python that runs us, and what kind of environment it lives in."""

from __future__ import annotations

import importlib.util
import platform
import struct
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = ["Python", "read_python"]


@dataclass(frozen=True)
class Python:
    """One interpreter."""

    version: str  # "3.10.11"
    implementation: str  # CPython, PyPy
    executable: str
    prefix: str
    environment: str  # venv, conda, store (Microsoft Store), system
    externally_managed: bool  # PEP 668: the distribution wants pip to keep out
    bits: int
    free_threaded: bool
    pip: str | None  # version, None where there is no pip (uv makes such environments)
    headers: bool  # Python.h is there: extensions can be compiled

    @property
    def release(self) -> tuple[int, int]:
        """(3, 10)."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


def read_python() -> Python:
    """Describe the running interpreter."""
    return Python(
        version=platform.python_version(),
        implementation=platform.python_implementation(),
        executable=sys.executable,
        prefix=sys.prefix,
        environment=_environment(),
        externally_managed=_externally_managed(),
        bits=8 * struct.calcsize("P"),
        free_threaded=bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        pip=_version("pip") if importlib.util.find_spec("pip") else None,
        headers=Path(sysconfig.get_path("include"), "Python.h").is_file(),
    )


def _environment() -> str:
    if sys.prefix != sys.base_prefix:
        return "venv"
    if Path(sys.prefix, "conda-meta").is_dir():
        return "conda"
    if "WindowsApps" in sys.executable or "PythonSoftwareFoundation" in sys.base_prefix:
        return "store"
    return "system"


def _externally_managed() -> bool:
    return sys.prefix == sys.base_prefix and Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").is_file()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
