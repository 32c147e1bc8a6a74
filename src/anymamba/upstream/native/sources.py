"""Upstream's C++ and CUDA sources of a release, from where they can be had, and proof that they are those.

The source archive on the package index, where it holds csrc/; else the release's git tag, whose tree id is computed anew and
compared with the one that this product knows; or what the user has (`given`). What was fetched is kept in the cache.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from anymamba.errors import IntegrityError, NoSuchReleaseError, OfflineError, OptionError, SourceError
from anymamba.machine.folders import cache_folder
from anymamba.upstream.archive import unpack
from anymamba.upstream.cache import cached_source, cached_versions, sha256_of
from anymamba.upstream.index import Index
from anymamba.upstream.native.git_tree import tree_id
from anymamba.upstream.native.tags import Tag, nearest, pinned, repository, sdist_has_sources, tag_name
from anymamba.upstream.pip_settings import read_pip_settings
from anymamba.upstream.progress import Progress, Silent
from anymamba.upstream.releases import known
from anymamba.upstream.wheel import check_identity

__all__ = ["MIRROR_VARIABLE", "Sources", "SourcesOutOfReachError", "get_sources", "mirrored"]

MIRROR_VARIABLE = "ANYMAMBA_GITHUB_MIRROR"
_GIT_SECONDS = 300
_LARGEST_ARCHIVE = 64 << 20


class SourcesOutOfReachError(SourceError):
    """The release's sources are only in git, and git's server could not be reached; offers the nearest archive."""


@dataclass(frozen=True)
class Sources:
    """A release's sources, unpacked.

    Attributes
    ----------
    folder : Path
    name, version : str
    origin : str
        Where they come from, in words.
    identity : mapping
        The same for the wheel's provenance: file and sha256, or repository, tag and tree, or tree alone.
    proved : bool
        Whether they are what this product, or the index, says they must be.
    """

    folder: Path
    name: str
    version: str
    origin: str
    identity: Mapping[str, str]
    proved: bool


def get_sources(
    name: str,
    version: str,
    into: Path,
    *,
    python: Path,
    given: Path | None = None,
    mirror: str | None = None,
    offline: bool = False,
    index: Index | None = None,
    progress: Progress | None = None,
) -> Sources:
    """Put the sources of a release into a new folder.

    Parameters
    ----------
    name, version : str
    into : Path
        Must not exist, or be empty.
    python : Path
        Whose pip settings reach the index.
    given : Path, optional
        A folder, .tar.gz or .zip that holds the sources: nothing is fetched.
    mirror : str, optional
        Put before GitHub's address (``https://mirror.example/``), or the whole address with ``{path}`` for owner/name.
        Default: the variable ANYMAMBA_GITHUB_MIRROR.
    offline : bool
        Use the cache only.

    Raises
    ------
    SourcesOutOfReachError
        With the nearest release that needs no git, and where it differs.
    SourceError, IntegrityError, OptionError
    """
    progress = progress or Silent()
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise OptionError(f"{into} is there already.", next_step="another folder with --dir, or remove it")
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="anymamba-", dir=into.parent, ignore_cleanup_errors=True) as staging:
        if given is not None:
            found = _given(name, version, given, Path(staging))
        elif sdist_has_sources(name, version):
            found = _from_index(name, version, Path(staging), python, offline, index, progress)
        else:
            found = _from_git(name, version, Path(staging), mirror, offline, progress)
        if not (found.folder / "csrc").is_dir():
            raise SourceError(
                f"{found.origin} holds no csrc/ folder: these are not the C++ and CUDA sources of {name}.",
                next_step=f"anymamba source {name}=={version}",
            )
        if into.exists():
            into.rmdir()
        found.folder.replace(into)
    return Sources(into, name, version, found.origin, found.identity, found.proved)


# --- what the user has


def _given(name: str, version: str, given: Path, staging: Path) -> Sources:
    if given.is_dir():
        folder = staging / "source"
        shutil.copytree(given, folder, ignore=shutil.ignore_patterns(".git", "__pycache__", "build", "*.egg-info"))
        origin, identity = f"the folder {given}", {"kind": "folder"}
    elif given.is_file():
        (staging / "archive").mkdir()
        folder = unpack(given, staging / "archive")
        origin, identity = (
            f"the archive {given.name}",
            {"kind": "archive", "file": given.name, "sha256": sha256_of(given)},
        )
    else:
        raise OptionError(f"There is neither a folder nor a file {given}.", next_step="--source FOLDER or ARCHIVE")
    known_tag = pinned(name, version)
    actual = _tree(folder, known_tag)
    proved = known_tag is not None and actual == known_tag.tree
    if not proved and known_tag is not None:
        proved = (folder / "csrc").is_dir() and _csrc(folder, known_tag) == known_tag.csrc
    words = "the same as upstream's tag" if proved else "not compared with upstream's tag"
    return Sources(folder, name, version, f"{origin} ({words})", {**identity, "tree": actual}, proved)


# --- the package index


def _from_index(
    name: str, version: str, staging: Path, python: Path, offline: bool, index: Index | None, progress: Progress
) -> Sources:
    release = known(name, version)
    archive = cached_source(release.sha256, release.file) if release is not None else cached_versions(name).get(version)
    if archive is None:
        if offline:
            raise OfflineError(
                f"The source archive of {name} {version} is not in the cache, and may not be fetched.",
                next_step="the same command without --offline",
            )
        asked = index or Index(read_pip_settings(python))
        try:
            found = next((one for one in asked.find(name) if Version(one.version) == Version(version)), None)
            if found is None:
                raise NoSuchReleaseError(
                    f"There is no source archive of {name} {version}.",
                    next_step=f"anymamba source {name}=={asked.find(name)[0].version}",
                )
            progress.step(f"Downloading {found.file}")
            archive = asked.download(found, release.sha256 if release is not None else found.sha256, progress)
        finally:
            if index is None:
                asked.__exit__()
    (staging / "archive").mkdir()
    folder = unpack(archive, staging / "archive")
    check_identity(folder, name, version)
    identity = {"kind": "sdist", "file": archive.name, "sha256": archive.parent.name}
    return Sources(folder, name, version, f"{archive.name} of the package index", identity, proved=True)


# --- git


def mirrored(name: str, mirror: str | None) -> str:
    """Return the repository's address, by way of a mirror if there is one."""
    address = repository(name)
    mirror = os.environ.get(MIRROR_VARIABLE, "") if mirror is None else mirror
    if "{path}" in mirror:
        return mirror.replace("{path}", address.partition("github.com/")[2])
    return f"{mirror.rstrip('/')}/{address}" if mirror else address


