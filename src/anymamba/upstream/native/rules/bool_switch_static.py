"""The guide's edit of BOOL_SWITCH, for compilers that ask for it."""

from __future__ import annotations

from anymamba.upstream.native.rules import AnchorMovedError, Arguments, Rule
from anymamba.upstream.native.rules._sequences import find
from anymamba.upstream.native.tokens import Edit, code, edited, tokenize


def _edit(text: str, arguments: Arguments) -> str:
    tokens = code(tokenize(text))
    places = [
        tokens[at].start
        for at in find(tokens, "constexpr", "bool", "CONST_NAME", "=")
        if tokens[at].directive == "define" and tokens[at - 1].text != "static"
    ]
    if len(places) < 2:
        raise AnchorMovedError("macro with `constexpr bool CONST_NAME =` in both branches")
    return edited(text, [Edit(start, start, "static ") for start in places])


RULE = Rule(
    id="bool-switch-static",
    compiler="cl older than those tried, if any",
    says="error C2131: expression did not evaluate to a constant",
    reason="The guide edits it; Visual Studio 2022 17.14 neither needs it nor is content with it alone (see knrows-static).",
    releases={"mamba_ssm": ""},
    files={"mamba_ssm": ("csrc/selective_scan/static_switch.h",)},
    edit=_edit,
    asked=True,
    guide="`static constexpr bool`: unneeded with Visual Studio 2022 17.14, and not sufficient; older ones were not tried",
    fault="c2131-constant",
)
