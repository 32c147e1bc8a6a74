"""Do the user's package index and GitHub answer? Asked only on request, bounded in time, with the user's own proxies.

The index is pip's (`pip config list`): mirror, proxy, certificates and trusted hosts count as they do for pip. GitHub matters
because setup.py of upstream's packages looks there for ready wheels, and sources of older versions are only there.
"""

from __future__ import annotations

import re
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["SECONDS", "Reached", "read_reach"]

SECONDS = 6.0
"""For one answer; both places are asked at the same time, so this bounds the whole."""


@dataclass(frozen=True)
class Reached:
    """One place. `address` has no password; `problem` is empty when it answered."""

    what: str  # index, GitHub
    address: str
    seconds: float
    problem: str = ""


@dataclass(frozen=True)
class Route:
    """How pip would go: the index, and the settings that decide whether it gets there."""

    index: str
    proxy: str | None = None
    certificates: str | None = None
    unchecked: tuple[str, ...] = ()  # trusted hosts


def read_reach(*, route: Callable[[], Route] | None = None, github: str = "https://github.com/") -> tuple[Reached, ...]:
    """Ask both places.

    Parameters
    ----------
    route : callable, optional
        Returns pip's way; by default pip itself is asked.
    github : str
        The address that stands for GitHub.
    """
    way = (route or _pips_route)()
    with ThreadPoolExecutor(max_workers=2) as pool:
        places = (("index", way.index.rstrip("/") + "/mamba-ssm/"), ("GitHub", github))
        return tuple(pool.map(lambda place: _ask(place[0], place[1], way), places))


def _pips_route() -> Route:
    from anymamba.errors import AnymambaError
    from anymamba.upstream.index import default_index
    from anymamba.upstream.pip_settings import PipSettings, read_pip_settings

    try:
        settings = read_pip_settings(Path(sys.executable))
    except AnymambaError:  # no pip: the doctor says so elsewhere
        settings = PipSettings()
    return Route(
        settings.index_url or default_index(),
        settings.proxy,
        settings.cert,
        tuple(host.partition(":")[0] for host in settings.trusted_hosts),
    )


def _ask(what: str, address: str, way: Route) -> Reached:
    shown = re.sub(r"//[^/@]*@", "//", address)
    start = time.perf_counter()
    problem = ""
    try:
        handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=_context(address, way))]
        if way.proxy:
            handlers.append(urllib.request.ProxyHandler({"http": way.proxy, "https": way.proxy}))
        opener = urllib.request.build_opener(*handlers)
        # A password in the address goes into a header, as with pip; urllib would look up "user:password@host".
        request = urllib.request.Request(shown, headers={"User-Agent": "anymamba", **_credentials(address)})
        with opener.open(request, timeout=SECONDS) as answer:
            answer.read(1)
    except urllib.error.HTTPError as error:
        problem = f"answers {error.code} {error.reason}"
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        problem = f"{type(reason).__name__}: {reason}" if isinstance(reason, BaseException) else str(reason)
    return Reached(what, shown, round(time.perf_counter() - start, 2), problem)


def _credentials(address: str) -> dict[str, str]:
    import base64
    from urllib.parse import unquote

    parts = urlsplit(address)
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": "Basic " + base64.b64encode(pair.encode()).decode("ascii")}


def _context(address: str, way: Route) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=way.certificates if way.certificates else None)
    if urlsplit(address).hostname in way.unchecked:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
