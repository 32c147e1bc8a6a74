"""Unpack a source archive that nobody vouches for.

Everything is looked at before anything is written: names that leave the folder or that some system cannot hold (a wheel made
on one machine is used on another), links, devices, sparse members, and more or larger content than a source archive has.
Members become plain files with default permissions; nothing is executed.
"""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from anymamba.errors import UnsafeArchiveError

__all__ = ["LIMITS", "Limits", "list_zip", "unpack"]


@dataclass(frozen=True)
class Limits:
    """What a source archive may hold. The largest real one has 118 members and 1.5 MiB."""

    members: int = 5_000
    total_bytes: int = 128 << 20
    path_length: int = 200
    depth: int = 16


LIMITS = Limits()

_NEXT_STEP = "get it from elsewhere: pip config set global.index-url ADDRESS, then the same command again"

_RESERVED = re.compile(r"(?i)^(con|prn|aux|nul|conin\$|conout\$|com[0-9¹²³]|lpt[0-9¹²³])(\.|$)")
_FORBIDDEN = re.compile(r'[\x00-\x1f\x7f<>:"|?*\\\ud800-\udfff]')


@dataclass(frozen=True)
class _Member:
    name: str
    size: int
    folder: bool


def unpack(archive: Path, into: Path, limits: Limits = LIMITS) -> Path:
    """Unpack a .tar.gz or .zip source archive and return its single top folder.

    Parameters
    ----------
    archive : Path
    into : Path
        An empty folder; nothing is written outside it.

    Raises
    ------
    UnsafeArchiveError
        Before anything is written.
    """
    with _damage_named(archive):
        if archive.name.endswith(".zip"):
            return _unpack_zip(archive, into, limits)
        return _unpack_tar(archive, into, limits)


def list_zip(archive: Path, limits: Limits = LIMITS) -> list[str]:
    """Return the names of a zip's files (a wheel's, say) after looking at each as `unpack` does.

    Raises
    ------
    UnsafeArchiveError
    """
    with _damage_named(archive), zipfile.ZipFile(archive) as zipped:
        infos = zipped.infolist()
        _check(archive, (_zip_member(archive, info) for info in infos), limits, one_folder=False)
        return [info.filename for info in infos if not info.is_dir()]


@contextmanager
def _damage_named(archive: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, EOFError, UnicodeError, ValueError) as error:
        raise UnsafeArchiveError(
            f"{archive.name} is not a readable archive.", why=str(error), next_step=_NEXT_STEP
        ) from error
    except OSError as error:
        if error.errno is None:  # zlib and gzip raise OSError for damaged data
            raise UnsafeArchiveError(f"{archive.name} is damaged.", why=str(error), next_step=_NEXT_STEP) from error
        raise


def _unpack_tar(archive: Path, into: Path, limits: Limits) -> Path:
    with _open_tar(archive, limits) as tar:
        top = _check(archive, (_tar_member(archive, info) for info in tar), limits)
    with _open_tar(archive, limits) as tar:
        for info in tar:
            if info.isreg():
                content = tar.extractfile(info)
                assert content is not None
                _write(into, info.name, content, info.size)
    return into / top


def _unpack_zip(archive: Path, into: Path, limits: Limits) -> Path:
    with zipfile.ZipFile(archive) as zipped:
        top = _check(archive, (_zip_member(archive, info) for info in zipped.infolist()), limits)
        for info in zipped.infolist():
            if not info.is_dir():
                with zipped.open(info) as content:
                    _write(into, info.filename, content, info.file_size)
    return into / top


def _tar_member(archive: Path, info: tarfile.TarInfo) -> _Member:
    if info.isdir():
        return _Member(info.name, 0, folder=True)
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.issparse():
        kind = {tarfile.SYMTYPE: "symbolic link", tarfile.LNKTYPE: "hard link"}.get(info.type, "device or special file")
        raise _unsafe(archive, info.name, f"it is a {kind}")
    return _Member(info.name, info.size, folder=False)


def _zip_member(archive: Path, info: zipfile.ZipInfo) -> _Member:
    kind = (info.external_attr >> 16) & 0o170000
    if kind not in (0, 0o100000, 0o040000):
        raise _unsafe(archive, info.filename, "it is a link or a device")
    if info.flag_bits & 0x1:
        raise _unsafe(archive, info.filename, "it is encrypted")
    return _Member(info.filename, info.file_size, folder=info.is_dir())


