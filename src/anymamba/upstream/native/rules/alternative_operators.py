"""`and`, `or`, `not` as words: plain C++, but not to cl.exe in its C++17 default."""

from __future__ import annotations

from anymamba.upstream.native.rules import AnchorMovedError, Arguments, Flags, Rule, Target
from anymamba.upstream.native.tokens import Edit, edited, tokenize

_OPERATORS = {
    "and": "&&", "or": "||", "not": "!", "xor": "^", "bitand": "&", "bitor": "|", "compl": "~",
    "and_eq": "&=", "or_eq": "|=", "xor_eq": "^=", "not_eq": "!=",
}  # fmt: skip
# In #error, #pragma and #warning these are words of a sentence.
_CODE = ("", "define", "if", "elif")


def _edit(text: str, arguments: Arguments) -> str:
    edits = [
        Edit(token.start, token.end, _OPERATORS[token.text])
        for token in tokenize(text)
        if token.kind == "identifier" and token.text in _OPERATORS and token.directive in _CODE
    ]
    if not edits:
        raise AnchorMovedError(f"operator spelled as a word ({', '.join(_OPERATORS)})")
    return edited(text, edits)


def _flags(target: Target) -> Flags:
    return Flags(host=("/permissive-",))


RULE = Rule(
    id="alternative-operators",
    compiler="cl, C++17",
    says="error C2146: syntax error: missing ')' before identifier 'and'",
    reason="cl.exe knows `and` only in its standard-conforming mode, which C++17 does not switch on (C++20 does).",
    releases={"causal_conv1d": ">=1.2.0,<1.6.1"},
    files={"causal_conv1d": ("csrc/causal_conv1d.cpp",)},
    edit=_edit,
    flags=_flags,
    wanted=lambda target: target.windows and target.standard == "c++17",
    guide="edit `and` to `&&`: holds in C++17; the flag /permissive- does it too",
    fault="alternative-operators",
)
