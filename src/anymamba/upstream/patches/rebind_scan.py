"""The public scan functions of mamba_ssm are those of anymamba.ops; upstream's classes and references stay."""

from __future__ import annotations

import libcst as cst

from anymamba.upstream.patches import Rule
from anymamba.upstream.patches._edits import on_tree, rebind


def _edit(module: cst.Module) -> cst.Module:
    return rebind(module, ["selective_scan_fn", "mamba_inner_fn"])


RULE = Rule(
    id="rebind-scan",
    reason="Upstream's functions reach the compiled extension through its own autograd classes: CUDA only, contiguous only, "
    "opaque to torch.compile. anymamba.ops has the same functions without these limits.",
    package="mamba_ssm",
    versions="",
    files=("ops/selective_scan_interface.py",),
    edit=on_tree(_edit),
)
