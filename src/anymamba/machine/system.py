"""The operating system, the processor and the memory."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["System", "processor_name", "read_system"]


@dataclass(frozen=True)
class System:
    """What this machine runs. `name` is platform.system()'s: Windows, Linux or Darwin."""

    name: str
    release: str
    processor: str  # x86_64, AMD64, arm64
    cores: int  # that this process may use
    memory_gb: float
    libc: str = ""  # "glibc 2.36"; empty where it has no meaning
    wsl: bool = False
    language: str = ""  # "zh_CN": what messages of localised tools come in


def read_system(*, environ: Mapping[str, str] = os.environ) -> System:
    """Read the operating system, processor and memory."""
    name = platform.system()
    return System(
        name=name,
        release=platform.release(),
        processor=platform.machine(),
        cores=_cores(),
        memory_gb=round(_memory() / 2**30, 1),
        libc=" ".join(part for part in platform.libc_ver() if part) if name == "Linux" else "",
        wsl=name == "Linux" and _is_wsl(),
        language=system_language(environ),
    )


def processor_name() -> str:
    """Return the processor's name as its maker calls it, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def system_language(environ: Mapping[str, str] = os.environ) -> str:
    """Return the language people read here, as `zh_CN`; empty when the system does not say.

    The usual variables first (they are a wish), then the language of Windows' own menus.
    """
    for variable in ("LC_ALL", "LC_MESSAGES", "LANGUAGE", "LANG"):
        value = environ.get(variable, "").split(":")[0].split(".")[0].replace("-", "_")
        if value and value not in ("C", "POSIX"):
            return value
    return _windows_language()


def _windows_language() -> str:
    try:
        import ctypes
        import locale

        number = ctypes.windll.kernel32.GetUserDefaultUILanguage()  # type: ignore[attr-defined,unused-ignore]
        return locale.windows_locale.get(number, "")
    except (ImportError, AttributeError, OSError):
        return ""


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else (os.cpu_count() or 1)


def _memory() -> int:
    try:
        import psutil  # type: ignore[import-untyped,unused-ignore]

        return int(psutil.virtual_memory().total)
    except Exception:  # a broken psutil must not stop the doctor; 0 means unknown
        return 0


def _is_wsl() -> bool:
    try:
        return "microsoft" in Path("/proc/version").read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return False
