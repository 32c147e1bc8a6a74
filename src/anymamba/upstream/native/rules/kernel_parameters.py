"""kNRows, kNThreads and kNItems by hand, as the guide's tuning section has it, without breaking the kernel's own rules."""

from __future__ import annotations

from collections.abc import Sequence

from anymamba.errors import OptionError
from anymamba.upstream.native.rules import AnchorMovedError, Arguments, Rule
from anymamba.upstream.native.rules._sequences import find
from anymamba.upstream.native.tokens import Edit, Token, code, edited, tokenize

PARAMETERS = {"kNRows": (1, 2, 4), "kNThreads": (32, 64, 128, 256), "kNItems": (4, 8, 16, 32)}
_LAUNCHES = (
    "selective_scan_fwd_launch",
    "selective_scan_bwd_launch",
    "causal_conv1d_fwd_launch",
    "causal_conv1d_bwd_launch",
)
# The host code counts chunks of 2048; a kernel's own chunk is kNThreads * kNItems.
_CHUNK = 2048


def _edit(text: str, arguments: Arguments) -> str:
    _check(arguments)
    tokens = code(tokenize(text))
    edits = _rows(tokens, arguments) + _launches(tokens, arguments)
    if not edits:
        raise AnchorMovedError(f"{' or '.join(arguments)} to set")
    return edited(text, edits)


def _check(arguments: Arguments) -> None:
    if not arguments:
        raise OptionError("kernel-parameters needs values.", next_step="--rule kernel-parameters,kNThreads=64")
    for name, value in arguments.items():
        if value not in PARAMETERS.get(name, ()):
            allowed = "; ".join(f"{known}: {', '.join(map(str, values))}" for known, values in PARAMETERS.items())
            raise OptionError(f"{name}={value} is no kernel parameter.", why=f"What there is: {allowed}.")


def _rows(tokens: Sequence[Token], arguments: Arguments) -> list[Edit]:
    if "kNRows" not in arguments:
        return []
    for at in find(tokens, "constexpr", "int", "kNRows", "=", None, ";"):
        if tokens[at + 4].kind == "number":
            guard = (
                ' TORCH_CHECK(params.dim % kNRows == 0 && params.n_groups == 1, "built with kNRows = ", kNRows, ": '
                'dim must be a multiple of it, with one group of B and C");'
            )
            value = tokens[at + 4]
            return [
                Edit(value.start, value.end, str(arguments["kNRows"])),
                *([Edit(tokens[at + 5].end, tokens[at + 5].end, guard)] if arguments["kNRows"] > 1 else []),
            ]
    return []


def _launches(tokens: Sequence[Token], arguments: Arguments) -> list[Edit]:
    edits: list[Edit] = []
    limit: int | None = None
    rocm = _rocm_stretches(tokens)
    for at, token in enumerate(tokens):
        if (
            token.text == "seqlen"
            and tokens[at + 1 : at + 3]
            and tokens[at + 1].text == "<"
            and tokens[at + 2].text == "="
        ):
            limit = int(tokens[at + 3].text)
        elif token.text == "else" and tokens[at + 1].text == "{":
            limit = None
        elif token.text in _LAUNCHES and tokens[at + 1].text == "<" and tokens[at + 2].kind == "number":
            if any(start <= token.start < end for start, end in rocm):
                continue
            threads, items = tokens[at + 2], tokens[at + 4]
            scan = token.text.startswith("selective_scan")
            new_threads = (
                max(int(threads.text), arguments.get("kNThreads", 0)) if scan else arguments.get("kNThreads", 0)
            )
            new_items = arguments.get("kNItems", int(items.text)) if scan else 0
            if scan:
                _check_chunk(new_threads, new_items, limit)
            if new_threads and new_threads != int(threads.text):
                edits.append(Edit(threads.start, threads.end, str(new_threads)))
            if new_items and new_items != int(items.text):
                edits.append(Edit(items.start, items.end, str(new_items)))
    return edits


def _check_chunk(threads: int, items: int, limit: int | None) -> None:
    chunk = threads * items
    if limit is None and chunk != _CHUNK:
        raise OptionError(
            f"kNThreads={threads} with kNItems={items} makes chunks of {chunk} steps for long sequences.",
            why=f"The host code counts chunks of {_CHUNK}: results would be wrong.",
            next_step=f"values whose product is {_CHUNK}, or smaller kNThreads without kNItems",
        )
    if limit is not None and not limit <= chunk <= _CHUNK:
        raise OptionError(
            f"kNThreads={threads} with kNItems={items} makes chunks of {chunk} steps where sequences have up to {limit}.",
            why=f"Such a sequence must fit into one chunk, of at most {_CHUNK}.",
            next_step=f"values whose product is from {limit} to {_CHUNK}",
        )


def _rocm_stretches(tokens: Sequence[Token]) -> list[tuple[int, int]]:
    """Return the #else branches of `#ifndef USE_ROCM`: other threads, other numbers."""
    stretches: list[tuple[int, int]] = []
    nested: list[tuple[bool, int | None]] = []
    for at, token in enumerate(tokens):
        if token.kind != "hash":
            continue
        name = tokens[at + 1].text
        if name in ("if", "ifdef", "ifndef"):
            nested.append((name == "ifndef" and tokens[at + 2].text == "USE_ROCM", None))
        elif name == "else" and nested:
            nested[-1] = (nested[-1][0], token.start)
        elif name == "endif" and nested:
            ours, since = nested.pop()
            if ours and since is not None:
                stretches.append((since, token.start))
    return stretches


RULE = Rule(
    id="kernel-parameters",
    compiler="nobody",
    says="(nothing: it is a wish, such as --rule kernel-parameters,kNThreads=64,kNRows=2)",
    reason="The guide tunes these by hand; unchecked values give wrong results, so the rule keeps what the host code assumes.",
    releases={"causal_conv1d": "", "mamba_ssm": ""},
    files={
        "causal_conv1d": ("csrc/causal_conv1d_fwd.cu", "csrc/causal_conv1d_bwd.cu"),
        "mamba_ssm": (
            "csrc/selective_scan/selective_scan_fwd_kernel.cuh",
            "csrc/selective_scan/selective_scan_bwd_kernel.cuh",
        ),
    },
    edit=_edit,
    every_file=False,
    asked=True,
    guide="kNRows 1 to 2 or 4, kNThreads 32 to 64 or 128: possible within limits; `anymamba` chooses its own kernels' by "
    "measuring",
)
