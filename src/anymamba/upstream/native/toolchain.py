"""The compilers of a build: which nvcc of several, which host compiler, in which environment; and what is wrong with them.

The opinions are the doctor's, asked about the machine as the build would see it. What a rule's flags cure is no obstacle.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from anymamba.doctor import Status, Way, examine
from anymamba.machine import Machine
from anymamba.machine._programs import Ask, ask
from anymamba.machine.compilers import Nvcc, VisualStudio, toolkit_root
from anymamba.upstream.native.rules.msvc_guard import first_refused

__all__ = ["Problem", "Toolchain", "choose_toolchain", "cuda_includes", "cuda_libraries", "missing_headers"]


@dataclass(frozen=True)
class Problem:
    """What stands in the way, or might; `fatal`: no minute need be spent compiling."""

    title: str
    seen: str
    why: str
    fix: str
    fatal: bool


@dataclass(frozen=True)
class Toolchain:
    """The programs of a build.

    Attributes
    ----------
    system : str
    nvcc, host, linker, ninja : str
        Their paths; empty when there is none.
    cuda : (int, int)
        nvcc's release.
    cuda_root : str
        The toolkit's folder.
    msc_version : int or None
    launcher : tuple of str
        ccache or sccache, put before compilers.
    environment : mapping
        For the processes (on Windows what vcvarsall sets); empty: this process's.
    """

    system: str
    nvcc: str
    cuda: tuple[int, int]
    cuda_root: str
    host: str
    linker: str
    ninja: str
    msc_version: int | None = None
    launcher: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


# The doctor's checks that a rule's flags answer, that do not concern us (we decode compilers' words leniently), or that
# `missing_headers` asks better, where a build looks.
_CURED = {"studio-for-cuda", "code-page", "build-variables", "build-memory", "toolkit-files"}
# Without these nothing can be compiled, whatever the doctor thinks of them.
_NEEDED = {"ninja-found"}
# Checks of the doctor that stop a build when they fail; others of the native way are warnings here.
_MATTER = {
    "cuda-torch", "visual-studio", "windows-sdk", "host-compiler", "nvcc-found", "nvcc-matches-torch", "nvcc-knows-card",
    "ninja-found", "python-headers", "torch-installed", "torch-imports", "disk-space", "long-paths", "ascii-folders",
}  # fmt: skip

# vcvarsall.bat looks through the disk before it answers.
_PATIENT: Ask = functools.partial(ask, seconds=90)


def choose_toolchain(
    machine: Machine, *, environ: Mapping[str, str] = os.environ, ask: Ask = _PATIENT
) -> tuple[Toolchain, list[Problem]]:
    """Choose compilers on a machine, and name every obstacle with its fix.

    Parameters
    ----------
    machine : Machine
    environ : mapping
    ask : callable
        How programs are run (vcvarsall).
    """
    nvccs = _by_fit(machine)
    seen_as = dataclasses.replace(machine, compilers=dataclasses.replace(machine.compilers, nvcc=nvccs))
    problems = _doctor(seen_as)
    nvcc = nvccs[0] if nvccs else None
    windows = machine.system.name == "Windows"
    host = linker = ""
    msc_version: int | None = None
    environment: dict[str, str] = {}
    if windows:
        host, linker, msc_version, environment, trouble = _microsoft(machine, nvcc, environ, ask)
        problems += trouble
        if host:  # a tree of the user's (DISTUTILS_USE_SDK) is as good as an installed one
            problems = [one for one in problems if one.title not in ("Visual Studio C++", "Windows SDK")]
    else:
        host = linker = _unix_host(environ)
    chosen = Toolchain(
        system=machine.system.name,
        nvcc=nvcc.path if nvcc else "",
        cuda=(nvcc.release if nvcc else None) or (0, 0),
        cuda_root=str(toolkit_root(Path(nvcc.path))) if nvcc else "",
        host=host,
        linker=linker,
        ninja=machine.compilers.ninja.path if machine.compilers.ninja else "",
        msc_version=msc_version,
        launcher=_launcher(environ),
        environment=environment,
    )
    if machine.system.name == "Darwin":
        problems.insert(
            0,
            Problem(
                "System", "macOS", "there is no CUDA for it", "anymamba install    (the port needs none)", fatal=True
            ),
        )
    return chosen, problems


def _by_fit(machine: Machine) -> tuple[Nvcc, ...]:
    """Return the nvccs, those that fit torch's CUDA first: the same release, then the same major one."""
    wanted = (machine.torch.cuda or "") if machine.torch else ""
    major = wanted.partition(".")[0]

    def misfit(nvcc: Nvcc) -> int:
        if not nvcc.release:
            return 3
        return 0 if nvcc.version == wanted else 1 if nvcc.version.partition(".")[0] == major or not wanted else 2

    return tuple(sorted(machine.compilers.nvcc, key=misfit))


def _doctor(machine: Machine) -> list[Problem]:
    problems = []
    for result in examine(machine).about(Way.NATIVE):
        failed = result.status is Status.FAIL or (result.id in _NEEDED and result.status is not Status.OK)
        if result.id in _CURED or not (failed or (result.status is Status.WARN and result.id in _MATTER)):
            continue
        if failed and result.way is not Way.NATIVE and result.id not in _MATTER:
            continue
        problems.append(Problem(result.title, result.seen, result.why, result.fix, fatal=failed))
    return sorted(problems, key=lambda problem: not problem.fatal)


