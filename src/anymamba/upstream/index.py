"""Find and download source archives, the way the user's pip would.

`unearth` reads index pages and find-links folders; the default index address is its own. Where it would stop at the first
index that fails, we go on and remember why, as pip does: an extra index that is down must not hide one that answers.
"""

from __future__ import annotations

import logging
import os
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies

from packaging.version import Version
from unearth import Link, PackageFinder
from unearth.auth import MultiDomainBasicAuth
from unearth.fetchers import PyPIClient

from anymamba import __version__
from anymamba.errors import (
    HashMismatchError,
    IndexUnreachableError,
    IntegrityError,
    MachineError,
    NoSuchReleaseError,
    NotWritableError,
)
from anymamba.machine.folders import cache_folder
from anymamba.upstream.cache import cached_source, sha256_of, source_path
from anymamba.upstream.pip_settings import PipSettings
from anymamba.upstream.progress import Progress

__all__ = ["Found", "Index", "default_index"]

LARGEST_DOWNLOAD = 256 << 20
"""Bytes. The largest real archive has 0.2 MiB; whatever exceeds this is not one."""

_FIRST_WAIT = 0.5

# unearth's HTTP library changed its name between releases; its exceptions are found through the client's base class.
_http: Any = sys.modules[PyPIClient.__mro__[1].__module__.partition(".")[0]]
_NETWORK_ERRORS: tuple[type[Exception], ...] = (_http.HTTPError, _http.InvalidURL, _http.StreamError, OSError)

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Found:
    """A source archive that an index offers."""

    name: str
    version: str
    file: str
    sha256: str | None  # as the index states it
    yanked: str | None  # the reason, "" without one; None: not yanked
    link: Link

    @property
    def origin(self) -> str:
        """Return the address without user and password, fit to be shown."""
        return str(self.link.redacted)