def _from_git(name: str, version: str, staging: Path, mirror: str | None, offline: bool, progress: Progress) -> Sources:
    known_tag, tag, address = pinned(name, version), tag_name(name, version), mirrored(name, mirror)
    kept = None if known_tag is None else cache_folder() / "git" / known_tag.tree
    folder = staging / "source"
    where = f"git tag {tag} of {repository(name)}"
    if kept is not None and kept.is_dir() and _tree(kept, known_tag) == kept.name:
        shutil.copytree(kept, folder)
        return _proved(name, version, folder, f"{where} (kept in the cache)", known_tag, kept.name)
    if offline:
        raise _out_of_reach(name, version, "The cache does not have them, and nothing may be fetched (--offline).")
    progress.step(f"Fetching {where}")
    failures: list[str] = []
    for fetch in (_clone, _download_archive):
        try:
            fetch(address, tag, folder)
        except _FetchError as error:
            failures.append(str(error))
            shutil.rmtree(folder, ignore_errors=True)
            continue
        actual = _tree(folder, known_tag)
        if known_tag is not None and actual != known_tag.tree:
            raise IntegrityError(
                f"What {address} gives as {tag} has the tree {actual}, but must have {known_tag.tree}.",
                why="The mirror is broken or was tampered with, or somebody moved the tag. Nothing of it was used.",
                next_step=f"another mirror: --mirror PREFIX, or {nearest(name, version).version} from the package index",
            )
        if kept is not None:
            _keep(folder, kept)
        return _proved(name, version, folder, where, known_tag, actual)
    raise _out_of_reach(name, version, "; ".join(failures))


