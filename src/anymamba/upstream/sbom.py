"""The installed ports as a CycloneDX 1.6 bill of materials (JSON): what each is made of, from what, changed by which rules."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote

from packaging.utils import canonicalize_name

from anymamba import __version__
from anymamba.upstream.provenance import Traced

__all__ = ["bill_of_materials"]


def bill_of_materials(ports: Sequence[Traced], torch: str | None = None) -> dict[str, Any]:
    """Return the bill of materials as plain data, ready for `json.dumps`.

    Parameters
    ----------
    ports : sequence of Traced
    torch : str, optional
        The version of PyTorch that is there.
    """
    needed = {"anymamba": __version__, **({"torch": torch} if torch else {})}
    libraries = [_library(name, version) for name, version in needed.items()]
    components = [*map(_port, ports), *libraries]
    references = [library["bom-ref"] for library in libraries]
    dependencies: list[dict[str, Any]] = [{"ref": _purl(p.name, p.version), "dependsOn": references} for p in ports]
    # the same installation has the same number, whenever it is listed
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(components, sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{number}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "tools": {"components": [{"type": "application", "name": "anymamba", "version": __version__}]},
        },
        "components": components,
        "dependencies": [*dependencies, *({"ref": reference} for reference in references)],
    }


def _port(port: Traced) -> dict[str, Any]:
    ancestor = {
        **_library(port.name, port.upstream),
        "bom-ref": f"{_purl(port.name, port.upstream)}#{port.source_file}",
        "hashes": [{"alg": "SHA-256", "content": port.source_sha256}],
    }
    patches = [
        {"type": "unofficial", "resolves": [{"type": "defect", "id": rule, "description": reason}]}
        for rule, reason in port.reasons.items()
    ]
    files = [
        {
            "type": "file",
            "name": file.path,
            "hashes": [{"alg": "SHA-256", "content": file.sha256}],
            "properties": [
                {"name": "anymamba:origin", "value": file.origin},
                {"name": "anymamba:state", "value": file.state},
                *({"name": "anymamba:rule", "value": rule} for rule in file.rules),
            ],
        }
        for file in port.files
        if file.sha256 is not None
    ]
    licence = {"licenses": [{"license": {"name": port.licence}}]} if port.licence else {}
    pedigree = {"ancestors": [ancestor], "patches": patches, "notes": f"Ported by anymamba {port.made_by}."}
    return {**_library(port.name, port.version), **licence, "pedigree": pedigree, "components": files}


def _library(name: str, version: str) -> dict[str, Any]:
    purl = _purl(name, version)
    return {"type": "library", "bom-ref": purl, "name": canonicalize_name(name), "version": version, "purl": purl}


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{canonicalize_name(name)}@{quote(version, safe='')}"
