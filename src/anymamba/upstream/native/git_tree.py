"""The id that git gives a folder, computed from its files: the same whoever carried them, clone, archive or memory stick."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

__all__ = ["tree_id"]


def tree_id(folder: Path, executable: Collection[str] = (), submodules: Mapping[str, str] | None = None) -> str:
    """Return git's id (sha1) of a folder's content.

    Parameters
    ----------
    folder : Path
        `.git` in it does not count, nor do empty folders.
    executable : collection of str
        The files of mode 755, as paths below `folder` (Windows and zip archives do not keep modes).
    submodules : mapping, optional
        Path and commit of other repositories, which an archive leaves out.
    """
    links: dict[str, str] = dict(submodules or {})
    found = _tree(folder, "", frozenset(executable), links)
    return (found or _object(b"tree", b"")).hex()


def _tree(folder: Path, prefix: str, executable: frozenset[str], links: dict[str, str]) -> bytes | None:
    entries: list[tuple[bytes, bytes]] = []  # sort key and content
    for path in folder.iterdir():
        name, below = path.name.encode(), prefix + path.name
        if below == ".git" or below in links:
            continue
        if path.is_dir():
            identity = _tree(path, f"{below}/", executable, links)
            if identity is not None:
                entries.append((name + b"/", b"40000 " + name + b"\0" + identity))
        else:
            mode = b"100755 " if below in executable else b"100644 "
            entries.append((name, mode + name + b"\0" + _object(b"blob", path.read_bytes())))
    for below, commit in links.items():
        parent, _, leaf = below.rpartition("/")
        if (f"{parent}/" if parent else "") == prefix:
            name = leaf.encode()
            entries.append((name, b"160000 " + name + b"\0" + bytes.fromhex(commit)))
    # a folder that holds nothing but a submodule exists in git though no file of it may have come along
    for below in links:
        if below.startswith(prefix) and "/" in (rest := below[len(prefix) :]):
            top = rest.partition("/")[0]
            if not (folder / top).is_dir():
                identity = _links_only(f"{prefix}{top}/", links)
                entries.append((top.encode() + b"/", b"40000 " + top.encode() + b"\0" + identity))
    return _object(b"tree", b"".join(content for _, content in sorted(entries))) if entries else None


def _links_only(prefix: str, links: Mapping[str, str]) -> bytes:
    leaves = sorted((below[len(prefix) :], commit) for below, commit in links.items() if below.startswith(prefix))
    return _object(b"tree", b"".join(b"160000 " + leaf.encode() + b"\0" + bytes.fromhex(oid) for leaf, oid in leaves))


def _object(kind: bytes, content: bytes) -> bytes:
    return hashlib.sha1(kind + b" " + str(len(content)).encode() + b"\0" + content, usedforsecurity=False).digest()
