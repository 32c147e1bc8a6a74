"""What only WSL has: which of its two versions, and whose NVIDIA driver is seen inside."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Wsl", "read_wsl"]


@dataclass(frozen=True)
class Wsl:
    """A Linux inside Windows. `shared_driver`: Windows' driver is mounted; `own_driver`: a Linux one was installed too."""

    version: int
    shared_driver: bool
    own_driver: bool
    linked: bool = True  # libcuda.so.1 is a link, as ldconfig wants it


def read_wsl(*, root: Path = Path("/")) -> Wsl | None:
    """Return the facts, or None outside WSL.

    Parameters
    ----------
    root : Path
        The root of the file system; tests pass a folder.
    """
    if platform.system() != "Linux":
        return None
    try:
        kernel = (root / "proc" / "version").read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return None
    if "microsoft" not in kernel:
        return None
    libraries = [root / "usr" / "lib" / folder / "libcuda.so.1" for folder in ("x86_64-linux-gnu", "aarch64-linux-gnu")]
    mounted = root / "usr" / "lib" / "wsl" / "lib" / "libcuda.so.1"
    return Wsl(
        version=2 if "wsl2" in kernel or "microsoft-standard" in kernel else 1,
        shared_driver=mounted.exists(),
        own_driver=any(library.exists() for library in libraries),
        linked=not mounted.exists() or mounted.is_symlink(),
    )
