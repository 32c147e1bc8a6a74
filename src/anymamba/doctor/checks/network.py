"""Proxies and certificates that make pip fail in ways that do not name them."""

from __future__ import annotations

from anymamba.doctor.result import Result, Status, Way, for_system
from anymamba.machine import Machine


def certificate_files(machine: Machine) -> Result | None:
    """A variable that points at a certificate file that is not there breaks every download."""
    missing = machine.network.missing_certificates
    if not missing:
        return None
    where = dict(machine.network.certificates)
    return Result(
        "certificate-files",
        "Certificates",
        Status.WARN,
        Way.BOTH,
        seen=", ".join(f"{name}={where[name]} (not there)" for name in missing),
        wanted="an existing file, or unset",
        why='pip stops with "Could not find a suitable TLS CA certificate bundle"',
        fix=for_system(
            machine, windows=" & ".join(f"set {name}=" for name in missing), linux=f"unset {' '.join(missing)}"
        ),
    )


def proxy_addresses(machine: Machine) -> Result | None:
    """`HTTPS_PROXY=127.0.0.1:7890` and `https://127.0.0.1:7890` look right, and local proxies speak neither."""
    proxies = machine.network.proxies
    if not proxies:
        return None
    odd = [(name, address) for name, address in proxies if "://" not in address or address.startswith("https://127.")]
    if not odd:
        names = ", ".join(f"{name}={address}" for name, address in proxies)
        return Result("proxy-addresses", "Proxy", Status.INFO, Way.BOTH, seen=names)
    name, address = odd[0]
    right = "http://" + address.partition("://")[2] if "://" in address else f"http://{address}"
    return Result(
        "proxy-addresses",
        "Proxy",
        Status.WARN,
        Way.BOTH,
        seen=f"{name}={address}",
        wanted=right,
        why='a proxy on this machine speaks plain HTTP to pip, whatever it fetches: "ProxyError", "SSLEOFError"',
        fix=for_system(machine, windows=f"set {name}={right}", linux=f"export {name}={right}"),
    )
