"""What the code in the working folder needs of us: a fork of mamba_ssm that must win, VMamba's scan modules."""

from __future__ import annotations

from anymamba.doctor.result import Result, Status, Way
from anymamba.machine import Machine
from anymamba.upstream.port.families import EXTENSIONS as PORTED

_OF_PORT = (*PORTED["mamba_ssm"], *PORTED["causal_conv1d"])


def fork_expected(machine: Machine) -> Result | None:
    """A project that uses names only a fork has must import the fork, and the fork our extension modules."""
    project = machine.project
    if project is None or not (project.fork or project.imported_is_fork):
        return None
    name, file = project.fork[0] if project.fork else ("", "")
    wanted = "the project's own mamba_ssm, on our selective_scan_cuda and causal_conv1d_cuda"
    imported = project.imported or "none"
    if project.imported_is_fork:
        missing = [one for one in project.missing if one in _OF_PORT]
        if not missing:
            return Result("fork-expected", "Fork of mamba_ssm", Status.OK, Way.BOTH, f"imported: {imported}", wanted)
        return Result(
            "fork-expected",
            "Fork of mamba_ssm",
            Status.FAIL,
            Way.PORT,
            seen=f"imported: {imported}; not installed: {', '.join(missing)}",
            wanted=wanted,
            why="the fork calls these extension modules",
            fix="anymamba install --with fork",
        )
    place = project.vendored[0] if project.vendored else ""
    return Result(
        "fork-expected",
        "Fork of mamba_ssm",
        Status.WARN,
        Way.BOTH,
        seen=f"{file} uses {name}; imported: {imported}",
        wanted=wanted,
        why="upstream's own package has no such name: \"unexpected keyword argument 'bimamba_type'\"",
        fix=f'anymamba install --with fork && python -m pip install --no-deps --no-build-isolation -e "{_parent(place)}"'
        "    (with MAMBA_SKIP_CUDA_BUILD=TRUE)"
        if place
        else "anymamba install --with fork    (and put the project's mamba_ssm first on PYTHONPATH)",
    )


def extensions_wanted(machine: Machine) -> Result | None:
    """Extension modules that the project's sources import and that are not installed."""
    project = machine.project
    if project is None:
        return None
    # those that setup.py builds or try-imports are in no one's way when the port serves another of them
    own = [name for name in project.missing if name in PORTED["selective_scan"]]
    ours = [name for name in project.missing if name in _OF_PORT]
    if own:
        file = dict(project.imports)[own[0]]
        return Result(
            "extensions-wanted",
            "VMamba's scan modules",
            Status.WARN,
            Way.PORT,
            seen=f"{file} imports {own[0]}; not installed: {', '.join(own)}",
            wanted="installed",
            why=f"\"No module named '{own[0]}'\", or a slow fallback in Python",
            fix="anymamba install --with vmamba",
        )
    if ours and not project.fork and not machine.packages.upstream:
        file = dict(project.imports)[ours[0]]
        return Result(
            "extensions-wanted",
            "Extension modules",
            Status.WARN,
            Way.PORT,
            seen=f"{file} imports {ours[0]}; not installed: {', '.join(ours)}",
            wanted="installed",
            why=f"\"No module named '{ours[0]}'\"",
            fix="anymamba install",
        )
    return None


def _parent(package: str) -> str:
    return package.rpartition("/")[0] or "."
