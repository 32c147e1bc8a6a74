"""The user's own pip configuration: which index, which mirror, which proxy, which certificates.

pip is asked (`pip config list`) instead of its files being read, so global, user, site and PIP_CONFIG_FILE files and PIP_*
variables count exactly as they do for pip. Values may hold passwords: nothing here prints them.
"""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from anymamba.errors import MachineError

__all__ = ["PipSettings", "parse_pip_settings", "read_pip_settings"]

# Later sections win, as in pip.
_SECTIONS = ("global", "install", ":env:")


@dataclass(frozen=True)
class PipSettings:
    """What pip would use to reach an index. `index_url` is None where the user leaves it to the default."""

    index_url: str | None = None
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    proxy: str | None = None
    cert: str | None = None
    client_cert: str | None = None
    trusted_hosts: tuple[str, ...] = ()
    timeout: float = 15.0
    retries: int = 3


def read_pip_settings(python: Path) -> PipSettings:
    """Ask the pip of an interpreter for its configuration.

    Raises
    ------
    MachineError
        When that interpreter has no working pip.
    """
    # PYTHONIOENCODING, not PYTHONUTF8: the latter would also change how pip reads a pip.ini saved in the code page.
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:backslashreplace"}
    result = subprocess.run(
        [str(python), "-m", "pip", "config", "list"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if result.returncode != 0:
        raise MachineError(
            f"{python} has no working pip.",
            why=(result.stderr.strip().splitlines() or ["pip said nothing"])[-1],
            next_step=f'"{python}" -m ensurepip',
        )
    return parse_pip_settings(result.stdout, os.environ)


def parse_pip_settings(listing: str, environment: Mapping[str, str]) -> PipSettings:
    """Build the settings from the output of `pip config list`, and from what the HTTP library of pip reads itself."""
    sections: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listing.splitlines():
        key, separator, literal = line.partition("=")
        section, dot, option = key.strip().rpartition(".")
        if not separator or not dot or section not in sections:
            continue
        try:
            value = ast.literal_eval(literal.strip())
        except (SyntaxError, ValueError):
            continue
        if value:  # pip ignores empty values
            sections[section][option.lower().replace("_", "-")] = str(value)
    options: dict[str, str] = {}
    for section in _SECTIONS:
        options.update(sections[section])
    bundle = environment.get("REQUESTS_CA_BUNDLE") or environment.get("CURL_CA_BUNDLE")
    return PipSettings(
        index_url=options.get("index-url") or options.get("pypi-url"),
        extra_index_urls=tuple(options.get("extra-index-url", "").split()),
        find_links=tuple(options.get("find-links", "").split()),
        no_index=options.get("no-index", "").lower() in ("1", "true", "yes", "on", "y", "t"),
        proxy=options.get("proxy"),
        cert=options.get("cert") or bundle,
        client_cert=options.get("client-cert"),
        trusted_hosts=tuple(options.get("trusted-host", "").split()),
        timeout=_number(options.get("timeout") or options.get("default-timeout"), 15.0),
        retries=int(_number(options.get("retries"), 3)),
    )


def _number(text: str | None, default: float) -> float:
    try:
        return float(text) if text else default
    except ValueError:
        return default
