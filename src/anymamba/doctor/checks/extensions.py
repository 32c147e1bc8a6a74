"""Upstream's compiled extensions as they are installed: do they load, and can they work with what is beside them?"""

from __future__ import annotations

import re

from anymamba.doctor.result import Result, Status, Way
from anymamba.machine import Machine

# The C libraries of the systems that upstream's own wheels were made on (its release workflows: Ubuntu 20.04 up to
# mamba_ssm 2.2.4 and causal_conv1d 1.5.0, Ubuntu 22.04 since).
_OLD_WHEELS, _NEW_WHEELS = (2, 31), (2, 35)


def extensions_load(machine: Machine) -> Result | None:
    """Import each in a process of its own: mamba_ssm swallows the error and goes on with None."""
    modules = [one for one in machine.extensions if one.name != "triton"]
    if not modules:
        return None
    broken = [one for one in modules if not one.loads]
    if not broken:
        names = ", ".join(one.name for one in modules)
        return Result("extensions-load", "Compiled extensions", Status.OK, Way.NATIVE, names, "can be imported")
    first = broken[0]
    return Result(
        "extensions-load",
        "Compiled extensions",
        Status.FAIL,
        Way.NATIVE,
        seen=f"{first.name}: {first.problem}",
        wanted="can be imported",
        why=_why(first.problem),
        fix="anymamba install    (or build them again: anymamba build)",
    )


def _why(problem: str) -> str:
    if "undefined symbol" in problem or "specified procedure" in problem:
        return "it was compiled for another torch"
    if "GLIBC" in problem:
        return "it was made on a newer Linux"
    if "cannot open shared object" in problem:
        return "it was compiled for another CUDA than this torch brings"
    if "DLL load failed" in problem:
        return "a DLL it needs is missing, or it was compiled for another torch"
    return "it does not belong to this torch, or is damaged"


def glibc_for_wheels(machine: Machine) -> Result | None:
    """The C library of this Linux against what compiled extensions name: nothing pip installs can change it."""
    here = _release(machine.system.libc)
    if here is None:
        return None
    needs = [(one.glibc, one.name) for one in machine.extensions if one.glibc is not None]
    newest, name = max(needs, default=((0, 0), ""))
    if newest > here:
        return Result(
            "glibc-for-wheels",
            "C library",
            Status.FAIL,
            Way.NATIVE,
            seen=f"{machine.system.libc}; {name} wants glibc {_dotted(newest)}",
            wanted=f"glibc {_dotted(newest)}",
            why="the extension was made on a newer Linux: \"version 'GLIBC_...' not found\"",
            fix="anymamba install    (or build it here: anymamba build)",
        )
    if here < _NEW_WHEELS:
        old = here < _OLD_WHEELS
        return Result(
            "glibc-for-wheels",
            "C library",
            Status.WARN if old else Status.INFO,
            Way.NATIVE,
            seen=f"{machine.system.libc}: too old for upstream's wheels since mamba_ssm 2.2.5"
            if not old
            else f"{machine.system.libc}: too old for upstream's ready wheels",
            wanted=f"glibc {_dotted(_OLD_WHEELS)} (to mamba_ssm 2.2.4), {_dotted(_NEW_WHEELS)} (since)",
            why="they were made on newer systems: \"version 'GLIBC_...' not found\"" if old else "",
            fix="anymamba install    (or build them here: anymamba build)" if old else "",
        )
    return Result("glibc-for-wheels", "C library", Status.OK, Way.NATIVE, machine.system.libc, "new enough")


def matching_generations(machine: Machine) -> Result | None:
    """causal_conv1d changed its extension's arguments; mamba_ssm up to 2.2.4 calls it directly. The port serves them all."""
    mamba, convolution = machine.packages.of_upstream("mamba_ssm"), machine.packages.of_upstream("causal_conv1d")
    if mamba is None or convolution is None or "port" in (mamba.kind, convolution.kind):
        return None
    wants, has = _generation_wanted(mamba.version), _generation(convolution.version)
    if wants is None or has is None or wants == has:
        return None
    return Result(
        "matching-generations",
        "mamba_ssm and causal_conv1d",
        Status.FAIL,
        Way.NATIVE,
        seen=f"mamba_ssm {mamba.version} with causal_conv1d {convolution.version}",
        wanted=f"causal_conv1d {wants}",
        why='the extension takes other arguments: "causal_conv1d_fwd(): incompatible function arguments"',
        fix="anymamba install    (the port takes every generation's arguments)",
    )


def native_needs_card(machine: Machine) -> Result | None:
    """Upstream's own kernels take CUDA tensors only."""
    natives = [one.name for one in machine.packages.upstream if one.kind == "native"]
    torch = machine.torch
    if not natives or torch is None or not torch.imports or torch.cuda_available:
        return None
    return Result(
        "native-needs-card",
        "Upstream on the CPU",
        Status.WARN,
        Way.NATIVE,
        seen=f"{', '.join(natives)} compiled, and torch has no CUDA device",
        wanted="a CUDA device",
        why='upstream\'s kernels stop with "Expected x.is_cuda() to be true" on a CPU',
        fix="anymamba install    (the port computes on the CPU too)",
    )


def _generation(version: str) -> str | None:
    release = _release(version)
    if release is None:
        return None
    if release < (1, 1):
        return "1.0"
    if release < (1, 2):
        return "1.1"
    patch = _release(version, 3)
    return "1.2 to 1.5.0" if patch is not None and patch < (1, 5, 1) else "1.5.1 or newer"


def _generation_wanted(version: str) -> str | None:
    release = _release(version, 3)
    if release is None or release < (1, 0, 0):
        return None
    if release < (1, 1, 0):
        return "1.0"
    if release < (1, 2, 0):
        return "1.1"
    return "1.2 to 1.5.0" if release < (2, 2, 5) else "1.5.1 or newer"


def _release(text: str, parts: int = 2) -> tuple[int, ...] | None:
    found = re.search(r"\d+" + r"\.\d+" * (parts - 1), text)
    return tuple(int(part) for part in found.group(0).split(".")) if found else None


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
