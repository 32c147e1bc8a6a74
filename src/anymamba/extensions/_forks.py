"""Forks of mamba_ssm without Triton: their kernel modules' names from anymamba.ops.

A project that vendors mamba_ssm (Vim, VideoMamba, SegMamba, ...) is imported from its own folder, not from the port; of ours it
meets only `selective_scan_cuda` and `causal_conv1d_cuda`. Its `ops/triton/layernorm.py` and the like need Triton, which is
not to be had on Windows or for every card, and then its models say "Failed to import Triton LayerNorm". So the module
`selective_scan_cuda`, which every fork imports first, calls `serve_forks`: from then on a module below `mamba_ssm.ops.triton`
that needs Triton is given our functions, but only where there is no Triton. Everything else of the fork stays its own.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["serve_forks"]

_FOLDER = "mamba_ssm.ops.triton."
_NEEDS_TRITON = re.compile(r"^\s*(?:import|from)\s+triton\b", re.MULTILINE)


def serve_forks() -> None:
    """Begin to serve; called again, do nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_FOLDER) or _has_triton():
            return None
        own = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if own is None or own.origin is None or not _needs_triton(Path(own.origin)):
            return None
        from anymamba.upstream.port.families import FAMILIES  # here: only who is served pays for it

        families = FAMILIES.get(fullname.removeprefix("mamba_ssm.ops."))
        if families is None:
            return None
        return importlib.util.spec_from_loader(fullname, _Loader(families), origin=own.origin)


class _Loader(importlib.abc.Loader):
    def __init__(self, families: tuple[str, ...]) -> None:
        self._families = families

    def exec_module(self, module: ModuleType) -> None:
        names: dict[str, Any] = {}
        for family in self._families:
            ours = importlib.import_module(f"anymamba.ops.{family}")
            for name in ours.__all__:
                names.setdefault(name, getattr(ours, name))
        module.__doc__ = f"Served by anymamba, for there is no Triton here; the fork's own: {module.__spec__.origin}"  # type: ignore[union-attr]
        vars(module).update(names)
        module.__all__ = sorted(names)  # type: ignore[attr-defined]


def _has_triton() -> bool:
    if "triton" in sys.modules:
        return sys.modules["triton"] is not None
    try:
        return importlib.util.find_spec("triton") is not None
    except (ImportError, ValueError):
        return False


def _needs_triton(file: Path) -> bool:
    try:
        return _NEEDS_TRITON.search(file.read_text(encoding="utf-8", errors="replace")) is not None
    except OSError:
        return False
