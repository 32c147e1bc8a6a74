"""Installed packages that matter: upstream's two (and what kind they are), and the company they keep."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = ["Installed", "Packages", "Upstream", "read_packages"]

_COMPANY = (
    "numpy", "einops", "numba", "transformers", "huggingface-hub", "packaging", "setuptools", "wheel", "ninja",
    "torchvision", "torchaudio", "mambapy",
)  # fmt: skip


@dataclass(frozen=True)
class Installed:
    """A package that matters to us."""

    name: str
    version: str


@dataclass(frozen=True)
class Upstream:
    """One of upstream's packages as it is installed.

    `kind`: port (ours, runs on anymamba's operators); native (has its compiled extension); foreign (something else under
    this name: a fork, an editable checkout, a wheel without extension).
    """

    name: str  # mamba_ssm, causal_conv1d
    version: str
    where: str
    kind: str
    extension: str | None  # file of selective_scan_cuda / causal_conv1d_cuda


@dataclass(frozen=True)
class Packages:
    """What is installed. `duplicated`: packages with more than one metadata folder (conda and pip mixed)."""

    upstream: tuple[Upstream, ...]
    company: tuple[Installed, ...]
    duplicated: tuple[str, ...] = ()

    def version(self, name: str) -> str | None:
        """Return the version of a package of the company, or None."""
        return next((package.version for package in self.company if package.name == name), None)

    def of_upstream(self, name: str) -> Upstream | None:
        """Return mamba_ssm or causal_conv1d, or None."""
        return next((package for package in self.upstream if package.name == name), None)


def read_packages() -> Packages:
    """Read the metadata of installed packages; nothing is imported."""
    company = [Installed(name, version) for name in _COMPANY if (version := _version(name)) is not None]
    upstream = [
        package
        for name, extension in (("mamba_ssm", "selective_scan_cuda"), ("causal_conv1d", "causal_conv1d_cuda"))
        if (package := _upstream(name, extension)) is not None
    ]
    return Packages(tuple(upstream), tuple(company), _duplicated(("torch", "numpy", "mamba_ssm", "causal_conv1d")))


def _upstream(name: str, extension: str) -> Upstream | None:
    found = _origin(name)
    version = _version(name) or _version(name.replace("_", "-"))
    if found is None and version is None:
        return None
    binary = _origin(extension)
    local = (version or "").partition("+")[2]
    if local.startswith("anymamba"):
        kind = "port"
    elif binary is not None and not binary.endswith(".py"):
        kind = "native"
    else:
        kind = "foreign"
    return Upstream(name, version or "unknown", str(Path(found).parent) if found else "", kind, binary)


def _origin(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec is not None else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _duplicated(names: Iterable[str]) -> tuple[str, ...]:
    seen: dict[str, set[str]] = {name: set() for name in names}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("-", "_")
        if name in seen:
            seen[name].add(distribution.version)
    return tuple(name for name, versions in seen.items() if len(versions) > 1)
