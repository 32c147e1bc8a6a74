"""Another machine, as far as choosing wheels for it needs: pip's platform tags and the values of environment markers."""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import dataclass

from packaging.markers import default_environment

from anymamba.errors import OptionError

__all__ = ["PLATFORMS", "Target"]

# pip's tags, newest first (it takes older macOS tags by itself); then os_name, sys_platform, platform_system, platform_machine.
PLATFORMS: dict[str, tuple[tuple[str, ...], tuple[str, str, str, str]]] = {
    "windows": (("win_amd64",), ("nt", "win32", "Windows", "AMD64")),
    "linux": (
        ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"),
        ("posix", "linux", "Linux", "x86_64"),
    ),
    "linux-arm": (
        ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"),
        ("posix", "linux", "Linux", "aarch64"),
    ),
    "macos": (("macosx_14_0_arm64",), ("posix", "darwin", "Darwin", "arm64")),
}


@dataclass(frozen=True)
class Target:
    """The machine that wheels are for; None in both: this one.

    Attributes
    ----------
    platform : str or None
        A key of `PLATFORMS`.
    python_version : str or None
        Such as ``3.11``.
    """

    platform: str | None = None
    python_version: str | None = None

    def __post_init__(self) -> None:
        """Refuse what is not known.

        Raises
        ------
        OptionError
        """
        if self.platform is not None and self.platform not in PLATFORMS:
            raise OptionError(
                f"{self.platform!r} is not a platform.", next_step=f"--platform {'|'.join(PLATFORMS)}, or leave it out"
            )
        if self.python_version is not None and not re.fullmatch(r"3\.\d{1,2}", self.python_version):
            raise OptionError(
                f"{self.python_version!r} is not a version of Python.",
                next_step="--python-version 3.11, or leave it out",
            )

    @property
    def pip_options(self) -> list[str]:
        """Return what `pip download` needs to choose for this machine."""
        if self.platform is None and self.python_version is None:
            return []
        tags = PLATFORMS[self._platform][0]
        python = self.python_version or "{}.{}".format(*sys.version_info)
        options = [option for tag in tags for option in ("--platform", tag)]
        return [*options, "--python-version", python, "--implementation", "cp"]

    @property
    def markers(self) -> dict[str, str]:
        """Return the values that `; sys_platform == "win32"` and its like have there: pip itself knows only this machine's."""
        values = {name: str(value) for name, value in default_environment().items()}
        if self.platform is not None:
            os_name, sys_platform, system, machine = PLATFORMS[self.platform][1]
            values["os_name"], values["sys_platform"] = os_name, sys_platform
            values["platform_system"], values["platform_machine"] = system, machine
            values["platform_release"] = values["platform_version"] = ""
        if self.python_version is not None:
            values["python_version"], values["python_full_version"] = self.python_version, f"{self.python_version}.0"
        return values

    @property
    def _platform(self) -> str:
        if self.platform is not None:
            return self.platform
        system, arm = platform.system(), platform.machine().lower() in ("arm64", "aarch64")
        return {"Windows": "windows", "Darwin": "macos"}.get(system, "linux-arm" if arm else "linux")
