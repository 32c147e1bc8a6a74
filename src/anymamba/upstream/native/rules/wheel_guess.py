"""setup.py looks for a ready wheel on GitHub first, unless a variable is exactly "TRUE"."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from anymamba.upstream.native.rules import Rule
from anymamba.upstream.native.rules._setup_py import never, transform


class _Force(cst.CSTTransformer):
    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> cst.Assign:
        named = m.matches(original_node, m.Assign(targets=[m.AssignTarget(m.Name("FORCE_BUILD"))]))
        return updated_node.with_changes(value=cst.Name("True")) if named else updated_node


RULE = Rule(
    id="wheel-guess",
    compiler="setup.py",
    says="urllib.error.URLError: <urlopen error ...>; InvalidVersion: Invalid version: None; or a wheel for another torch",
    reason="It guesses a wheel's address from torch's version, catches only one of the errors, and takes what it finds.",
    releases={"causal_conv1d": "", "mamba_ssm": ""},
    files={"causal_conv1d": ("setup.py",), "mamba_ssm": ("setup.py",)},
    edit=transform(_Force, "assignment to FORCE_BUILD"),
    wanted=never,
    guide="set CAUSAL_CONV1D_FORCE_BUILD and MAMBA_FORCE_BUILD to TRUE: holds, and only skips this look-up",
    fault="wheel-guess-offline",
)
