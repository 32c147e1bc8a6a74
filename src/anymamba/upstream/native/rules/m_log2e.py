"""`M_LOG2E`: a constant of POSIX that Microsoft's <cmath> hides."""

from __future__ import annotations

from anymamba.upstream.native.rules import AnchorMovedError, Arguments, Flags, Rule, Target
from anymamba.upstream.native.tokens import Edit, edited, tokenize

_LOG2E = "1.4426950408889634074"  # 1 / ln 2, to more digits than a double holds


def _edit(text: str, arguments: Arguments) -> str:
    edits = [
        Edit(token.start, token.end, _LOG2E)
        for token in tokenize(text)
        if token.kind == "identifier" and token.text == "M_LOG2E" and token.directive == ""
    ]
    if not edits:
        raise AnchorMovedError("use of M_LOG2E")
    return edited(text, edits)


def _flags(target: Target) -> Flags:
    return Flags(host=("-D_USE_MATH_DEFINES",), nvcc=("-D_USE_MATH_DEFINES",))


RULE = Rule(
    id="m-log2e",
    compiler="nvcc with cl",
    says='error: identifier "M_LOG2E" is undefined',
    reason="Microsoft's <cmath> defines M_LOG2E only with _USE_MATH_DEFINES.",
    releases={"mamba_ssm": ""},
    files={
        "mamba_ssm": (
            "csrc/selective_scan/selective_scan_fwd_kernel.cuh",
            "csrc/selective_scan/selective_scan_bwd_kernel.cuh",
        )
    },
    edit=_edit,
    flags=_flags,
    guide="define M_LOG2E in both kernel headers: holds; the flag -D_USE_MATH_DEFINES does it without an edit",
    fault="m-log2e",
)
