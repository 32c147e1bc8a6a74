"""`cub::LaneId` and `cub::CTA_SYNC`, which CUDA 13's CUB no longer has."""

from __future__ import annotations

from anymamba.upstream.native.rules import AnchorMovedError, Arguments, Rule
from anymamba.upstream.native.rules._sequences import find
from anymamba.upstream.native.tokens import Edit, code, edited, tokenize

# The blocks of this scan are one-dimensional and whole warps, so a thread's place in its warp is this.
_REPLACEMENTS = {"LaneId": "(threadIdx.x % 32)", "CTA_SYNC": "__syncthreads()"}


def _edit(text: str, arguments: Arguments) -> str:
    tokens = code(tokenize(text))
    edits = [
        Edit(tokens[at].start, tokens[at + 4].end, replacement)
        for name, replacement in _REPLACEMENTS.items()
        for at in find(tokens, "cub", "::", name, "(", ")")
    ]
    if not edits:
        raise AnchorMovedError("call of cub::LaneId or cub::CTA_SYNC")
    return edited(text, edits)


RULE = Rule(
    id="cub-names",
    compiler="nvcc 13",
    says='error: namespace "cub" has no member "LaneId" (and "CTA_SYNC")',
    reason="CCCL 3, which CUDA 13 brings, removed these helpers; CUDA's own words do the same with every CUDA.",
    releases={"mamba_ssm": "<2.2.6"},
    files={"mamba_ssm": ("csrc/selective_scan/reverse_scan.cuh",)},
    edit=_edit,
    wanted=lambda target: target.cuda >= (13, 0),
    guide="not mentioned (the guide's CUDA is 11.8), and needed with CUDA 13",
    fault="cccl3-names",
)
