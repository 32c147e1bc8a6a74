"""What only Windows has: long paths, code pages, developer mode."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

__all__ = ["Windows", "read_windows"]


@dataclass(frozen=True)
class Windows:
    """Settings of Windows that builds and consoles stumble over."""

    version: str  # "10.0.22631"
    long_paths: bool | None  # None: could not be read
    ansi_code_page: int  # what compilers speak into a pipe
    oem_code_page: int  # what a console shows


def read_windows() -> Windows | None:
    """Return the settings, or None on another system."""
    if platform.system() != "Windows":
        return None
    import ctypes

    kernel: Any = getattr(ctypes, "windll").kernel32  # noqa: B009  (mypy looks from Linux)
    return Windows(
        version=platform.version(),
        long_paths=_long_paths(),
        ansi_code_page=int(kernel.GetACP()),
        oem_code_page=int(kernel.GetOEMCP()),
    )


def _long_paths() -> bool | None:
    import winreg as registry_module

    registry: Any = registry_module
    try:
        with registry.OpenKey(registry.HKEY_LOCAL_MACHINE, r"SYSTEM\CurrentControlSet\Control\FileSystem") as key:
            return bool(registry.QueryValueEx(key, "LongPathsEnabled")[0])
    except FileNotFoundError:
        return False  # the value is absent until someone sets it
    except OSError:
        return None
