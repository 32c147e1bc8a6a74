"""CUDA 13's headers want cl.exe's new preprocessor."""

from __future__ import annotations

from anymamba.upstream.native.rules import Flags, Rule, Target


def _flags(target: Target) -> Flags:
    return Flags(nvcc=("-Xcompiler", "/Zc:preprocessor"))


RULE = Rule(
    id="conforming-preprocessor",
    compiler="nvcc 13 with cl",
    says="fatal error C1189: #error: MSVC/cl.exe with traditional preprocessor is used",
    reason="CCCL 3 needs a conforming preprocessor; silencing its check instead gives a hundred errors.",
    releases={"causal_conv1d": "", "mamba_ssm": ""},
    flags=_flags,
    wanted=lambda target: target.windows and target.cuda >= (13, 0),
    guide="not mentioned (the guide's CUDA is 11.8), and needed with CUDA 13",
    fault="traditional-preprocessor",
)
