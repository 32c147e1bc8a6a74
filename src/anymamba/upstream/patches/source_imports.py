"""mamba_ssm 2.0.0 was published with imports from `src`, the package's name in its authors' own tree."""

from __future__ import annotations

import ast

from anymamba.upstream.patches import AnchorMovedError, Rule


def _edit(source: str) -> str:
    # by the text of the statement: some of these files are long, and a tree that keeps every space takes seconds
    found = [s for s in ast.walk(ast.parse(source)) if isinstance(s, ast.ImportFrom) and _from_src(s)]
    if not found:
        raise AnchorMovedError("import from src")
    lines = source.splitlines(keepends=True)
    for statement in found:
        line = lines[statement.lineno - 1]
        lines[statement.lineno - 1] = line.replace("from src.", "from mamba_ssm.", 1)
    return "".join(lines)


def _from_src(statement: ast.ImportFrom) -> bool:
    return not statement.level and (statement.module or "").startswith("src.")


RULE = Rule(
    id="source-imports",
    reason="This release imports its own modules as src.*, a package that exists in its authors' tree only.",
    package="mamba_ssm",
    versions="==2.0.0",
    files=("**/*.py",),
    edit=_edit,
    hint="from src.",
)
