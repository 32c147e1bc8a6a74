"""Pack a port into a wheel: pure Python, reproducible byte for byte, upstream's metadata kept, Triton no longer required."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from anymamba import __version__
from anymamba.errors import IntegrityError
from anymamba.upstream.archive import list_zip
from anymamba.upstream.port.build import Port, port_version
from anymamba.upstream.port.families import EXTENSIONS

__all__ = ["PROVENANCE", "build_wheel", "check_identity", "check_port_wheel", "pack", "pack_wheel", "recipe"]

PROVENANCE = "anymamba-provenance.json"
"""File in the wheel's dist-info that tells a port from upstream's own package."""

PROVENANCE_SCHEMA = 1
_HARD = ("torch", "einops", "packaging")
_DATE = (1980, 1, 1, 0, 0, 0)


def check_identity(source: Path, name: str, version: str) -> None:
    """Check that an unpacked source archive says it is what was asked for.

    Raises
    ------
    IntegrityError
    """
    fields = _headers(_pkg_info(source)[0])
    said_name = next((value for key, value in fields if key == "name"), "")
    said_version = next((value for key, value in fields if key == "version"), "")
    try:
        same = canonicalize_name(said_name) == canonicalize_name(name) and Version(said_version) == Version(version)
    except InvalidVersion:
        same = False
    if not same:
        raise IntegrityError(
            f"The archive asked for as {name} {version} says that it is {said_name or '?'} {said_version or '?'}.",
            next_step="use another index: pip config set global.index-url ADDRESS",
        )


def build_wheel(
    port: Port, source: Path, name: str, version: str, sha256: str, file: str, into: Path, *,
    installs: str | None = None, tag: str = "py3-none-any", details: Mapping[str, object] | None = None,
) -> Path:  # fmt: skip
    """Write the wheel of a port, or of a native build, and return its path.

    Parameters
    ----------
    port : Port
    source : Path
        The unpacked source archive: metadata, licence and authors come from it.
    name, version : str
        Upstream's.
    sha256, file : str
        Of the source archive, for the provenance.
    into : Path
        An existing folder.
    installs : str, optional
        The wheel's version; default: the port's.
    tag : str
        Python, ABI and platform that it is for.
    details : mapping, optional
        Of a native build, for the provenance.
    """
    local = port_version(version) if installs is None else installs
    about = {
        f"licenses/{licence}": (source / licence).read_bytes()
        for licence in ("LICENSE", "AUTHORS")
        if (source / licence).is_file()
    }
    about["METADATA"] = _metadata(source, local).encode()
    origin = {"name": name, "version": version, "file": file, "sha256": sha256}
    return pack(port, name, version, about, origin, into, installs=local, tag=tag, details=details)


def pack(
    port: Port, name: str, version: str, about: Mapping[str, bytes], origin: Mapping[str, str] | None, into: Path, *,
    installs: str | None = None, tag: str = "py3-none-any", details: Mapping[str, object] | None = None,
) -> Path:  # fmt: skip
    """Write a wheel of modules and return its path.

    Parameters
    ----------
    port : Port
    name, version : str
        Of what it stands for; ours is added to the version.
    about : mapping of str to bytes
        Files of the dist-info folder: METADATA at least.
    origin : mapping or None
        The source archive, for the provenance; None where there is none.
    into : Path
        An existing folder.
    installs, tag, details
        As in `build_wheel`.
    """
    local = port_version(version) if installs is None else installs
    info = f"{name}-{local}.dist-info"
    content: dict[str, bytes] = {
        path.relative_to(port.folder).as_posix(): path.read_bytes()
        for path in sorted(port.folder.rglob("*"))
        if path.is_file()
    }
    tops = sorted({entry.partition("/")[0].partition(".")[0] for entry in content})
    content.update({f"{info}/{file}": data for file, data in about.items()})
    provenance = {
        "schema": PROVENANCE_SCHEMA,
        "source": origin,
        "port": {"version": local, "anymamba": __version__, "recipe": recipe()},
        **({} if details is None else {"native": dict(details)}),
        "changes": [{"rule": done.rule, "file": done.file, "outcome": done.outcome} for done in port.applied],
    }
    content[f"{info}/{PROVENANCE}"] = (json.dumps(provenance, indent=1) + "\n").encode()
    content[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: anymamba {__version__}\n"
        f"Root-Is-Purelib: {str(tag.endswith('-any')).lower()}\nTag: {tag}\n"
    ).encode()
    content[f"{info}/top_level.txt"] = ("\n".join(tops) + "\n").encode()
    return pack_wheel(into / f"{name}-{local}-{tag}.whl", info, content)


@functools.cache
def recipe() -> str:
    """Return the hash of everything that decides what becomes of a source archive: the rules, the redirects, this module."""
    digest = hashlib.sha256(__version__.encode())
    here = Path(__file__).parent
    for path in sorted([*(here / "patches").glob("*.py"), *(here / "port").glob("*.py"), Path(__file__)]):
        digest.update(path.name.encode() + path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()


def pack_wheel(wheel: Path, info: str, content: Mapping[str, bytes]) -> Path:
    """Write files as a wheel, with their RECORD; the same content gives the same bytes.

    Parameters
    ----------
    wheel : Path
    info : str
        The name of the dist-info folder.
    content : mapping
        From paths to bytes.
    """
    record = [f"{_quoted(path)},sha256={_digest(data)},{len(data)}" for path, data in content.items()]
    entries = {**content, f"{info}/RECORD": ("\n".join([*record, f"{info}/RECORD,,"]) + "\n").encode()}
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as zipped:
        for path, data in entries.items():
            entry = zipfile.ZipInfo(path, _DATE)
            entry.external_attr = 0o100644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            zipped.writestr(entry, data)
    return wheel


def check_port_wheel(wheel: Path, name: str, installs: str) -> None:
    """Check that a wheel holds a port and nothing else: files of its own package, extension modules and metadata only.

    Raises
    ------
    IntegrityError
    """
    info = f"{name}-{installs}.dist-info"
    allowed = {name, info, *(f"{extension}.py" for extension in EXTENSIONS[name])}
    names = list_zip(wheel)
    foreign = [entry for entry in names if entry.partition("/")[0] not in allowed]
    if foreign or f"{info}/{PROVENANCE}" not in names:
        raise IntegrityError(
            f"{wheel.name} is not a port of {name} {installs} made by anymamba.",
            why=f"It holds {foreign[0]!r}." if foreign else f"It has no {PROVENANCE}.",
            next_step="make the folder anew: anymamba bundle DIR",
        )


def _quoted(path: str) -> str:
    return '"' + path.replace('"', '""') + '"' if "," in path or '"' in path else path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _pkg_info(source: Path) -> tuple[str, str]:
    """Return headers and body of the archive's PKG-INFO."""
    text = (
        (source / "PKG-INFO").read_text(encoding="utf-8", errors="replace") if (source / "PKG-INFO").is_file() else ""
    )
    headers, _, body = text.replace("\r\n", "\n").partition("\n\n")
    return headers, body


