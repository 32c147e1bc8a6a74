"""transformers is needed by who loads weights from a hub, not by who imports mamba_ssm."""

from __future__ import annotations

import libcst as cst

from anymamba.upstream.patches import AnchorMovedError, Rule
from anymamba.upstream.patches._edits import imported_names, on_tree, top_level_imports


class _Uses(cst.CSTVisitor):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_Name(self, node: cst.Name) -> None:
        self.names.add(node.value)


def _edit(module: cst.Module) -> cst.Module:
    imports = top_level_imports(module, ["transformers"])
    if not imports:
        raise AnchorMovedError("import of transformers at its top level")
    body: list[cst.BaseStatement] = []
    for statement in module.body:
        if any(statement is moved for moved in imports):
            continue
        if isinstance(statement, cst.FunctionDef) and isinstance(statement.body, cst.IndentedBlock):
            uses = _Uses()
            statement.visit(uses)
            needed = [s.with_changes(leading_lines=[]) for s in imports if uses.names & set(imported_names(s))]
            block = statement.body.with_changes(body=[*needed, *statement.body.body])
            statement = statement.with_changes(body=block)
        body.append(statement)
    return module.with_changes(body=body)


RULE = Rule(
    id="transformers-hub",
    reason="import mamba_ssm must work without transformers; only from_pretrained needs it.",
    package="mamba_ssm",
    versions="",
    files=("utils/hf.py",),
    edit=on_tree(_edit),
)
