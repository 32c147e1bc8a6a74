"""The public functions of causal_conv1d are those of anymamba.ops; upstream's classes and references stay."""

from __future__ import annotations

import libcst as cst

from anymamba.upstream.patches import Rule
from anymamba.upstream.patches._edits import on_tree, rebind


def _edit(module: cst.Module) -> cst.Module:
    return rebind(module, ["causal_conv1d_fn", "causal_conv1d_update"])


RULE = Rule(
    id="rebind-convolution",
    reason="Upstream's functions reach the compiled extension through its own autograd classes: CUDA only, certain strides "
    "only, opaque to torch.compile. anymamba.ops has the same functions without these limits.",
    package="causal_conv1d",
    versions="",
    files=("causal_conv1d_interface.py",),
    edit=on_tree(_edit),
)
