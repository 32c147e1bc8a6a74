"""Without nvcc, setup.py stops at a name that it never gave a value."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from anymamba.upstream.native.rules import Rule
from anymamba.upstream.native.rules._setup_py import never, transform

_HOME = m.Comparison(left=m.Name("CUDA_HOME"), comparisons=[m.ComparisonTarget(m.IsNot(), m.Name("None"))])
_STOP = """
raise SystemExit("nvcc was not found: set CUDA_HOME to a CUDA toolkit of the version that torch was built with")
"""


class _SayIt(cst.CSTTransformer):
    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> cst.If:
        assigns = m.findall(original_node, m.AssignTarget(m.Tuple())) and m.findall(
            original_node, m.Name("bare_metal_version")
        )
        if not m.matches(original_node.test, _HOME) or original_node.orelse is not None or not assigns:
            return updated_node
        return updated_node.with_changes(orelse=cst.Else(cst.IndentedBlock(list(cst.parse_module(_STOP).body))))


RULE = Rule(
    id="nvcc-missing",
    compiler="setup.py",
    says="NameError: name 'bare_metal_version' is not defined",
    reason="It asks for nvcc's version only when it found one, and uses the answer anyway.",
    releases={"causal_conv1d": "", "mamba_ssm": ""},
    files={"causal_conv1d": ("setup.py",), "mamba_ssm": ("setup.py",)},
    edit=transform(_SayIt, "`if CUDA_HOME is not None` that reads bare_metal_version"),
    wanted=never,
    fault="nvcc-missing",
)
