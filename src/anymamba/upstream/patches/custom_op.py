"""`torch.library.custom_op` came with torch 2.4; before it, a function is called as it is."""

from __future__ import annotations

import ast

from anymamba.upstream.patches import AnchorMovedError, Rule

_ANCHOR = "torch.library.custom_op("
_REPLACEMENT = """
try:
    _custom_op = torch.library.custom_op
except AttributeError:  # torch before 2.4, which cannot compile through such a function anyway
    def _custom_op(name, *, mutates_args):
        return lambda function: function
"""


def _edit(source: str) -> str:
    # by the text of the statements, as in amp_decorators
    tree = ast.parse(source)
    imports = [s for s in tree.body if isinstance(s, ast.Import) and [alias.name for alias in s.names] == ["torch"]]
    decorated = [
        decorator
        for statement in tree.body
        if isinstance(statement, ast.FunctionDef)
        for decorator in statement.decorator_list
        if (ast.get_source_segment(source, decorator) or "").startswith(_ANCHOR)
    ]
    if len(imports) != 1 or not decorated:
        raise AnchorMovedError("`import torch`, and functions decorated with torch.library.custom_op at its top level")
    lines = source.splitlines(keepends=True)
    for decorator in decorated:
        lines[decorator.lineno - 1] = lines[decorator.lineno - 1].replace(_ANCHOR, "_custom_op(", 1)
    lines.insert(imports[0].end_lineno or imports[0].lineno, _REPLACEMENT)
    return "".join(lines)


RULE = Rule(
    id="custom-op",
    reason="torch.library.custom_op is there since torch 2.4; with an older torch the package could not be imported.",
    package="causal_conv1d",
    versions=">=1.5.1",
    files=("cpp_functions.py",),
    edit=_edit,
)
