"""The rules for upstream's kernel modules, which the port keeps beside its redirects (see `port`).

These modules are long (a syntax tree that keeps every space takes seconds), so the edits replace exactly the text of the
statements that `ast` finds.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from anymamba.upstream.patches import AnchorMovedError, Rule

__all__ = ["TRITON_OPTIONAL", "own_imports", "triton_optional"]


def triton_optional(source: str) -> str:
    """Let the top-level imports of triton fail softly."""
    found = [statement for statement in ast.parse(source).body if "triton" in _imported_packages(statement)]
    if not found:
        raise AnchorMovedError("import of triton at its top level")
    lines = source.splitlines(keepends=True)
    imports = [line for s in found for line in lines[s.lineno - 1 : s.end_lineno]]
    guarded = ["try:\n", *("    " + line for line in imports), "except ImportError:\n"]
    guarded.append("    from anymamba.upstream.port.no_triton import tl, triton\n")
    for statement in reversed(found):
        lines[statement.lineno - 1 : statement.end_lineno] = guarded if statement is found[0] else []
    return "".join(lines)


def _imported_packages(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and not statement.level:
        return [(statement.module or "").partition(".")[0]]
    return []


TRITON_OPTIONAL = Rule(
    id="triton-optional",
    reason="The reference functions beside the kernels need no Triton; without it only a kernel's launch may fail.",
    package="",
    versions="",
    files=("**/*.py",),
    edit=triton_optional,
    hint="triton",
)


def own_imports(moved: Mapping[str, str]) -> Rule:
    """Return the rule that lets the kept modules import one another instead of the redirects.

    Parameters
    ----------
    moved : mapping
        From a module's public name to the name under which it is kept.
    """

    def edit(source: str) -> str:
        found = [s for s in ast.walk(ast.parse(source)) if isinstance(s, ast.ImportFrom) and s.module in moved]
        if not found:
            raise AnchorMovedError("import of another kernel module")
        lines = source.splitlines(keepends=True)
        for statement in found:
            line = lines[statement.lineno - 1]
            before, module, after = line.partition(f" {statement.module} ")
            if not module or statement.level:
                raise AnchorMovedError(f"import of {statement.module} on one line")
            lines[statement.lineno - 1] = f"{before} {moved[statement.module or '']} {after}"
        return "".join(lines)

    return Rule(
        id="own-imports",
        reason="Upstream's kernels must call upstream's kernels, not the redirects that stand in their place.",
        package="",
        versions="",
        files=("**/*.py",),
        edit=edit,
        hint="mamba_ssm.ops",
    )
