"""huggingface_hub is needed by who pushes or pulls a single layer, not by who imports mamba_ssm."""

from __future__ import annotations

import libcst as cst

from anymamba.upstream.patches import Rule
from anymamba.upstream.patches._edits import on_tree, parse, replace_imports

_REPLACEMENT = """\
try:
    from huggingface_hub import PyTorchModelHubMixin
except ImportError:
    class PyTorchModelHubMixin:
        "Stands in for huggingface_hub's class where that is not installed: no hub methods."
"""


def _edit(module: cst.Module) -> cst.Module:
    return replace_imports(module, ["huggingface_hub"], parse(_REPLACEMENT))


RULE = Rule(
    id="huggingface-hub",
    reason="import mamba_ssm must work without huggingface_hub; only from_pretrained and push_to_hub of a layer need it.",
    package="mamba_ssm",
    versions=">=2.2.3",
    files=("modules/mamba2.py",),
    edit=on_tree(_edit),
)
