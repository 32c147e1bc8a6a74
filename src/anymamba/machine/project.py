"""What the code in the working folder wants of mamba_ssm: the modules it imports, and whether it brings a fork of its own.

Vim, VideoMamba, SegMamba and others carry a changed `mamba_ssm` in a folder of theirs, and VMamba's relatives import scan
modules of their own. The sources are read, never run, and only so many of them: a home folder is no project.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["EXTENSIONS", "Project", "read_project"]

EXTENSIONS = (
    "selective_scan_cuda",
    "selective_scan_cuda_oflex",
    "selective_scan_cuda_core",
    "selective_scan_cuda_ndrows",
    "selective_scan_cuda_nrow",
    "selective_scan_cuda_ndstate",
    "causal_conv1d_cuda",
)

_NAMES = "|".join(EXTENSIONS)
_IMPORT = re.compile(rf"^\s*(?:import|from)\s+({_NAMES})\b|\b({_NAMES})\.(?:fwd|bwd)\(", re.MULTILINE)
# what upstream's own package never had under these names
_FORK = re.compile(
    r"\b(bimamba_type|bimamba_inner_fn|mamba_inner_fn_no_out_proj|if_devide_out|if_divide_out|"
    r"mamba_ssm\.ops\.triton\.layernorm(?=\s+import))\b"
)
_SKIP = {
    ".git",
    ".hg",
    ".venv",
    "venv",
    "env",
    "node_modules",
    "build",
    "dist",
    "site-packages",
    "__pycache__",
    "data",
    "tests",
    "anymamba",  # a checkout of this product names them all
}
_FILES, _DEPTH, _BYTES = 1000, 5, 1_000_000


@dataclass(frozen=True)
class Project:
    """The working folder. Paths are relative to it where they lie inside.

    `imports`: extension modules, each with the first file that imports it. `fork`: names that only forks of mamba_ssm have,
    each with a file that uses one. `vendored`: folders that hold a mamba_ssm. `imported`: the mamba_ssm that Python would
    import here; `imported_is_fork`: it defines such a name. `missing`: imported extension modules that are not installed.
    """

    folder: str
    imports: tuple[tuple[str, str], ...] = ()
    fork: tuple[tuple[str, str], ...] = ()
    vendored: tuple[str, ...] = ()
    imported: str = ""
    imported_is_fork: bool = False
    missing: tuple[str, ...] = ()


def read_project(folder: Path | None = None, *, locate: Callable[[str], str | None] | None = None) -> Project | None:
    """Read the sources below a folder (the working folder); None where it is gone or there is no Python in it.

    Parameters
    ----------
    folder : Path, optional
    locate : callable, optional
        Returns the file that `import NAME` takes from the environment; tests pass their own.
    """
    try:
        folder = folder or Path.cwd()
        files = list(_sources(folder))
    except OSError:  # deleted under us
        return None
    if not files:
        return None
    imports: dict[str, str] = {}
    fork: dict[str, str] = {}
    vendored: list[str] = []
    for file in files:
        shown = file.relative_to(folder).as_posix()
        if file.name == "__init__.py" and file.parent.name == "mamba_ssm":
            vendored.append(Path(shown).parent.as_posix())
        text = _read(file)
        for match in _IMPORT.finditer(text):
            imports.setdefault(match.group(1) or match.group(2), shown)
        if "/mamba_ssm/" not in f"/{shown}":  # who uses the name, not who defines it
            for match in _FORK.finditer(text):
                fork.setdefault(match.group(1), shown)
    find = locate or _locate
    here = folder / "mamba_ssm" / "__init__.py"
    imported = str(here) if here.is_file() else find("mamba_ssm") or ""
    return Project(
        folder=str(folder),
        imports=tuple(imports.items()),
        fork=tuple(fork.items()),
        vendored=tuple(vendored),
        imported=imported,
        imported_is_fork=bool(imported) and _is_fork(Path(imported).parent),
        missing=tuple(name for name in imports if find(name) is None),
    )


def _is_fork(package: Path) -> bool:
    return any(
        _FORK.search(_read(package / part))
        for part in ("modules/mamba_simple.py", "ops/selective_scan_interface.py", "models/mixer_seq_simple.py")
    )


def _sources(folder: Path) -> Iterator[Path]:
    # nearest first: what decides stands near the top, and there is a limit
    left, level = _FILES, [folder]
    for _ in range(_DEPTH):
        below: list[Path] = []
        for place in level:
            try:
                entries = sorted(os.scandir(place), key=lambda entry: entry.name)
            except OSError:  # not ours to read
                continue
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in _SKIP and not entry.name.startswith("."):
                        below.append(place / entry.name)
                elif entry.name.endswith((".py", ".ipynb")):
                    yield place / entry.name
                    left -= 1
                    if left == 0:
                        return
        level = below


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > _BYTES:
            return ""
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _locate(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec is not None else None