def _headers(text: str) -> list[tuple[str, str]]:
    """Return the header fields in order, names in lower case; folded lines stay in the value as they are."""
    fields: list[tuple[str, str]] = []
    for line in text.splitlines():
        if line[:1] in (" ", "\t") and fields:
            fields[-1] = (fields[-1][0], f"{fields[-1][1]}\n{line}")
        else:
            key, _, value = line.partition(":")
            fields.append((key.strip().lower(), value.strip()))
    return fields


def _metadata(source: Path, version: str) -> str:
    headers, body = _pkg_info(source)
    dropped = {"metadata-version", "version", "requires-dist", "provides-extra", "dynamic", "license-file"}
    fields = _headers(headers)
    # 2.1 for the fields that upstream's archives have; License-File stays a field that older pips ignore
    lines = ["Metadata-Version: 2.1"]
    for key, value in fields:
        if key not in dropped and value:
            lines.append(f"{_spelling(key)}: {value}")
        if key == "name":
            lines.append(f"Version: {version}")
    lines += [f"License-File: {licence}" for licence in ("LICENSE", "AUTHORS") if (source / licence).is_file()]
    lines += _requirements(fields, source)
    return "\n".join(lines) + "\n\n" + body


def _spelling(key: str) -> str:
    special = {"home-page": "Home-page", "author-email": "Author-email", "download-url": "Download-URL"}
    return special.get(key, "-".join(part.capitalize() for part in key.split("-"))).replace(
        "Project-Url", "Project-URL"
    )


def _requirements(fields: list[tuple[str, str]], source: Path) -> list[str]:
    stated = [value for key, value in fields if key == "requires-dist"] or _requires_txt(source)
    hard = {name: name for name in _HARD}
    extras: dict[str, list[str]] = {}
    for text in stated:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        name = canonicalize_name(requirement.name)
        marker = str(requirement.marker or "")
        if named := re.search(r"""extra\s*==\s*['"]([^'"]+)['"]""", marker):
            requirement.marker = None
            extras.setdefault(named.group(1), []).append(str(requirement))
        elif name in hard:
            hard[name] = text
        else:
            extras.setdefault(name, []).append(str(requirement))
    lines = [f"Requires-Dist: {requirement}" for requirement in hard.values()]
    lines.append(f"Requires-Dist: anymamba>={__version__}")
    for extra, requirements in sorted(extras.items()):
        lines.append(f"Provides-Extra: {extra}")
        for text in requirements:
            wanted, _, marker = text.partition(";")
            condition = f'({marker.strip()}) and extra == "{extra}"' if marker else f'extra == "{extra}"'
            lines.append(f"Requires-Dist: {wanted.strip()}; {condition}")
    return lines


def _requires_txt(source: Path) -> list[str]:
    stated: list[str] = []
    for path in source.glob("*.egg-info/requires.txt"):
        extra = ""
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            line = line.strip()
            if line.startswith("["):
                extra = line.strip("[]").partition(":")[0]
            elif line:
                stated.append(f'{line}; extra == "{extra}"' if extra else line)
    return stated