def _check(archive: Path, members: Iterator[_Member], limits: Limits, one_folder: bool = True) -> str:
    tops: set[str] = set()
    files: dict[str, str] = {}
    folders: dict[str, str] = {}
    total = 0
    for count, member in enumerate(members, start=1):
        if count > limits.members:
            raise UnsafeArchiveError(f"{archive.name} has more than {limits.members} members.", next_step=_NEXT_STEP)
        total += member.size
        if member.size < 0 or total > limits.total_bytes:
            raise UnsafeArchiveError(
                f"{archive.name} unpacks to more than {limits.total_bytes} bytes.", next_step=_NEXT_STEP
            )
        parts = _parts(archive, member.name, limits)
        tops.add(parts[0])
        if one_folder and len(parts) == 1 and not member.folder:
            raise _unsafe(archive, member.name, "it lies outside the archive's own folder")
        # Windows and macOS hold one file for names that differ in case only: the second would silently win
        path = "/".join(parts).casefold()
        parents = {"/".join(parts[:depth]).casefold() for depth in range(1, len(parts))}
        folders.update(dict.fromkeys(parents, member.name))
        if member.folder:
            folders[path] = member.name
        elif path in files:
            raise _unsafe(archive, member.name, f"it collides with {files[path]!r}")
        else:
            files[path] = member.name
    if collisions := sorted(files.keys() & folders.keys()):
        raise _unsafe(archive, files[collisions[0]], "a folder has the same name")
    if one_folder and len(tops) != 1:
        raise UnsafeArchiveError(
            f"{archive.name} has {len(tops)} top folders, but a source archive has one.", next_step=_NEXT_STEP
        )
    return tops.pop() if tops else ""


def _parts(archive: Path, name: str, limits: Limits) -> list[str]:
    if _FORBIDDEN.search(name):
        raise _unsafe(archive, name, "it has characters that a file name must not have")
    if name.startswith("/"):
        raise _unsafe(archive, name, "it is absolute")
    if len(name) > limits.path_length:
        raise _unsafe(archive, name[:80] + "...", "its path is too long")
    parts = [part for part in name.rstrip("/").split("/") if part != "."]
    if not parts or len(parts) > limits.depth:
        raise _unsafe(archive, name, "its path is empty or too deep")
    for part in parts:
        if part in ("", ".."):
            raise _unsafe(archive, name, "it leaves its folder")
        if part[-1] in ". ":
            raise _unsafe(archive, name, "a part of it ends in a dot or a space")
        if _RESERVED.match(part):
            raise _unsafe(archive, name, f"{part} is a device's name on Windows")
    return parts


def _write(into: Path, name: str, content: IO[bytes], size: int) -> None:
    target = into.joinpath(*[part for part in PurePosixPath(name).parts if part != "."])
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as file:
        left = size
        while left and (block := content.read(min(left, 1 << 20))):
            file.write(block)
            left -= len(block)
    if left:
        raise EOFError(f"{name} ends {left} bytes early")


class _Bounded(io.RawIOBase):
    """A decompressed stream that refuses to grow past a limit, however small the compressed file is."""

    def __init__(self, stream: io.BufferedIOBase, name: str, limit: int) -> None:
        self._stream, self._name, self._left = stream, name, limit

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        block = self._stream.read(self._left + 1 if size < 0 else min(size, self._left + 1))
        self._left -= len(block)
        if self._left < 0:
            raise UnsafeArchiveError(
                f"{self._name} unpacks to more than is allowed (a decompression bomb?).", next_step=_NEXT_STEP
            )
        return block


@contextmanager
def _open_tar(archive: Path, limits: Limits) -> Iterator[tarfile.TarFile]:
    # A stream ("r|"): read once from front to back, so the bound holds for headers too. Headers and padding get a share.
    bound = limits.total_bytes + limits.members * 2048
    with gzip.open(archive, "rb") as zipped:
        stream = _Bounded(zipped, archive.name, bound)
        with tarfile.open(fileobj=stream, mode="r|", encoding="utf-8", errors="surrogateescape") as tar:
            yield tar


def _unsafe(archive: Path, member: str, why: str) -> UnsafeArchiveError:
    return UnsafeArchiveError(
        f"{archive.name} holds {member.encode('ascii', 'backslashreplace').decode()!r}: {why}.", next_step=_NEXT_STEP
    )
