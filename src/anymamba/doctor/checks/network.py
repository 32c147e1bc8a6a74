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


def index_reachable(machine: Machine) -> Result:
    """The user's package index, asked once; only with --network."""
    return _reachable(
        machine,
        "index",
        "index-reachable",
        "Package index",
        why="pip and `anymamba install` fetch from it",
        fix="anymamba install --from FILE    (made by `anymamba bundle` on a machine with network; or set a mirror that "
        "answers: python -m pip config set global.index-url ADDRESS)",
    )


def github_reachable(machine: Machine) -> Result:
    """GitHub: setup.py of upstream's packages looks there for a ready wheel, and dies where it cannot."""
    return _reachable(
        machine,
        "GitHub",
        "github-reachable",
        "GitHub",
        why="upstream's setup.py looks there for ready wheels and stops with URLError; native builds fetch old sources there",
        fix="anymamba install    (needs the index only)",
    )


def _reachable(machine: Machine, what: str, identifier: str, title: str, *, why: str, fix: str) -> Result:
    way = Way.BOTH if what == "index" else Way.NATIVE
    if machine.reached is None:
        return Result(identifier, title, Status.INFO, way, "not tried (anymamba doctor --network tries)")
    place = next(one for one in machine.reached if one.what == what)
    if not place.problem:
        return Result(identifier, title, Status.OK, way, f"{place.address} answers in {place.seconds:g} s", "answers")
    if "CERTIFICATE_VERIFY_FAILED" in place.problem:
        why = "the network's certificate is not trusted: a company's proxy, or a wrong clock"
        fix = "python -m pip config set global.cert FILE    (your company's certificate)"
    return Result(
        identifier, title, Status.WARN, way, f"{place.address}: {place.problem}", wanted="answers", why=why, fix=fix
    )