def _unix_host(environ: Mapping[str, str]) -> str:
    for name in (environ.get("CXX", ""), "g++", "c++", "clang++"):
        found = shutil.which(name, path=environ.get("PATH")) if name else None
        if found:
            return found
    return ""


def _launcher(environ: Mapping[str, str]) -> tuple[str, ...]:
    for name in ("sccache", "ccache"):
        found = shutil.which(name, path=environ.get("PATH"))
        if found:
            return (found,)
    return ()


def _microsoft(
    machine: Machine, nvcc: Nvcc | None, environ: Mapping[str, str], ask: Ask
) -> tuple[str, str, int | None, dict[str, str], list[Problem]]:
    """Return cl, link, _MSC_VER, the environment that they run in, and what is wrong."""
    cl = machine.compilers.cl_on_path
    if cl and environ.get("INCLUDE") and environ.get("LIB"):  # a developer prompt, or a portable tree
        return cl, str(Path(cl).with_name("link.exe")), _msc_version(cl, ask), {**environ, "VSLANG": "1033"}, []
    refused = first_refused(nvcc.release) if nvcc and nvcc.release else 10_000
    for studio in machine.compilers.visual_studio:
        for toolset in studio.toolsets:
            if 1900 + int(toolset.split(".")[1]) < refused:
                return _from_studio(studio, toolset, ask)
    for studio in machine.compilers.visual_studio:  # none old enough: the newest, with the guard's flags
        if studio.toolsets:
            return _from_studio(studio, studio.toolsets[0], ask)
    return "", "", None, {}, []


def _msc_version(cl: str, ask: Ask) -> int | None:
    found = re.search(r"\b19\.(\d{2})\.", ask([cl]).error)  # "... Version 19.44.35207 for x64"
    return 1900 + int(found[1]) if found else None


def _from_studio(
    studio: VisualStudio, toolset: str, ask: Ask
) -> tuple[str, str, int | None, dict[str, str], list[Problem]]:
    folder = Path(studio.path, "VC", "Tools", "MSVC", toolset, "bin", "Hostx64", "x64")
    version = ".".join(toolset.split(".")[:2])
    batch = str(Path(studio.path, "VC", "Auxiliary", "Build", "vcvarsall.bat"))
    command = ["cmd.exe", "/d", "/c", "call", batch, "x64", f"-vcvars_ver={version}", "&&", "set"]
    answer = ask(command)
    environment = dict(line.split("=", 1) for line in answer.out.splitlines() if "=" in line and line[0] != "=")
    problems = []
    if not answer.ok or not any(key.upper() == "INCLUDE" for key in environment):
        problems.append(
            Problem(
                "Visual Studio environment",
                f"{batch} gave none",
                answer.error.strip().splitlines()[-1] if answer.error.strip() else "it set no INCLUDE",
                'start from "x64 Native Tools Command Prompt for VS 2022", or repair the installation',
                fatal=True,
            )
        )
    environment["VSLANG"] = "1033"
    return (
        str(folder / "cl.exe"),
        str(folder / "link.exe"),
        1900 + int(toolset.split(".")[1]),
        environment,
        problems,
    )


def cuda_includes(chain: Toolchain, nvidia: Sequence[str]) -> list[str]:
    """Return the folders of CUDA's headers: the toolkit's own, then those of NVIDIA's packages for what it lacks."""
    root = Path(chain.cuda_root)
    candidates = [root / "include", root / "targets" / "x86_64-linux" / "include", root / "Library" / "include"]
    return [str(folder) for folder in candidates if folder.is_dir()] + list(nvidia)


def cuda_libraries(chain: Toolchain) -> list[str]:
    """Return the toolkit's library folders."""
    root = Path(chain.cuda_root)
    candidates = [root / "lib64", root / "lib" / "x64", root / "lib", root / "targets" / "x86_64-linux" / "lib"]
    candidates.append(root / "Library" / "lib")
    return [str(folder) for folder in candidates if folder.is_dir()]


# What torch's CUDA headers include, and the package of NVIDIA's that has it.
_HEADERS = {
    "cuda_runtime.h": "nvidia-cuda-runtime", "cublas_v2.h": "nvidia-cublas", "cusparse.h": "nvidia-cusparse",
    "cusolverDn.h": "nvidia-cusolver",
}  # fmt: skip


def missing_headers(chain: Toolchain, nvidia: Sequence[str]) -> list[Problem]:
    """Name headers and libraries of CUDA that a bare compiler lacks."""
    if not chain.nvcc:
        return []
    folders = [Path(folder) for folder in cuda_includes(chain, nvidia)]
    problems = []
    missing = [header for header in _HEADERS if not any((folder / header).is_file() for folder in folders)]
    if missing:
        suffix = f"-cu{chain.cuda[0]}" if chain.cuda < (13, 0) else ""
        packages = " ".join(_HEADERS[header] + suffix for header in missing)
        problems.append(
            Problem(
                "CUDA headers", f"no {', '.join(missing)} in {chain.cuda_root}", "torch's headers include them",
                f"python -m pip install {packages}", fatal=True,
            )
        )  # fmt: skip
    library = "cudart.lib" if chain.system == "Windows" else "libcudart.so"
    if not any((Path(folder) / library).exists() for folder in cuda_libraries(chain)):
        problems.append(
            Problem(
                "CUDA runtime library", f"no {library} in {chain.cuda_root}", "the extension is linked with it",
                "install the whole CUDA toolkit (conda: cuda-toolkit), not its compiler alone", fatal=True,
            )
        )  # fmt: skip
    return problems
