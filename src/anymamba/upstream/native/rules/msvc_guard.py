"""A Visual Studio newer than the CUDA toolkit knows."""

from __future__ import annotations

from anymamba.doctor.checks.compilers import MSC_LIMITS
from anymamba.upstream.native.rules import Flags, Rule, Target


def first_refused(cuda: tuple[int, int]) -> int:
    """Return the first _MSC_VER that this CUDA refuses."""
    return next(limit for start, limit in MSC_LIMITS if cuda >= start)


def _wanted(target: Target) -> bool:
    return target.windows and target.msc_version is not None and target.msc_version >= first_refused(target.cuda)


def _flags(target: Target) -> Flags:
    nvcc = ["-allow-unsupported-compiler"]
    if target.cuda < (12, 4):  # the STL guards itself as well (STL1002)
        nvcc.append("-D_ALLOW_COMPILER_AND_STL_VERSION_MISMATCH")
    return Flags(nvcc=tuple(nvcc))


RULE = Rule(
    id="msvc-guard",
    compiler="nvcc 11.8 with Visual Studio 17.10 or newer",
    says="fatal error C1189: #error: -- unsupported Microsoft Visual Studio version!; then error STL1002",
    reason="CUDA 11.8 was made before Visual Studio 17.10 and refuses it, and its STL refuses CUDA before 12.4.",
    releases={"causal_conv1d": "", "mamba_ssm": ""},
    flags=_flags,
    wanted=_wanted,
    guide="not mentioned; needed with CUDA 11.8 and a Visual Studio 2022 of 2024 or later",
    fault="msvc-too-new",
)
