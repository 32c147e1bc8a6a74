"""The releases that this product knows, with the sha256 that each source archive must have (`lock.toml`)."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from importlib.resources import files

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["DEFAULTS", "PACKAGES", "Release", "known", "known_versions", "package_name", "partner"]

PACKAGES = ("causal_conv1d", "mamba_ssm")
"""Distribution names as upstream writes them, in the order in which they are installed."""

DEFAULTS = {"causal_conv1d": "1.4.0", "mamba_ssm": "2.2.2"}
"""The pair of the guide: what `anymamba install` brings when nothing is named."""

# From 2.2.5 on, mamba_ssm imports causal_conv1d.cpp_functions, which is there since 1.5.1.
_PARTNERS = ((SpecifierSet(">=2.2.5"), "1.6.1"), (SpecifierSet(">=0"), DEFAULTS["causal_conv1d"]))


@dataclass(frozen=True)
class Release:
    """One source archive and what it must be."""

    name: str
    version: str
    file: str
    size: int
    sha256: str


@functools.cache
def _lock() -> dict[str, dict[str, Release]]:
    text = (files("anymamba.upstream") / "lock.toml").read_text(encoding="utf-8")
    return {
        name: {version: Release(name, version, **fields) for version, fields in releases.items()}
        for name, releases in tomllib.loads(text).items()
    }


def package_name(name: str) -> str | None:
    """Return upstream's spelling of `name` (``mamba-ssm`` -> ``mamba_ssm``), or None when we do not port it."""
    canonical = canonicalize_name(name)
    return next((package for package in PACKAGES if canonicalize_name(package) == canonical), None)


def known(name: str, version: str) -> Release | None:
    """Return the locked release, or None for a version that came out after this product."""
    wanted = Version(version)
    return next((release for text, release in _lock()[name].items() if Version(text) == wanted), None)


def known_versions(name: str) -> list[Version]:
    """Return every locked version, newest first."""
    return sorted(map(Version, _lock()[name]), reverse=True)


def partner(mamba_ssm: str) -> str:
    """Return the causal_conv1d that goes with this mamba_ssm when the user names none."""
    version = Version(mamba_ssm)
    return next(partner for versions, partner in _PARTNERS if versions.contains(version, prereleases=True))
