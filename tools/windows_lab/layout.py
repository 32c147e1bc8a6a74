"""Where the laboratory lies. Nothing of it is inside the repository, and one folder removed removes all of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
FOLDER_VARIABLE = "ANYMAMBA_WINDOWS_LAB"


@dataclass(frozen=True)
class Layout:
    """The folders of one laboratory."""

    root: Path

    @property
    def prefix(self) -> Path:
        """Wine's own folder: registry and the C: drive."""
        return self.root / "prefix"

    @property
    def drive_c(self) -> Path:
        return self.prefix / "drive_c"

    @property
    def wheels(self) -> Path:
        """Downloaded wheels, one folder an interpreter; kept, so that a second setup needs no network."""
        return self.root / "wheels"

    @property
    def nvrtc(self) -> Path:
        """NVRTC for Windows, one folder a version, DLLs side by side as in torch's own `lib` folder."""
        return self.root / "nvrtc"

    @property
    def upstream(self) -> Path:
        """The source archives that `anymamba install` takes."""
        return self.root / "upstream"

    @property
    def results(self) -> Path:
        """Result files and logs of the last test run."""
        return self.root / "results"

    @property
    def stamps(self) -> Path:
        """One small file a finished step, holding what the step depended on."""
        return self.root / "stamps"

    def python(self, version: str) -> Path:
        """The folder of a Windows Python on the C: drive, by its version such as `3.10`."""
        return self.drive_c / f"python{version.replace('.', '')}"


def default_root(environment: dict[str, str] | None = None) -> Path:
    """The laboratory's folder: $ANYMAMBA_WINDOWS_LAB, else the user's cache folder."""
    given = dict(os.environ) if environment is None else environment
    if named := given.get(FOLDER_VARIABLE):
        return Path(named).expanduser().resolve()
    cache = given.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "anymamba" / "windows_lab"
