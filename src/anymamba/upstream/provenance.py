"""Where each installed file of a port came from, which rule changed it, and whether it still is what was installed.

What a file must be is known in two ways. Where the source archive is at hand and this anymamba would make the same port of it,
the port is made again and compared byte for byte: nobody can alter a file and its line in RECORD unnoticed. Else RECORD says.
"""

from __future__ import annotations

import base64
import csv
import difflib
import hashlib
import json
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anymamba.errors import InstallError, PatchError
from anymamba.upstream.archive import unpack
from anymamba.upstream.cache import cached_source
from anymamba.upstream.environment import inspect_environment
from anymamba.upstream.index import Index
from anymamba.upstream.making import make_wheel
from anymamba.upstream.patches import rules_for
from anymamba.upstream.patches._originals import TRITON_OPTIONAL, own_imports
from anymamba.upstream.pip_settings import read_pip_settings
from anymamba.upstream.port.build import KEPT
from anymamba.upstream.port.families import EXTENSIONS
from anymamba.upstream.progress import Progress, Silent
from anymamba.upstream.releases import package_name
from anymamba.upstream.wheel import PROVENANCE, recipe

__all__ = ["Traced", "TracedFile", "differences", "trace"]

_PIPS_OWN = ("INSTALLER", "REQUESTED", "direct_url.json")
_REASONS = {
    "redirect": "Upstream's kernels need a compiler; this module gives its names from anymamba.ops first.",
    "extension-module": "Upstream compiles this module from C++ and CUDA; here it is Python over anymamba.ops.",
    "kept-package": "Upstream's kernel modules are kept below this package, out of the way of the redirects.",
}


@dataclass(frozen=True)
class TracedFile:
    """An installed file.

    Attributes
    ----------
    path : str
        Below site-packages.
    origin : str
        "upstream" (as it was published), "adapted" (changed by rules), "anymamba" (written by it) or "metadata".
    source : str or None
        Its path in the source archive, below the archive's top folder.
    rules : tuple of str
        What changed or wrote it.
    state : str
        "intact", "altered", "missing" or "added".
    """

    path: str
    origin: str
    source: str | None
    rules: tuple[str, ...]
    state: str
    sha256: str | None


@dataclass(frozen=True)
class Traced:
    """An installed port.

    Attributes
    ----------
    made_by : str
        The version of anymamba that made it.
    judged_by : str
        "source" (made again from the source archive and compared) or "record" (the hashes noted when it was installed).
    reasons : dict
        Why each rule is there.
    """

    name: str
    version: str
    upstream: str
    source_file: str
    source_sha256: str
    made_by: str
    location: str
    judged_by: str
    licence: str
    reasons: dict[str, str]
    files: tuple[TracedFile, ...]

    @property
    def altered(self) -> list[TracedFile]:
        """Return the files that are not as they were installed."""
        return [file for file in self.files if file.state != "intact"]


def trace(python: Path, names: Sequence[str] = (), progress: Progress | None = None) -> list[Traced]:
    """Trace and verify the ports of an environment, file by file. Changes nothing and asks no index.

    Parameters
    ----------
    python : Path
    names : sequence of str
        Which; nothing named: all that are there.
    progress : Progress, optional

    Raises
    ------
    InstallError
        A package that was named is no port, or there is none.
    """
    progress = progress or Silent()
    installed = inspect_environment(python).installed
    wanted = [package_name(name) or name for name in names]
    ours = {name: there for name, there in installed.items() if there.kind == "port"}
    for name in wanted or ([] if ours else ["mamba_ssm or causal_conv1d"]):
        if name not in ours:
            there = installed.get(name)
            raise InstallError(
                f"{python} has no {name} of anymamba's.",
                why=f"{name} {there.version} in {there.location} was installed by something else." if there else "",
                next_step="anymamba install",
            )
    return [_trace(name, Path(ours[name].location), ours[name].version, progress) for name in wanted or ours]


def differences(traced: Traced, python: Path, offline: bool = False, progress: Progress | None = None) -> Iterator[str]:
    """Yield, for each file that is not upstream's own, the unified diff from the source archive's text to the installed one.

    Raises
    ------
    SourceError, IntegrityError
        The source archive cannot be had.
    """
    archive = cached_source(traced.source_sha256, traced.source_file)
    if archive is None and not offline:
        (progress or Silent()).step(f"Downloading {traced.source_file}")
        with Index(read_pip_settings(python)) as index:
            found = next((f for f in index.find(traced.name) if f.version == traced.upstream), None)
            archive = index.download(found, traced.source_sha256, progress or Silent()) if found else None
    if archive is None:
        raise InstallError(
            f"{traced.source_file} cannot be had, so there is nothing to compare with.",
            next_step=f"anymamba install {traced.name}=={traced.upstream}",
        )
    with tempfile.TemporaryDirectory(prefix="anymamba-", ignore_cleanup_errors=True) as staging:
        source = unpack(archive, Path(staging))
        for file in traced.files:
            if file.origin == "metadata" or (file.origin == "upstream" and file.state == "intact"):
                continue
            before = _lines(source / file.source) if file.source else []
            after = _lines(Path(traced.location, file.path))
            said = f"a/{file.source}" if file.source else "/dev/null"
            yield "".join(
                line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
                for line in difflib.unified_diff(before, after, said, f"b/{file.path}")
            )


