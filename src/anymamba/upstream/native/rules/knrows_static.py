"""`constexpr int kNRows` read inside nested lambdas: cl.exe's C++17 host pass takes it for a variable."""

from __future__ import annotations

from anymamba.upstream.native.rules import AnchorMovedError, Arguments, Flags, Rule, Target
from anymamba.upstream.native.rules._sequences import find
from anymamba.upstream.native.tokens import Edit, code, edited, tokenize


def _edit(text: str, arguments: Arguments) -> str:
    tokens = code(tokenize(text))
    # the one with a number: the kernels' own (= Ktraits::kNRows) is no fault
    places = [
        at
        for at in find(tokens, "constexpr", "int", "kNRows", "=", None, ";")
        if tokens[at + 4].kind == "number" and tokens[at - 1].text != "static"
    ]
    if len(places) != 1:
        raise AnchorMovedError("single `constexpr int kNRows = <number>;`")
    return edited(text, [Edit(tokens[places[0]].start, tokens[places[0]].start, "static ")])


def _flags(target: Target) -> Flags:
    return Flags(nvcc=("-Xcompiler", "/permissive-"))


RULE = Rule(
    id="knrows-static",
    compiler="nvcc with cl, C++17",
    says="error C2131: expression did not evaluate to a constant (read of a variable outside its lifetime)",
    reason="cl.exe's old lambda processor loses that a captured constexpr is constant.",
    releases={"mamba_ssm": ""},
    files={"mamba_ssm": ("csrc/selective_scan/selective_scan_fwd_kernel.cuh",)},
    edit=_edit,
    flags=_flags,
    wanted=lambda target: target.windows and target.standard == "c++17",
    guide="not mentioned, and needed",
    fault="c2131-constant",
)