def _proved(name: str, version: str, folder: Path, where: str, known_tag: Tag | None, tree: str) -> Sources:
    identity = {"kind": "git", "repository": repository(name), "tag": tag_name(name, version), "tree": tree}
    words = "tree id as it must be" if known_tag is not None else "this product does not know what its tree must be"
    return Sources(folder, name, version, f"{where} ({words})", identity, proved=known_tag is not None)


def _out_of_reach(name: str, version: str, why: str) -> SourcesOutOfReachError:
    offer = nearest(name, version)
    return SourcesOutOfReachError(
        f"The C++ and CUDA sources of {name} {version} are only in git, which could not be reached.",
        why=f"{why.rstrip('.')}. The archive of this release on the package index does not hold all of csrc/; the nearest that "
        f"does is {offer.version}: {offer.differs}.",
        next_step=f"anymamba build {name}=={offer.version}; or --mirror PREFIX (a GitHub mirror), or --source DIR",
    )


def _tree(folder: Path, known_tag: Tag | None) -> str:
    return tree_id(folder, known_tag.executable, known_tag.submodules) if known_tag is not None else tree_id(folder)


def _csrc(folder: Path, known_tag: Tag) -> str:
    below = [path.removeprefix("csrc/") for path in known_tag.executable if path.startswith("csrc/")]
    return tree_id(folder / "csrc", below)


def _keep(folder: Path, kept: Path) -> None:
    """Copy into the cache, whole or not at all; a cache that cannot be written is none."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent, ignore_cleanup_errors=True) as part:
            shutil.copytree(folder, Path(part) / "tree", ignore=shutil.ignore_patterns(".git"))
            if kept.is_dir():
                shutil.rmtree(kept)
            (Path(part) / "tree").replace(kept)
    except OSError:
        return


class _FetchError(Exception):
    pass


def _clone(address: str, tag: str, folder: Path) -> None:
    git = shutil.which("git")
    if git is None:
        raise _FetchError("git is not installed")
    options = ["-c", "core.autocrlf=false", "-c", "core.symlinks=false", "-c", "advice.detachedHead=false"]
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1", "LC_ALL": "C"}
    command = [git, *options, "clone", "--quiet", "--depth", "1", "--branch", tag, "--", address, str(folder)]
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _FetchError(f"git had not fetched {address} after {_GIT_SECONDS} s") from error
    except OSError as error:
        raise _FetchError(f"git cannot be run: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", errors="replace").strip().splitlines()
        fatal = next((line for line in lines if line.startswith("fatal:")), lines[-1] if lines else "")
        raise _FetchError(f"git: {fatal.removeprefix('fatal: ') or f'exit code {done.returncode}'}")
    shutil.rmtree(folder / ".git", onerror=_make_writable)


def _make_writable(remove: Callable[[str], object], path: str, _: object) -> None:
    # git makes its objects read-only, which Windows takes seriously
    Path(path).chmod(0o700)
    remove(path)


def _download_archive(address: str, tag: str, folder: Path) -> None:
    address = f"{address}/archive/refs/tags/{tag}.tar.gz"
    archive = folder.with_name("tag.tar.gz")
    try:
        with urllib.request.urlopen(address, timeout=30) as response, archive.open("wb") as file:
            while block := response.read(1 << 20):
                file.write(block)
                if file.tell() > _LARGEST_ARCHIVE:
                    raise _FetchError(f"{address} has more than {_LARGEST_ARCHIVE} bytes")
    except (OSError, urllib.error.URLError, ValueError) as error:
        raise _FetchError(f"{address}: {getattr(error, 'reason', error)}") from error
    unpacked = folder.with_name("unpacked")
    unpacked.mkdir(exist_ok=True)
    unpack(archive, unpacked).replace(folder)
