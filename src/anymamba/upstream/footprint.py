"""Which files and folders of an environment belong to a package, however it came there.

The unit of backing up and restoring: whatever was installed (a wheel, an editable install, a folder copied by hand, an older
compiled extension) is a set of entries of site-packages plus the few files that a RECORD lists elsewhere.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from pathlib import Path

from packaging.utils import canonicalize_name

from anymamba.upstream.port.families import EXTENSIONS

__all__ = ["footprint"]

_DIST_INFO = re.compile(r"^(?P<name>.+?)-(?P<version>[^-]+)(-py[\d.]+)?\.(dist-info|egg-info)$")
_EDITABLE = re.compile(r"^__editable__[._]+(?P<rest>.+)$")


def footprint(name: str, roots: Iterable[str]) -> list[Path]:
    """Return what belongs to a package: entries of site-packages folders, and files that its RECORD lists outside them.

    Parameters
    ----------
    name : str
        ``mamba_ssm``, ``causal_conv1d``, or another distribution of `EXTENSIONS`.
    roots : iterable of str
        purelib and platlib.
    """
    found: list[Path] = []
    for root in dict.fromkeys(Path(root) for root in roots):
        if not root.is_dir():
            continue
        entries = [*root.iterdir(), *((root / "__pycache__").iterdir() if (root / "__pycache__").is_dir() else ())]
        mine = [entry for entry in sorted(entries) if _belongs(entry, name)]
        found += mine
        for entry in mine:
            if entry.name.endswith(".dist-info"):
                found += _outside(entry, root)
    return list(dict.fromkeys(found))


def _belongs(entry: Path, name: str) -> bool:
    if match := _DIST_INFO.match(entry.name):
        return canonicalize_name(match["name"]) == canonicalize_name(name)
    if match := _EDITABLE.match(entry.name):
        # __editable__.mamba_ssm-2.2.2.pth, __editable___mamba_ssm_2_2_2_finder.py
        return re.match(rf"{name}[-_.]\d", match["rest"].replace("-", "_")) is not None
    # a leftover of pip's own interrupted removal begins with "~" and is nobody's
    return entry.name.partition(".")[0] in (name, *EXTENSIONS[name])


def _outside(dist_info: Path, root: Path) -> list[Path]:
    """Return the files that a RECORD lists elsewhere, such as scripts."""
    record = dist_info / "RECORD"
    if not record.is_file():
        return []
    with record.open(encoding="utf-8", errors="replace", newline="") as file:
        names = [row[0] for row in csv.reader(file) if row]
    outside = [(root / name).resolve() for name in names if name.startswith("..") or Path(name).is_absolute()]
    return [path for path in outside if path.is_file()]
