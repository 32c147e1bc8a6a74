"""Are mamba_ssm and causal_conv1d installed, and what kind are they?"""

from __future__ import annotations

from anymamba.doctor.result import Result, Status, Way
from anymamba.machine import Machine


def mamba_ssm_installed(machine: Machine) -> Result:
    """mamba_ssm, by kind."""
    return _installed(machine, "mamba_ssm", "selective_scan_cuda")


def causal_conv1d_installed(machine: Machine) -> Result:
    """causal_conv1d, by kind."""
    return _installed(machine, "causal_conv1d", "causal_conv1d_cuda")


def einops_installed(machine: Machine) -> Result | None:
    """Upstream's modules import einops."""
    if machine.packages.version("einops") is not None:
        return None
    return Result(
        "einops-installed",
        "einops",
        Status.WARN,
        Way.BOTH,
        seen="not installed",
        wanted="any",
        why="mamba_ssm imports it",
        fix="python -m pip install einops",
    )


def transformers_for_upstream(machine: Machine) -> Result | None:
    """Upstream's own mamba_ssm up to 2.2.x imports names that transformers 5 has no more; the port repairs that."""
    package, transformers = machine.packages.of_upstream("mamba_ssm"), machine.packages.version("transformers")
    if package is None or package.kind == "port" or transformers is None:
        return None
    if int(transformers.split(".")[0]) < 5 or not package.version.startswith(("1.", "2.0", "2.1", "2.2")):
        return None
    return Result(
        "transformers-for-upstream",
        "transformers",
        Status.WARN,
        Way.NATIVE,
        seen=f"transformers {transformers} with mamba_ssm {package.version} ({package.kind})",
        wanted="below 5 for upstream's own package",
        why="\"cannot import name 'GreedySearchDecoderOnlyOutput'\"",
        fix='python -m pip install "transformers<4.40"    (or: anymamba install)',
    )


def transformers_for_torch(machine: Machine) -> Result | None:
    """Transformers 4.40 and newer call torch.utils._pytree.register_pytree_node, which came with torch 2.2."""
    torch, transformers = machine.torch, machine.packages.version("transformers")
    if torch is None or transformers is None or torch.release >= (2, 2) or torch.version == "unknown":
        return None
    numbers = [int(part) for part in transformers.split(".")[:2] if part.isdigit()]
    if numbers < [4, 40]:
        return None
    return Result(
        "transformers-for-torch",
        "transformers",
        Status.WARN,
        Way.BOTH,
        seen=f"transformers {transformers} with torch {torch.version}",
        wanted="below 4.40 for torch 2.1",
        why="\"module 'torch.utils._pytree' has no attribute 'register_pytree_node'\"",
        fix='python -m pip install "transformers<4.40"',
    )


def transformers_fast_path(machine: Machine) -> Result | None:
    """Transformers' Mamba models look for both packages and take a slow path in Python without."""
    if machine.packages.version("transformers") is None:
        return None
    absent = [name for name in ("mamba_ssm", "causal_conv1d") if machine.packages.of_upstream(name) is None]
    if not absent:
        return None
    return Result(
        "transformers-fast-path",
        "transformers' fast path",
        Status.INFO,
        Way.BOTH,
        seen=f"without {' and '.join(absent)} its Mamba models are slow",
        wanted="mamba_ssm and causal_conv1d",
        fix="anymamba install",
    )


def not_shadowed(machine: Machine) -> Result | None:
    """A folder named like a package in the working folder wins over the installed package."""
    names = machine.folders.shadowed
    if not names:
        return None
    return Result(
        "not-shadowed",
        "Working folder",
        Status.WARN,
        Way.BOTH,
        seen=f"{machine.folders.working} has its own {', '.join(names)}",
        wanted="no folder or file named like a package",
        why="Python imports that instead of the installed package: \"No module named 'selective_scan_cuda'\". A project that "
        "ships its own mamba_ssm on purpose (Vim, VideoMamba) is fine",
        fix="cd ..    (start Python from another folder)",
    )


def _installed(machine: Machine, name: str, extension: str) -> Result:
    identifier = f"{name.replace('_', '-')}-installed"
    package = machine.packages.of_upstream(name)
    if package is None:
        return Result(
            identifier,
            name,
            Status.INFO,
            Way.BOTH,
            "not installed",
            "the port, or a native build",
            fix="anymamba install",
        )
    seen = f"{package.version} ({package.kind}) in {package.where}"
    if package.kind != "foreign":
        return Result(identifier, name, Status.OK, Way.BOTH, seen, "the port, or a native build")
    return Result(
        identifier,
        name,
        Status.WARN,
        Way.BOTH,
        seen=seen,
        wanted="the port, or a native build",
        why=f"it is neither the port nor has it a compiled {extension}: a fork, a checkout, or a wheel built without CUDA",
        fix="anymamba install    (backs up what is there)",
    )
