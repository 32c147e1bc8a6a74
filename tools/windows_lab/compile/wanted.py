"""What is compiled: releases, with which torch and which CUDA headers; and where each rule is tried by leaving it out."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["ARCHITECTURE", "BUILDS", "NOT_TRIED", "SETTINGS", "TRIALS", "Build", "Setting", "Trial", "trials_of"]

ARCHITECTURE = "8.6"
"""The guide's card, an RTX 3090."""


@dataclass(frozen=True)
class Setting:
    """A Windows Python of the laboratory with its torch, and a CUDA tree of `trees`."""

    python: str
    cuda: str


SETTINGS = {
    "guide": Setting("3.10", "11.8"),  # torch 2.1.1, C++17, the guide's CUDA headers
    "middle": Setting("3.10", "12.9"),
    "new": Setting("3.12", "13.5"),  # torch 2.14.1, C++20
    "mixed": Setting("3.10", "13.5"),  # CUDA 13 in C++17
}


@dataclass(frozen=True)
class Build:
    """A release in a setting.

    Attributes
    ----------
    given : bool
        Whether its sources come from --source; else from the package index.
    only : str
        Regular expression of the units wanted; all when empty.
    """

    name: str
    version: str
    setting: str
    given: bool = False
    only: str = ""

    @property
    def key(self) -> str:
        return f"{self.name}-{self.version}-{self.setting}"

    def wants(self, unit: str) -> bool:
        """Return whether this unit is to be compiled."""
        return not self.only or re.search(self.only, unit) is not None


BUILDS = (
    Build("causal_conv1d", "1.4.0", "guide", given=True),
    Build("mamba_ssm", "2.2.2", "guide", given=True),
    Build("causal_conv1d", "1.5.2", "middle"),
    Build("mamba_ssm", "2.2.5", "middle"),
    Build("causal_conv1d", "1.7.0", "new"),
    Build("mamba_ssm", "2.3.2.post1", "new"),
    # CUDA 13 with older sources: the rules for it, and a unit or two
    Build("causal_conv1d", "1.5.2", "mixed", only=r"\.cpp$|_fwd|_update"),
    Build("mamba_ssm", "2.2.5", "mixed", only=r"\.cpp$|fwd_fp32|bwd_fp32_real"),
)


@dataclass(frozen=True)
class Trial:
    """A rule left out of the plan, or a compiler's option that it stands in for put back.

    Attributes
    ----------
    rule : str
    says : str
        Regular expression of the error that must come; the rule's own text has it too.
    units : str
        Regular expression of the units on which it is tried.
    option : str
        Given to the compiler instead (upstream's own architecture).
    """

    rule: str
    says: str
    units: str
    option: str = ""


TRIALS = (
    Trial("alternative-operators", r"C2146: syntax error: missing '\)' before identifier 'and'", r"causal_conv1d\.cpp$"),
    Trial("rocm-in-macro", r'error: "#" not expected here', r"conv1d_(fwd|bwd)\.cu$|scan_(fwd_fp32|bwd_fp32_real)\.cu$"),
    Trial("m-log2e", r'identifier "M_LOG2E" is undefined', r"scan_(fwd_fp32|bwd_fp32_real)\.cu$"),
    Trial("knrows-static", r"error C2131: expression did not evaluate to a constant", r"scan_fwd_fp32\.cu$"),
    Trial(
        "conforming-preprocessor",
        r"fatal error C1189: #error: .*MSVC/cl\.exe with traditional preprocessor is used",
        r"conv1d_fwd\.cu$|scan_fwd_fp32\.cu$",  # with torch 2.14, causal_conv1d_update.cu needs no CCCL
    ),
    Trial("cub-names", r'error: namespace "cub" has no member "(LaneId|CTA_SYNC)"', r"scan_bwd_fp32_real\.cu$"),
    Trial(
        "msvc-guard",
        r"fatal error C1189: #error: .*-- unsupported Microsoft Visual Studio version!",
        r"conv1d_update\.cu$|scan_fwd_fp32\.cu$",
    ),
    Trial(
        "architectures",
        r"nvcc fatal\s*: Unsupported gpu architecture 'compute_53'",
        r"conv1d_update\.cu$|scan_fwd_fp32\.cu$",
        option="-gencode=arch=compute_53,code=sm_53",
    ),
)  # fmt: skip

NOT_TRIED = {
    "bool-switch-static": "no compiler asks for it here; an older Visual Studio was not there to try",
    "kernel-parameters": "a wish, not a fault: nothing fails without it",
    "cpu-torch-version": "of setup.py, which no build of ours runs",
    "nvcc-missing": "of setup.py, which no build of ours runs",
    "triton-requirement": "of pip, not of a compiler",
    "wheel-guess": "of setup.py, which no build of ours runs",
}


def trials_of(build: Build, applied: tuple[str, ...]) -> tuple[Trial, ...]:
    """Return the trials of the rules that a build's plan has, and of upstream's own architectures where they were listed."""
    chosen = []
    for trial in TRIALS:
        if trial.rule not in applied:
            continue
        # setup.py of the newest releases lists only what CUDA 13 knows
        if trial.option and not (
            SETTINGS[build.setting].cuda == "13.5" and not build.version.startswith(("1.7", "2.3"))
        ):
            continue
        chosen.append(trial)
    return tuple(chosen)
