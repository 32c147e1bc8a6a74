"""What upstream's git tags hold, as data (`tags.toml`): pinned object ids, and the nearest release that needs no git."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Nearest", "Tag", "nearest", "pinned", "repository", "sdist_has_sources", "tag_name"]


@dataclass(frozen=True)
class Tag:
    """A release's tag and the ids of what it holds."""

    version: str
    tag: str
    commit: str
    tree: str
    csrc: str
    executable: tuple[str, ...] = ()
    submodules: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Nearest:
    """A release whose source archive holds the C++ and CUDA sources, and where they differ from those wanted."""

    version: str
    differs: str


@functools.cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = tomllib.loads((files("anymamba.upstream.native") / "tags.toml").read_text(encoding="utf-8"))
    return data


def repository(name: str) -> str:
    """Return the address of a package's repository."""
    return str(_data()[name]["repository"])


def sdist_has_sources(name: str, version: str) -> bool:
    """Return whether the source archive on the package index holds all of csrc/ (before: none of it, or not all)."""
    return Version(version) >= Version(_data()[name]["sdist"])


def pinned(name: str, version: str) -> Tag | None:
    """Return what a release's tag must hold, if this product knows it."""
    wanted = Version(version)
    found = next((entry for entry in _data()[name]["release"] if Version(entry["version"]) == wanted), None)
    return None if found is None else Tag(**{**found, "executable": tuple(found["executable"])})


def tag_name(name: str, version: str) -> str:
    """Return the name of a release's tag."""
    known = pinned(name, version)
    return f"v{version}" if known is None else known.tag


def nearest(name: str, version: str) -> Nearest:
    """Return the closest release that needs no git."""
    for entry in _data()[name]["nearest"]:
        if SpecifierSet(entry["releases"]).contains(Version(version), prereleases=True):
            return Nearest(entry["version"], f"it differs {entry['differs']}")
    return Nearest(_data()[name]["sdist"], "how much its C++ and CUDA sources differ was not compared")
