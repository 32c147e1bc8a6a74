"""`#ifndef USE_ROCM` inside the argument of BOOL_SWITCH: the C++ standard leaves it undefined, and cl.exe refuses."""

from __future__ import annotations

from collections.abc import Sequence

from anymamba.upstream.native.rules import AnchorMovedError, Arguments, Rule
from anymamba.upstream.native.tokens import Edit, Token, edited, tokenize


def _edit(text: str, arguments: Arguments) -> str:
    tokens = tokenize(text)
    edits: list[Edit] = []
    for block in _blocks_inside_macros(text, tokens):
        edits += [Edit(start, end, _blank(text[start:end])) for start, end in block]
    if not edits:
        raise AnchorMovedError("USE_ROCM block inside the argument of a *_SWITCH or DISPATCH_* macro")
    return edited(text, edits)


def _blocks_inside_macros(text: str, tokens: Sequence[Token]) -> list[list[tuple[int, int]]]:
    """Return, for each such block, the stretches of text that are not CUDA's: its directives and the other branch."""
    open_parentheses: list[str] = []  # what stands before each open one
    previous = ""
    nested: list[tuple[bool, bool] | None] = []  # of each open #if: ours? and is its first branch CUDA's?
    blocks: list[list[tuple[int, int]]] = []
    other_since: int | None = None
    for index, token in enumerate(tokens):
        if token.kind == "hash":
            name, condition = _directive(tokens, index)
            start, end = _line(text, token.start, tokens, index)
            if name in ("if", "ifdef", "ifndef"):
                inside = any(word.endswith("_SWITCH") or word.startswith("DISPATCH_") for word in open_parentheses)
                ours = inside and condition == "USE_ROCM" and name in ("ifdef", "ifndef")
                nested.append((True, name == "ifndef") if ours else None)
                if ours:
                    blocks.append([(start, end)])
                    other_since = None if name == "ifndef" else end
            elif name == "else" and nested and (top := nested[-1]) is not None:
                if other_since is not None:
                    blocks[-1].append((other_since, end))
                    other_since = None
                else:
                    blocks[-1].append((start, end))
                    other_since = end
            elif name == "endif" and nested:
                top = nested.pop()
                if top is not None:
                    blocks[-1].append((start if other_since is None else other_since, end))
                    other_since = None
        elif token.directive or token.kind in ("space", "newline", "comment"):
            continue
        elif token.text == "(":
            open_parentheses.append(previous)
        elif token.text == ")" and open_parentheses:
            open_parentheses.pop()
        previous = token.text
    return blocks


def _directive(tokens: Sequence[Token], index: int) -> tuple[str, str]:
    """Return a directive's name and its first word."""
    words: list[str] = []
    for token in tokens[index + 1 :]:
        if token.kind == "newline" or len(words) == 2:
            break
        if token.kind not in ("space", "comment"):
            words.append(token.text)
    name, condition = [*words, "", ""][:2]
    return name, condition


def _line(text: str, start: int, tokens: Sequence[Token], index: int) -> tuple[int, int]:
    """Return the whole logical line of a directive, without its line end."""
    begins = text.rfind("\n", 0, start) + 1
    ends = next((token.start for token in tokens[index:] if token.kind == "newline"), len(text))
    return begins, ends


def _blank(text: str) -> str:
    """Return the line ends of a text: what is after it keeps its line number."""
    return "".join(character for character in text if character in "\r\n")


RULE = Rule(
    id="rocm-in-macro",
    compiler="nvcc with cl",
    says='error: "#" not expected here; error: expected an expression (warning C5101 names the lines)',
    reason="A preprocessor directive inside a macro's argument is undefined in C++; cl.exe hands it on as text.",
    releases={"causal_conv1d": ">=1.3.0,<1.6.1", "mamba_ssm": ">=2.1.0"},
    files={
        "causal_conv1d": ("csrc/causal_conv1d_fwd.cu", "csrc/causal_conv1d_bwd.cu"),
        "mamba_ssm": (
            "csrc/selective_scan/selective_scan_fwd_kernel.cuh",
            "csrc/selective_scan/selective_scan_bwd_kernel.cuh",
        ),
    },
    edit=_edit,
    guide="cut ROCm blocks out of causal_conv1d's two files: holds inside macros only; mamba's two headers need it too, "
    "which the guide does not say; replacing the hipcub includes is unneeded (file scope)",
    fault="rocm-in-macro",
)
