"""Facts about the Python environment that a port goes into, told by that environment's own interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from anymamba.errors import MachineError
from anymamba.upstream.port.families import EXTENSIONS

__all__ = ["WHEN_TOLD", "Environment", "Installed", "inspect_environment", "run_in"]


@dataclass(frozen=True)
class Installed:
    """A distribution that is there.

    Attributes
    ----------
    kind : str
        "port" (ours), "editable", or "package".
    location : str
        The folder that holds its metadata.
    hides : bool
        That folder is searched before site-packages (a user folder, PYTHONPATH): this is imported, whatever lies there.
    """

    version: str
    kind: str
    location: str
    hides: bool = False


@dataclass(frozen=True)
class Environment:
    """Where a port would go, and what is there."""

    python: str
    prefix: str
    purelib: str
    platlib: str
    externally_managed: bool
    has_pip: bool
    torch: str | None
    anymamba: str | None
    installed: dict[str, Installed]
    conda: bool = False


_PROBE = """
import importlib.metadata as metadata, importlib.util as util, json, os, sys, sysconfig
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
def installed(name):
    try:
        dist = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    files = [str(f) for f in dist.files or ()]
    url = json.loads(dist.read_text("direct_url.json") or "{}")
    editable = bool(url.get("dir_info", {}).get("editable")) or any("__editable__" in f for f in files)
    port = dist.read_text("anymamba-provenance.json") is not None
    kind = "port" if port else "editable" if editable else "package"
    location = os.path.normcase(os.path.realpath(dist.locate_file("")))
    before = places.index(site) if site in places else len(places)
    hides = location in places[:before]
    return {"version": dist.version, "kind": kind, "location": str(dist.locate_file("")), "hides": hides}
paths = sysconfig.get_paths()
places = [os.path.normcase(os.path.realpath(place)) for place in sys.path]
site = os.path.normcase(os.path.realpath(paths["purelib"]))
managed = sys.prefix == sys.base_prefix and os.path.exists(os.path.join(paths["stdlib"], "EXTERNALLY-MANAGED"))
spec = util.find_spec("anymamba")
print("anymamba-probe:" + json.dumps({
    "python": sys.executable, "prefix": sys.prefix, "purelib": paths["purelib"], "platlib": paths["platlib"],
    "externally_managed": managed, "conda": os.path.isdir(os.path.join(sys.prefix, "conda-meta")),
    "has_pip": util.find_spec("pip") is not None, "torch": version("torch"),
    "anymamba": spec and spec.origin, "installed": {n: installed(n) for n in sys.argv[1:]},
}))
"""


WHEN_TOLD = """
import runpy, sys
if sys.stdin.read(1) != "g":
    sys.exit("whoever started this is gone")
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""For `-c`: run a module, but not before the parent has noted our number. A parent that dies earlier closes the pipe."""


def run_in(
    python: str,
    arguments: list[str],
    variables: Mapping[str, str] | None = None,
    started: Callable[[int], object] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter in an empty working directory, so that no file lying about is imported; UTF-8 both ways.

    Parameters
    ----------
    python : str
    arguments : list of str
    variables : mapping, optional
        Environment variables to set besides this process's.
    started : callable, optional
        Is told the process's number; only then is "g" written to the process's standard input (see `WHEN_TOLD`).
    """
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:backslashreplace", **(variables or {})}
    if "PYTHONPATH" in environment:  # relative entries meant the caller's folder
        entries = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(entry).absolute()) for entry in entries if entry)
    with tempfile.TemporaryDirectory(prefix="anymamba-", ignore_cleanup_errors=True) as nowhere:
        process = subprocess.Popen(
            [python, *arguments],
            cwd=nowhere,
            env=environment,
            stdin=subprocess.DEVNULL if started is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
        try:
            if started is not None:
                started(process.pid)
            stdout, stderr = process.communicate(None if started is None else "g")
        except BaseException:  # Ctrl-C: what it was doing must have ended before anyone puts things in order
            process.kill()
            process.communicate()
            raise
        return subprocess.CompletedProcess([python, *arguments], process.returncode, stdout, stderr)


def inspect_environment(python: Path) -> Environment:
    """Ask an interpreter about its environment.

    Raises
    ------
    MachineError
        When it cannot be run.
    """
    try:
        result = run_in(str(python), ["-c", _PROBE, *EXTENSIONS])
    except OSError as error:
        raise MachineError(f"{python} cannot be run.", why=str(error), next_step="--python PATH") from error
    answer = next((line for line in result.stdout.splitlines() if line.startswith("anymamba-probe:")), None)
    if result.returncode != 0 or answer is None:
        raise MachineError(f"{python} cannot tell about its environment.", why=result.stderr.strip()[-500:])
    facts = json.loads(answer.partition(":")[2])
    facts["installed"] = {name: Installed(**entry) for name, entry in facts["installed"].items() if entry}
    return Environment(**facts)
