"""Triton, by whatever name it was installed (`triton-windows` is another project's build for Windows)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

__all__ = ["Triton", "read_triton"]


@dataclass(frozen=True)
class Triton:
    """An installed Triton."""

    distribution: str  # triton, triton-windows, pytorch-triton, ...
    version: str


def read_triton() -> Triton | None:
    """Return the installed Triton, or None; it is not imported."""
    for name in ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu"):
        try:
            return Triton(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return None
