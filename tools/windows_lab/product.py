"""The product of this checkout in a Windows Python: what its processes get, and its installation."""

from __future__ import annotations

import os
from pathlib import Path

from tools.windows_lab import runner
from tools.windows_lab.layout import REPOSITORY
from tools.windows_lab.wine import Wine, windows_path, windows_uri

NVRTC_VARIABLE = "ANYMAMBA_LAB_NVRTC"  # a folder with one folder of DLLs a version; tests/windows reads it


def environment(found: Wine, version: str, repository: Path = REPOSITORY) -> dict[str, str]:
    """What a Windows Python of the laboratory gets: wine's environment, offline pip, and where NVRTC lies."""
    layout = found.layout
    home = f"C:\\python{version.replace('.', '')}"
    return found.environment(
        {
            "WINEPATH": f"{home};{home}\\Scripts",
            "PYTHONPATH": windows_path(repository / "src"),
            # Nothing under wine reaches a network; pip finds every package of the laboratory here, also in a venv, and
            # `anymamba install`, which follows pip's settings, finds upstream's archives.
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": f"{windows_uri(layout.wheels / version)} {windows_uri(layout.upstream)}",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            NVRTC_VARIABLE: windows_path(layout.nvrtc),
            # Fewer examples than on the machine beside it: what differs on Windows shows in the first few.
            "HYPOTHESIS_PROFILE": os.environ.get("HYPOTHESIS_PROFILE", "brief"),
        }
    )


def install(found: Wine, version: str, repository: Path = REPOSITORY) -> None:
    """Install the working tree into the Windows Python, editable, with its metadata and `anymamba.exe`."""
    runner.check(
        found.command(
            found.layout.python(version) / "python.exe",
            *("-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-warn-script-location"),
            *("--editable", windows_path(repository)),
        ),
        f"installing the product into Windows Python {version}",
        environment=environment(found, version, repository),
        timeout=180,
    )