class Index:
    """The indexes and find-links folders of a pip configuration.

    Parameters
    ----------
    settings : PipSettings
    sleep : callable
        How to wait between tries.
    """

    def __init__(self, settings: PipSettings, sleep: Callable[[float], object] = time.sleep) -> None:
        self._settings = settings
        self._sleep = sleep
        self._found: dict[str, list[Found]] = {}
        indexes = [] if settings.no_index else [settings.index_url or default_index(), *settings.extra_index_urls]
        self._sources = [("index_urls", url.rstrip("/")) for url in indexes]
        self._sources += [("find_links", place) for place in map(_existing, settings.find_links) if place]
        proxy: dict[str, Any] = {"proxy": settings.proxy} if settings.proxy else {}
        self._client: Any = PyPIClient(
            trusted_hosts=settings.trusted_hosts,
            verify=_tls_context(settings),
            timeout=settings.timeout,
            follow_redirects=True,
            headers={"User-Agent": f"anymamba/{__version__}"},
            auth=MultiDomainBasicAuth(prompting=False, index_urls=indexes),
            mounts=_trusted_mounts(settings),
            **proxy,
        )

    def __enter__(self) -> Index:
        """Return itself; leaving the context closes the connections."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self._client.close()

    def find(self, name: str) -> list[Found]:
        """Return every source archive of a package, newest version first, one for each version.

        Raises
        ------
        IndexUnreachableError
            Nothing was found, and at least one place could not be read.
        NoSuchReleaseError
            Every place was read, and none has the package.
        """
        if name in self._found:
            return self._found[name]
        by_version: dict[Version, Found] = {}
        failures: list[str] = []
        for kind, place in self._sources:
            try:
                for found in self._retry(lambda kind=kind, place=place: self._read(kind, place, name)):  # type: ignore[misc]
                    kept = by_version.setdefault(Version(found.version), found)
                    if kept.sha256 is None and found.sha256 is not None:
                        by_version[Version(found.version)] = found
            except _NETWORK_ERRORS as error:
                failures.append(f"{_without_password(place)}: {error}")
            except _ServerFailedError as error:
                failures.append(f"{_without_password(place)}: {error}")
        if not by_version and failures:
            raise IndexUnreachableError(
                f"No index could be asked for {name}.",
                why="; ".join(failures),
                next_step="check `pip config list` (index-url, proxy, cert), or use --offline when it was installed before",
            )
        if not by_version:
            raise NoSuchReleaseError(
                f"No source archive of {name} at {', '.join(_without_password(place) for _, place in self._sources)}.",
                next_step="check `pip config list`: a mirror may lack source archives; add an extra-index-url that has them",
            )
        self._found[name] = [by_version[version] for version in sorted(by_version, reverse=True)]
        return self._found[name]

    def download(self, found: Found, sha256: str | None, progress: Progress) -> Path:
        """Download into the cache and return the file there; a kept file is not downloaded again.

        Parameters
        ----------
        found : Found
        sha256 : str or None
            What the content must be. None (no hash known anywhere): whatever comes is kept under its own hash.

        Raises
        ------
        HashMismatchError, IndexUnreachableError, IntegrityError
        """
        if sha256 is not None and (kept := cached_source(sha256, found.file)):
            return kept
        part = source_path("incoming", found.file).with_name(f"{found.file}.{os.getpid()}")
        with _cache_written():
            part.parent.mkdir(parents=True, exist_ok=True)
            part.touch()
        try:
            try:
                self._retry(lambda: self._fetch(found, part, progress))
            except _NETWORK_ERRORS as error:
                raise IndexUnreachableError(
                    f"The download of {found.file} broke off.",
                    why=f"{found.origin}: {error}",
                    next_step="run the same command again; what was complete is kept",
                ) from error
            actual = sha256_of(part)
            if sha256 is not None and actual != sha256:
                raise HashMismatchError(
                    f"{found.file} has sha256 {actual}, but must have {sha256}.",
                    why=f"{found.origin} serves something other than what was published (a broken mirror, a proxy's error "
                    "page, or a tampered file). It was thrown away.",
                    next_step="use another index: pip config set global.index-url ADDRESS",
                )
            final = source_path(actual, found.file)
            with _cache_written():
                final.parent.mkdir(parents=True, exist_ok=True)
                try:
                    part.replace(final)
                except PermissionError:  # Windows: another install has just finished the same download and reads it
                    if not (final.is_file() and sha256_of(final) == actual):
                        raise
            return final
        finally:
            part.unlink(missing_ok=True)

    def _read(self, kind: str, place: str, name: str) -> list[Found]:
        where: dict[str, Any] = {kind: [place]}
        finder = PackageFinder(session=self._client, no_binary=[name], ignore_compatibility=True, **where)
        with _server_failures() as failures:
            packages = list(finder.find_all_packages(name, allow_yanked=True))
        if failures and not packages:
            raise _ServerFailedError("; ".join(failures))
        return [_found(name, package.version or "", package.link) for package in packages if not package.link.is_wheel]

    def _fetch(self, found: Found, part: Path, progress: Progress) -> None:
        have = part.stat().st_size if part.exists() else 0
        # identity: a transparently decompressed .tar.gz would have another hash
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
        with self._client.get_stream(found.link.url_without_fragment, headers=headers) as response:
            if have and response.status_code == 416:
                part.unlink()
                raise OSError("the server cannot resume this download")
            response.raise_for_status()
            if response.status_code != 206:
                have = 0
            length = response.headers.get("Content-Length", "")
            total = have + int(length) if length.isdigit() else None
            if (total or 0) > LARGEST_DOWNLOAD:
                raise _too_large(found, f"is said to have {total}")
            with part.open("ab" if have else "wb") as file:
                for block in response.iter_raw():  # as it comes: a size would hold back, and lose, what came last
                    with _cache_written():
                        file.write(block)
                    have += len(block)
                    progress.advance(have, total)
                    if have > LARGEST_DOWNLOAD:
                        raise _too_large(found, f"has more than {have}")
        if total is not None and have < total:
            raise OSError(f"the connection closed after {have} of {total} bytes")

    def _retry(self, call: Callable[[], _Result]) -> _Result:
        wait = _FIRST_WAIT
        for _ in range(self._settings.retries):
            try:
                return call()
            except _NETWORK_ERRORS as error:
                status = getattr(getattr(error, "response", None), "status_code", 0)
                if (400 <= status < 500 and status != 429) or isinstance(error, _http.TooManyRedirects):
                    raise
            except _ServerFailedError as error:
                if "Server Error" not in str(error):
                    raise  # a refusal stays one
            self._sleep(wait)
            wait *= 2
        return call()


def _too_large(found: Found, what: str) -> IntegrityError:
    return IntegrityError(
        f"{found.file} {what} bytes; no source archive has more than {LARGEST_DOWNLOAD}.",
        why=f"{found.origin} serves something other than what was published.",
        next_step="use another index: pip config set global.index-url ADDRESS",
    )


@contextmanager
def _cache_written() -> Iterator[None]:
    """Tell a disk that fails from a network that does."""
    try:
        yield
    except OSError as error:
        raise NotWritableError(
            f"The download cache {cache_folder()} cannot be written.",
            why=str(error),
            next_step="make room, or set ANYMAMBA_CACHE_DIR to a folder that can be written",
        ) from error


class _ServerFailedError(Exception):
    pass


@contextmanager
def _server_failures() -> Iterator[list[str]]:
    """Collect what unearth only logs: an index that failed, or was not asked. "Not found" is an answer, no failure."""
    failures: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if any(
                sign in text for sign in ("Server Error", "Client Error(401)", "Client Error(403)", "not being trusted")
            ):
                failures.append(text.replace("`trusted_hosts` list", "pip's trusted-host setting"))

    logger, handler = logging.getLogger("unearth.collector"), Collect()
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield failures
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)


def _found(name: str, version: str, link: Link) -> Found:
    hashes = link.hash_option or {}
    return Found(name, version, link.filename, next(iter(hashes.get("sha256", [])), None), link.yank_reason, link)


def default_index() -> str:
    """Return the address of the index that pip asks when nobody says otherwise."""
    return str(PackageFinder().sources[0]["url"])


def _existing(place: str) -> str | None:
    if "://" in place:
        return place
    path = Path(place).expanduser()
    return str(path.absolute()) if path.exists() else None


def _tls_context(settings: PipSettings) -> ssl.SSLContext | bool:
    if settings.cert is None and settings.client_cert is None:
        return True
    try:
        if settings.cert is None:
            context = ssl.create_default_context()
        elif Path(settings.cert).is_dir():
            context = ssl.create_default_context(capath=settings.cert)
        else:
            context = ssl.create_default_context(cafile=settings.cert)
        if settings.client_cert is not None:
            context.load_cert_chain(settings.client_cert)
    except (OSError, ssl.SSLError) as error:
        raise MachineError(
            f"The certificate that pip is configured with cannot be read: {settings.client_cert or settings.cert}.",
            why=str(error),
            next_step="pip config list",
        ) from error
    return context


def _trusted_mounts(settings: PipSettings) -> dict[str, Any]:
    """Return how to reach trusted hosts: unverified, as the user wants it, yet through the proxy (unearth goes direct)."""
    return {
        f"{scheme}://{host}": _http.HTTPTransport(verify=False, proxy=settings.proxy or getproxies().get(scheme))
        for host in settings.trusted_hosts
        for scheme in ("http", "https")
    }


def _without_password(place: str) -> str:
    parts = urlsplit(place)
    if "@" not in parts.netloc:
        return unquote(place) if parts.scheme == "file" else place
    return parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]).geturl()
