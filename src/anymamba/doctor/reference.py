"""The machine at hand beside the guide's reference environment (`reference.toml`), row by row."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from anymamba.machine import Machine

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["ReferenceRow", "compare", "reference_rows"]


@dataclass(frozen=True)
class ReferenceRow:
    """One row: what the guide wants, what is here (empty: nothing), whether they agree, and whom it matters for."""

    id: str
    title: str
    wanted: str
    seen: str
    agrees: bool
    matters_for: str  # both, native, port, nobody
    note: str


def reference_rows() -> list[dict[str, Any]]:
    """Return the rows of `reference.toml`."""
    text = resources.files("anymamba.doctor").joinpath("reference.toml").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = tomllib.loads(text)["row"]
    return rows


def compare(machine: Machine) -> list[ReferenceRow]:
    """Compare the machine with the reference environment; rows of another system are left out."""
    rows = []
    for row in reference_rows():
        if row["id"] in _WINDOWS_ONLY and machine.system.name != "Windows":
            continue
        seen = _SEEN[row["id"]](machine) or ""
        rows.append(
            ReferenceRow(
                id=row["id"],
                title=row["title"],
                wanted=row["wanted"],
                seen=seen,
                agrees=seen.split("+")[0] == row["wanted"] or seen.startswith(row["wanted"] + "."),
                matters_for=row["matters_for"],
                note=row["note"],
            )
        )
    return rows


_WINDOWS_ONLY = ("conda-nvcc", "visual-studio", "windows-sdk")


def _nvcc(machine: Machine, *, conda: bool) -> str:
    return next((one.version for one in machine.compilers.nvcc if (one.found_by == "conda") == conda), "")


_SEEN: dict[str, Callable[[Machine], str | None]] = {
    "python": lambda machine: machine.python.version,
    "torch": lambda machine: machine.torch.version if machine.torch else None,
    "torchvision": lambda machine: machine.packages.version("torchvision"),
    "torchaudio": lambda machine: machine.packages.version("torchaudio"),
    "torch-cuda": lambda machine: machine.torch.cuda if machine.torch else None,
    "cuda-toolkit": lambda machine: _nvcc(machine, conda=False),
    "conda-nvcc": lambda machine: _nvcc(machine, conda=True),
    "visual-studio": lambda machine: next(
        (one.version for one in machine.compilers.visual_studio if one.toolsets), None
    ),
    "windows-sdk": lambda machine: next(iter(machine.compilers.windows_sdk), None),
}
