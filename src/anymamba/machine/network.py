"""How this environment reaches the network: proxies and certificates, from the variables that pip and urllib read.

Nothing is contacted. Passwords in addresses are left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Network", "read_network"]

_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "PIP_PROXY")
_CERTIFICATES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")


@dataclass(frozen=True)
class Network:
    """Variables that are set, by name. `missing_certificates`: those whose file is not there."""

    proxies: tuple[tuple[str, str], ...] = ()
    certificates: tuple[tuple[str, str], ...] = ()
    missing_certificates: tuple[str, ...] = ()


def read_network(*, environ: Mapping[str, str] = os.environ) -> Network:
    """Read the variables."""
    certificates = tuple((name, environ[name]) for name in _CERTIFICATES if environ.get(name))
    return Network(
        proxies=tuple((name, _without_password(environ[name])) for name in _PROXIES if environ.get(name)),
        certificates=certificates,
        missing_certificates=tuple(name for name, path in certificates if not Path(path).exists()),
    )


def _without_password(address: str) -> str:
    return re.sub(r"(^|//)[^/@]*@", r"\1", address)