def _trace(name: str, root: Path, version: str, progress: Progress) -> Traced:
    progress.step(f"Verifying {name} {version}")
    info = f"{name}-{version}.dist-info"
    noted = _noted(root / info / PROVENANCE)
    source, port = noted.get("source") or {}, noted.get("port") or {}
    upstream = str(source.get("version", version.partition("+")[0]))
    again = port.get("recipe") == recipe() and "native" not in noted  # compilers give other bytes each time
    expected = _made_again(name, upstream, source) if again else None
    judged_by = "record" if expected is None else "source"
    recorded = _recorded(root / info / "RECORD")
    if expected is None:
        expected = recorded
    present = _present(root, name, info)
    rules = _rules(name, noted.get("changes", []))
    files = [
        _file(name, info, path, rules.get(path, ()), expected.get(path), present.get(path))
        for path in sorted({*expected, *present})
    ]
    lying = any(recorded.get(path) != digest for path, digest in expected.items())
    state = "missing" if not recorded else "altered" if lying else "intact"
    files.append(TracedFile(f"{info}/RECORD", "metadata", None, (), state, None))
    reasons = {rule.id: rule.reason for rule in [*rules_for(name, upstream), TRITON_OPTIONAL, own_imports({})]}
    used = {rule for file in files for rule in file.rules}
    return Traced(
        name=name,
        version=version,
        upstream=upstream,
        source_file=str(source.get("file", "")),
        source_sha256=str(source.get("sha256", "")),
        made_by=str(port.get("anymamba", "")),
        location=str(root),
        judged_by=judged_by,
        licence=_licence(root / info / "METADATA"),
        reasons={rule: reason for rule, reason in {**reasons, **_REASONS}.items() if rule in used},
        files=tuple(files),
    )


def _file(
    name: str, info: str, path: str, rules: tuple[str, ...], expected: str | None, present: str | None
) -> TracedFile:
    state = (
        "intact" if expected == present else "added" if expected is None else "missing" if not present else "altered"
    )
    source: str | None = None
    if path.startswith(f"{info}/"):
        origin = "metadata"
        if path.startswith(f"{info}/licenses/"):
            origin, source = "upstream", path.rpartition("/")[2]
    elif state == "added":
        origin = "unknown"
    elif path.startswith(f"{name}/{KEPT}/") and path.endswith("/__init__.py"):
        origin, rules = "anymamba", ("kept-package",)
    elif rules in (("redirect",), ("extension-module",)):
        origin = "anymamba"
    else:
        origin, source = ("adapted" if rules else "upstream"), path.replace(f"{name}/{KEPT}/", f"{name}/", 1)
    return TracedFile(path, origin, source, rules, state, present)


def _noted(path: Path) -> dict[str, Any]:
    """Return the provenance that was installed; an unreadable one says nothing (and is reported as altered)."""
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}


def _rules(name: str, changes: Sequence[dict[str, str]]) -> dict[str, tuple[str, ...]]:
    """Return the rules by installed path. Where a redirect stands, the other rules changed the text that was moved away."""
    redirected = {change["file"] for change in changes if change["rule"] == "redirect"}
    found: dict[str, list[str]] = {}
    for change in changes:
        rule, file = change["rule"], change["file"]
        if file in redirected and rule != "redirect":
            file = f"{KEPT}/{file}"
        path = file.removeprefix("../") if file.startswith("../") else f"{name}/{file}"
        found.setdefault(path, []).append(rule)
    return {path: tuple(dict.fromkeys(rules)) for path, rules in found.items()}


def _made_again(name: str, version: str, source: dict[str, str]) -> dict[str, str] | None:
    archive = cached_source(source.get("sha256", ""), source.get("file", ""))
    if archive is None:
        return None
    with tempfile.TemporaryDirectory(prefix="anymamba-", ignore_cleanup_errors=True) as staging:
        try:
            wheel = make_wheel(name, version, source["sha256"], archive, Path(staging, name))
        except PatchError:
            return None
        with zipfile.ZipFile(wheel) as zipped:
            names = [entry for entry in zipped.namelist() if not entry.endswith(".dist-info/RECORD")]
            return {entry: hashlib.sha256(zipped.read(entry)).hexdigest() for entry in names}


def _recorded(record: Path) -> dict[str, str]:
    """Return the hashes of a RECORD, as hex; compiled files and pip's own notes have none that last."""
    if not record.is_file():
        return {}
    with record.open(encoding="utf-8", errors="replace", newline="") as file:
        rows = [row for row in csv.reader(file) if len(row) == 3 and row[1].startswith("sha256=")]
    return {
        row[0]: base64.urlsafe_b64decode(row[1].removeprefix("sha256=") + "==").hex()
        for row in rows
        if not row[0].endswith((*_PIPS_OWN, ".pyc"))
    }


def _present(root: Path, name: str, info: str) -> dict[str, str]:
    """Return the hashes of what is there now."""
    paths = [entry for entry in root.iterdir() if entry.name.partition(".")[0] in EXTENSIONS[name]]
    paths += [path for folder in (name, info) for path in (root / folder).rglob("*")]
    left_out = {f"{info}/{own}" for own in (*_PIPS_OWN, "RECORD")}
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
        if path.is_file() and "__pycache__" not in path.parts and path.relative_to(root).as_posix() not in left_out
    }


def _licence(metadata: Path) -> str:
    lines = metadata.read_text(encoding="utf-8", errors="replace").splitlines() if metadata.is_file() else []
    headers = lines[: lines.index("")] if "" in lines else lines
    for field in ("License-Expression: ", "License: ", "Classifier: License :: OSI Approved :: "):
        for line in headers:
            if line.startswith(field):
                return line.removeprefix(field).strip()
    return ""


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.is_file() else []
