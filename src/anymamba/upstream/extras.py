"""Wheels of extension modules alone, for projects that compile their own: `anymamba install --with NAME`.

vmamba  VMamba's scan modules, which its repository builds from `kernels/selective_scan` (so do Mamba-YOLO and others), under
        the name that its setup.py gives them, so that pip and backups treat them as what they replace
fork    selective_scan_cuda, for a fork of mamba_ssm that is itself installed under that name (Vim, VideoMamba, SegMamba):
        the port would take the fork's place. With the port of causal_conv1d, of which nobody needs a fork.

Nothing is fetched for the modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from anymamba import __version__
from anymamba.errors import OptionError
from anymamba.upstream.port.build import Port, port_version, write_extensions
from anymamba.upstream.wheel import pack

__all__ = ["EXTRAS", "Extra", "build_extra", "find_extra"]


@dataclass(frozen=True)
class Extra:
    """A set of modules that `--with` brings.

    Attributes
    ----------
    name : str
        The distribution.
    version : str
        Of the project's own modules.
    summary : str
    instead : str or None
        The port that brings these modules too: one or the other.
    """

    name: str
    version: str
    summary: str
    instead: str | None = None


EXTRAS = {
    "vmamba": Extra("selective_scan", "0.0.2", "VMamba's selective_scan_cuda_* modules over anymamba.ops"),
    "fork": Extra(
        "anymamba_extensions",
        __version__,
        "selective_scan_cuda over anymamba.ops, for a fork of mamba_ssm",
        "mamba_ssm",
    ),
}


def find_extra(word: str) -> Extra:
    """Return what `--with word` means.

    Raises
    ------
    OptionError
    """
    found = EXTRAS.get(word)
    if found is None:
        raise OptionError(
            f"There is nothing named {word!r} to install with.",
            why=f"there are: {', '.join(EXTRAS)}",
            next_step="anymamba install --with vmamba",
        )
    return found


def build_extra(name: str, into: Path) -> Path:
    """Write the wheel of a distribution of `EXTRAS` into an existing folder and return its path."""
    extra = next(extra for extra in EXTRAS.values() if extra.name == name)
    modules = into / "modules"
    modules.mkdir()
    port = Port(modules, tuple(write_extensions(name, modules)))
    metadata = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {port_version(extra.version)}\nSummary: {extra.summary}\n"
        f"License: Apache-2.0\nRequires-Dist: torch\nRequires-Dist: anymamba>={__version__}\n\n{extra.summary}\n"
    )
    return pack(port, name, extra.version, {"METADATA": metadata.encode()}, None, into)
