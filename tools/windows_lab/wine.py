"""Wine: found or installed, started, and told what Windows programs need.

Every setting here is the cure of a failure that was seen; docs/windows.md lists them with their symptoms.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.windows_lab import runner
from tools.windows_lab.layout import Layout

PACKAGES = ("wine", "wine64", "libwine")
_DEBIAN_LOADER = Path("/usr/lib/wine/wine64")  # the `wine` script in front of it only adds advice about 32 bits
_DEBIAN_SERVER = Path("/usr/lib/wine/wineserver")

# What of this machine's environment a Windows process may see. Everything else stays out, so that a run in the
# laboratory depends on the laboratory alone; HOME, which wine needs for itself, does not reach the Windows side.
_KEPT = ("HOME", "PATH", "LANG", "TMPDIR", "CI", "HYPOTHESIS_PROFILE")

_NATIVE_CRT = "msvcp140,msvcp140_1,msvcp140_2,msvcp140_atomic_wait,vcruntime140,vcruntime140_1,concrt140,vcomp140"


class WineMissingError(Exception):
    """Wine is not here and could not be installed; the text is one plain line that says why."""


@dataclass(frozen=True)
class Wine:
    """A wine installation and the prefix it works in."""

    loader: Path
    server: Path
    layout: Layout

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a Windows process in the laboratory."""
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        return {
            **kept,
            "WINEPREFIX": str(self.layout.prefix),
            "WINELOADER": str(self.loader),
            "WINESERVER": str(self.server),
            "WINEDEBUG": "-all",
            # Microsoft's C++ runtime before wine's (torch aborts in autograd otherwise); no wbemprox, whose absence
            # makes `platform` fall back instead of aborting (Python >= 3.12); no .NET and browser installers.
            "WINEDLLOVERRIDES": f"{_NATIVE_CRT}=n,b;wbemprox=;mscoree=;mshtml=;winemenubuilder.exe=",
            "KMP_AFFINITY": "disabled",  # torch >= 2.13: "OMP: Error" otherwise
            "PYTHONPYCACHEPREFIX": "C:\\pycache",  # the working tree stays as it is
            "PYTHONUNBUFFERED": "1",
            **(extra or {}),
        }

    def command(self, program: str | Path, *arguments: str) -> list[str]:
        """The command line that runs a Windows program."""
        return [str(self.loader), str(program), *arguments]

    def start_server(self) -> None:
        """Start wine's server with stdio of its own, so that it holds nobody's pipe open, and keep it for a minute."""
        subprocess.run(
            [str(self.server), "--persistent=60"],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )

    @contextlib.contextmanager
    def desktop(self, python: Path) -> Iterator[None]:
        """Keep wine's desktop process running: a program that has to start it gives it its own parent's pipes.

        That parent then waits for ever for the end of its child's output (`venv.create` does, in Python 3.12). The
        desktop ends with the last program, so one is kept that does nothing.
        """
        script = "import ctypes, time; ctypes.windll.user32.GetDesktopWindow(); print(flush=True); time.sleep(1e6)"
        with subprocess.Popen(
            self.command(python, "-c", script),
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                yield
            finally:
                process.kill()

    def stop_server(self) -> None:
        """End every process of this prefix."""
        if self.layout.prefix.exists():
            subprocess.run(
                [str(self.server), "--kill"],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            )
            time.sleep(0.2)

    def version(self) -> str:
        return runner.check([str(self.loader), "--version"], "asking wine its version", timeout=60).output.strip()


def windows_path(path: Path) -> str:
    r"""The name of a file of this machine for a Windows program: `/a/b` is `Z:\a\b`."""
    return "Z:" + str(path.resolve()).replace("/", "\\")


def windows_uri(path: Path) -> str:
    """The same as an address, for lists in which a space divides."""
    return "file:///Z:" + urllib.parse.quote(str(path.resolve()))


def find(layout: Layout) -> Wine | None:
    """Wine as it is installed here, or None."""
    loader = _DEBIAN_LOADER if _DEBIAN_LOADER.exists() else _which("wine64") or _which("wine")
    server = _DEBIAN_SERVER if _DEBIAN_SERVER.exists() else _which("wineserver")
    return Wine(loader, server, layout) if loader and server else None


def find_or_install(layout: Layout) -> Wine:
    """Wine, installed by the system's package manager when it is missing; WineMissingError with one line otherwise."""
    if platform.system() != "Linux" or platform.machine() not in {"x86_64", "AMD64"}:
        raise WineMissingError(
            f"the laboratory needs Linux on x86-64; this is {platform.system()} on {platform.machine()}"
        )
    if found := find(layout):
        return found
    apt = _which("apt-get")
    if apt is None:
        raise WineMissingError(
            "wine is not installed and there is no apt-get here; install wine by hand and call again"
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    runner.run([str(apt), "update", "-qq"], environment=environment, timeout=180)
    outcome = runner.run(
        [str(apt), "install", "-y", "-qq", "--no-install-recommends", *PACKAGES], environment=environment, timeout=300
    )
    if found := find(layout):
        return found
    said = [line for line in outcome.output.splitlines() if line.strip()]
    raise WineMissingError(f"wine cannot be installed here: {said[-1] if said else 'apt-get said nothing'}")


def _which(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found else None
