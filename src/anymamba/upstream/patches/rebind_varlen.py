"""causal_conv1d_varlen_states is a Triton kernel upstream; ours needs no Triton, and the module none at import."""

from __future__ import annotations

from anymamba.upstream.patches import Rule
from anymamba.upstream.patches._edits import on_tree, rebind
from anymamba.upstream.patches._originals import triton_optional


def _edit(source: str) -> str:
    return on_tree(lambda module: rebind(module, ["causal_conv1d_varlen_states"]))(triton_optional(source))


RULE = Rule(
    id="rebind-varlen",
    reason="The module imports Triton when it is loaded, for one kernel that anymamba.ops replaces.",
    package="causal_conv1d",
    versions=">=1.4.0",
    files=("causal_conv1d_varlen.py",),
    edit=_edit,
)
