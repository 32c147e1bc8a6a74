"""On a CPU build of torch, setup.py parses the CUDA version None."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from anymamba.upstream.native.rules import Rule
from anymamba.upstream.native.rules._setup_py import never, transform

_VERSION = m.Attribute(value=m.Attribute(value=m.Name("torch"), attr=m.Name("version")), attr=m.Name("cuda"))


class _OrZero(cst.CSTTransformer):
    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        if not m.matches(original_node, m.Call(func=m.Name("parse"), args=[m.Arg(_VERSION)])):
            return updated_node
        return updated_node.with_changes(args=[cst.Arg(cst.parse_expression('torch.version.cuda or "0.0"'))])


RULE = Rule(
    id="cpu-torch-version",
    compiler="setup.py",
    says="packaging.version.InvalidVersion: Invalid version: None (or TypeError: expected string or bytes-like object)",
    reason="torch.version.cuda is None in a CPU build, which a build for CI or a sdist may well use.",
    releases={"causal_conv1d": "", "mamba_ssm": ""},
    files={"causal_conv1d": ("setup.py",), "mamba_ssm": ("setup.py",)},
    edit=transform(_OrZero, "parse(torch.version.cuda)"),
    wanted=never,
    fault="cpu-torch-build",
)
