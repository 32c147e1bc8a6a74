"""What a native build would do, as a plain value; and every obstacle, before a minute is spent compiling."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from anymamba.errors import MachineError
from anymamba.machine import Machine
from anymamba.machine.folders import cache_folder
from anymamba.upstream.native.rules import Cure, Target, select
from anymamba.upstream.native.rules.msvc_guard import first_refused
from anymamba.upstream.native.tags import nearest, sdist_has_sources, tag_name
from anymamba.upstream.native.toolchain import Problem, Toolchain, choose_toolchain, missing_headers
from anymamba.upstream.native.torch_paths import TorchPaths
from anymamba.upstream.native.wishes import parse_architectures

__all__ = ["JOB_BYTES", "NativePlan", "PackageBuild", "SCHEMA", "every_architecture", "make_native_plan"]  # noqa: RUF022

SCHEMA = "anymamba-build/1"
JOB_BYTES = 4 << 30
"""What one nvcc takes on these sources: 3 to 5 GB, seen."""
_ROOM = 3e9
_DEEPEST_PATH = 110

# (architecture, first CUDA release that knows it, first that does not)
_ARCHITECTURES = (
    ("7.0", (9, 0), (13, 0)), ("7.5", (10, 0), (99, 0)), ("8.0", (11, 0), (99, 0)), ("8.6", (11, 1), (99, 0)),
    ("8.9", (11, 8), (99, 0)), ("9.0", (11, 8), (99, 0)), ("10.0", (12, 8), (99, 0)), ("12.0", (12, 8), (99, 0)),
)  # fmt: skip


@dataclass(frozen=True)
class PackageBuild:
    """One package of a plan.

    Attributes
    ----------
    version, installs : str
        Upstream's, and the wheel's with its local part.
    sources : str
        Where the sources come from.
    cures : tuple of Cure
    folder : str
        Where it is built; the same plan has the same folder, so a build that was cut off can go on.
    """

    name: str
    version: str
    installs: str
    sources: str
    cures: tuple[Cure, ...]
    folder: str


@dataclass(frozen=True)
class NativePlan:
    """A build, before anything is done."""

    packages: tuple[PackageBuild, ...]
    chain: Toolchain
    torch: TorchPaths | None
    target: Target
    jobs: int
    why_jobs: str
    arguments: Mapping[str, int]
    problems: tuple[Problem, ...]

    @property
    def obstacles(self) -> tuple[Problem, ...]:
        """What must be put right first."""
        return tuple(problem for problem in self.problems if problem.fatal)

    def check(self) -> None:
        """Refuse when something is missing.

        Raises
        ------
        MachineError
        """
        if self.obstacles:
            first = self.obstacles[0]
            others = (
                f" Also: {'; '.join(f'{one.title}: {one.seen}' for one in self.obstacles[1:])}."
                if self.obstacles[1:]
                else ""
            )
            raise MachineError(
                f"Nothing was compiled: {first.title}: {first.seen}.",
                why=f"{first.why}.{others}" if first.why else others.strip(),
                next_step=f"{first.fix}; all of it: anymamba build --dry-run",
            )

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "schema": SCHEMA,
            "packages": [
                {
                    "name": package.name, "version": package.version, "installs": package.installs,
                    "sources": package.sources, "folder": package.folder,
                    "rules": [
                        {"id": cure.rule.id, "by": "edit" if cure.flags is None else "flags",
                         "flags": [] if cure.flags is None else [*cure.flags.host, *cure.flags.nvcc]}
                        for cure in package.cures
                    ],
                }
                for package in self.packages
            ],
            "toolchain": {
                key: value for key, value in dataclasses.asdict(self.chain).items() if key != "environment"
            },
            "torch": None if self.torch is None else {"version": self.torch.version, "cuda": self.torch.cuda},
            "architectures": list(self.target.architectures),
            "standard": self.target.standard,
            "jobs": self.jobs,
            "problems": [dataclasses.asdict(problem) for problem in self.problems],
        }  # fmt: skip


def every_architecture(cuda: tuple[int, int]) -> tuple[str, ...]:
    """Return what this toolkit can compile for, with PTX for cards to come."""
    known = [name for name, since, until in _ARCHITECTURES if since <= cuda < until]
    return (*known[:-1], f"{known[-1]}+PTX") if known else ()


def make_native_plan(
    wanted: Mapping[str, str],
    machine: Machine,
    torch: TorchPaths | None,
    *,
    arch: str = "native",
    jobs: int | None = None,
    asked: Sequence[str] = (),
    without: Sequence[str] = (),
    arguments: Mapping[str, int] | None = None,
    given: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    toolchain: tuple[Toolchain, list[Problem]] | None = None,
) -> NativePlan:
    """Work out a build. Nothing is fetched, nothing written.

    Parameters
    ----------
    wanted : mapping
        Package and version, in the order in which they are built.
    machine : Machine
    torch : TorchPaths or None
        None when torch cannot be imported (the doctor's checks say so).
    arch : str
        "native": the cards of this machine; "all": what the toolkit knows; or "8.6,8.9".
    jobs : int, optional
        Compilers at once; default: as many as memory and cores allow.
    asked, without : sequence of str
        Rules, by their ids.
    arguments : mapping, optional
        Of the rules asked for.
    given : Path, optional
        The user's own sources.
    environ : mapping
    toolchain : optional
        Instead of what is found on the machine.
    """
    chain, problems = toolchain or choose_toolchain(machine, environ=environ)
    architectures, trouble = _architectures(arch, machine, chain.cuda)
    problems = [*problems, *trouble]
    if toolchain is None:
        problems += missing_headers(chain, torch.nvidia if torch else ())
    target = Target(
        system=chain.system,
        cuda=chain.cuda,
        msc_version=chain.msc_version,
        standard=torch.standard if torch else "c++17",
        architectures=architectures,
    )
    if chain.msc_version is not None and chain.msc_version >= first_refused(chain.cuda):
        problems.append(
            Problem(
                "Visual Studio for CUDA",
                f"_MSC_VER {chain.msc_version} with CUDA {chain.cuda[0]}.{chain.cuda[1]}",
                "this CUDA does not know it; it will be told to go on (rule msvc-guard; tried with its headers, not its nvcc)",
                'if it fails: the component "MSVC v143 14.38-17.8" in the Visual Studio Installer',
                fatal=False,
            )
        )
    chosen_jobs, why_jobs = _jobs(jobs, machine, environ)
    packages = []
    for name, version in wanted.items():
        cures = tuple(select(name, version, target, asked=asked, without=without))
        packages.append(
            PackageBuild(
                name=name,
                version=version,
                installs=f"{version}+{_local(chain, torch)}",
                sources=_sources(name, version, given),
                cures=cures,
                folder=str(_folder(name, version, chain, torch, target, cures, arguments or {}, given)),
            )
        )
    problems += _places([package.folder for package in packages], machine)
    return NativePlan(
        packages=tuple(packages),
        chain=chain,
        torch=torch,
        target=target,
        jobs=chosen_jobs,
        why_jobs=why_jobs,
        arguments=dict(arguments or {}),
        problems=tuple(sorted(problems, key=lambda problem: not problem.fatal)),
    )


def _architectures(arch: str, machine: Machine, cuda: tuple[int, int]) -> tuple[tuple[str, ...], list[Problem]]:
    if arch == "all":
        return every_architecture(cuda), []
    if arch != "native":
        return parse_architectures(arch), []
    cards = [card for card in machine.driver.cards if card.capability is not None]
    found = sorted({card.capability for card in cards if card.capability is not None})
    if not found:
        nothing = Problem(
            "Card", "none is seen here", "nobody knows for which architecture to compile",
            "--arch 8.6 (the card that will run it), or --arch all", fatal=True,
        )  # fmt: skip
        return (), [nothing]
    return tuple(f"{major}.{minor}" for major, minor in found), []


def _jobs(jobs: int | None, machine: Machine, environ: Mapping[str, str]) -> tuple[int, str]:
    if jobs is not None:
        return max(1, jobs), "--jobs"
    if environ.get("MAX_JOBS", "").isdecimal():
        return max(1, int(environ["MAX_JOBS"])), "MAX_JOBS"
    free = psutil.virtual_memory().available
    by_memory, cores = max(1, int(free // JOB_BYTES)), max(1, machine.system.cores)
    why = f"{cores} cores, {free / 2**30:.0f} GiB of memory free at {JOB_BYTES >> 30} GiB a compiler"
    return min(by_memory, cores), why


def _local(chain: Toolchain, torch: TorchPaths | None) -> str:
    release = ".".join((torch.version if torch else "0").partition("+")[0].split(".")[:2])
    return f"native.cu{chain.cuda[0]}{chain.cuda[1]}.torch{release}"


def _sources(name: str, version: str, given: Path | None) -> str:
    if given is not None:
        return str(given)
    if sdist_has_sources(name, version):
        return "the source archive on the package index"
    offer = nearest(name, version)
    return f"git tag {tag_name(name, version)} (or, without git, {offer.version}: {offer.differs})"


def _folder(
    name: str, version: str, chain: Toolchain, torch: TorchPaths | None, target: Target, cures: Sequence[Cure],
    arguments: Mapping[str, int], given: Path | None,
) -> Path:  # fmt: skip
    facts = [
        chain.nvcc, chain.cuda, chain.host, chain.msc_version, torch and (torch.folder, torch.version, torch.tag),
        dataclasses.asdict(target), [(cure.rule.id, cure.flags is None) for cure in cures], sorted(arguments.items()),
        str(given and given.absolute()),
    ]  # fmt: skip
    key = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:8]
    return cache_folder() / "native" / f"{name}-{version}-{key}"


def _places(folders: Sequence[str], machine: Machine) -> list[Problem]:
    problems = []
    place = Path(folders[0]).parent
    existing = next(folder for folder in (place, *place.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if free < _ROOM:
        problems.append(
            Problem("Free disk", f"{free / 1e9:.1f} GB at {place}", "sources and objects need about 3 GB",
                    "set ANYMAMBA_CACHE_DIR to a folder on another disk", fatal=True)
        )  # fmt: skip
    windows = machine.windows
    longest = max(len(folder) for folder in folders)
    if windows is not None and not windows.long_paths and longest + _DEEPEST_PATH > 260:
        problems.append(
            Problem("Path length", f"{longest} characters before the first file", "cl and nvcc stop at 260",
                    r"setx ANYMAMBA_CACHE_DIR C:\amb", fatal=True)
        )  # fmt: skip
    return problems
