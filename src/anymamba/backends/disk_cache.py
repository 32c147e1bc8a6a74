"""Compiled kernels on disk, shared by all processes of a user.

One file an entry, named by the hash of all that went into it (source, headers, options, NVRTC version, architecture); in it
a checksum and the image. Written to a temporary name and moved into place, so a reader sees a whole file or none. Whatever
goes wrong (no home folder, read-only folder, full disk, another process's lock on Windows, a truncated file), the cost is
one more compile, never an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

__all__ = ["DiskCache", "key_of"]

SIZE_BOUND = 256 * 2**20
_MAGIC = b"anymamba kernel 1\n"
_SUFFIX = ".kernel"
Result = TypeVar("Result")


def key_of(parts: Sequence[str]) -> str:
    """Return the name of the entry made from `parts`; unambiguous (every part is preceded by its length)."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()


class DiskCache:
    """Keeps images by key.

    Parameters
    ----------
    directory : Path or None
        None: keeps nothing.
    bound : int
        Bytes; when a write takes the folder over it, the entries used longest ago go.
    """

    def __init__(self, directory: Path | None, bound: int = SIZE_BOUND) -> None:
        self.directory = directory
        self.bound = bound

    def get(self, key: str) -> bytes | None:
        """Return the image, None if there is none or it is damaged (it is removed then)."""
        if self.directory is None:
            return None
        path = self.directory / (key + _SUFFIX)
        data = _retried(path.read_bytes)
        if data is None:
            return None
        head = len(_MAGIC) + hashlib.sha256().digest_size
        image = data[head:]
        if data[:head] != _MAGIC + hashlib.sha256(image).digest():
            _quietly(path.unlink)
            return None
        _quietly(lambda: os.utime(path))  # used now: the last to go
        return image

    def put(self, key: str, image: bytes) -> bool:
        """Keep the image; return whether that worked."""
        if self.directory is None:
            return False
        temporary: Path | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.directory, prefix="writing-", suffix=".tmp")
            temporary = Path(name)
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(image).digest() + image)
        except OSError:
            if temporary is not None:
                _quietly(temporary.unlink)
            return False
        written, target = temporary, self.directory / (key + _SUFFIX)
        done = _retried(lambda: written.replace(target)) is not None
        if not done:  # Windows: another process has the same entry open. It is the same content: drop ours.
            _quietly(written.unlink)
        self._shrink(target)
        return done

    def _shrink(self, newest: Path) -> None:
        assert self.directory is not None
        entries: list[tuple[float, int, Path]] = []
        with contextlib.suppress(OSError):
            for path in self.directory.iterdir():
                with contextlib.suppress(OSError):
                    status = path.stat()
                    if path.suffix == _SUFFIX:
                        entries.append((status.st_mtime, status.st_size, path))
                    elif path.suffix == ".tmp" and status.st_mtime < time.time() - 3600:
                        path.unlink()  # its writer died
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.bound:
                break
            # Where others cannot be removed (Windows: in use), the newest must not go in their place.
            if path != newest and _quietly(path.unlink):
                total -= size


def _retried(action: Callable[[], Result]) -> Result | None:
    """Return what `action()` returns; on a sharing error (Windows) try again for 0.1 s; None if it cannot be done."""
    for pause in (0.0, 0.01, 0.03, 0.06):
        if pause:
            time.sleep(pause)
        try:
            return action()
        except PermissionError:
            continue
        except OSError:
            return None
    return None


def _quietly(action: Callable[[], object]) -> bool:
    try:
        action()
    except OSError:
        return False
    return True
