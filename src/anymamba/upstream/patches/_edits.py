"""What several rules do to a syntax tree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import libcst as cst

from anymamba.upstream.patches import AnchorMovedError

__all__ = ["dotted", "imported_names", "on_tree", "parse", "rebind", "replace_imports", "top_level_imports"]


def on_tree(edit: Callable[[cst.Module], cst.Module]) -> Callable[[str], str]:
    """Return the edit of a text that `edit` makes of its syntax tree (comments and spaces are kept)."""
    return lambda source: edit(cst.parse_module(source)).code


def parse(code: str) -> list[cst.BaseStatement]:
    """Return the statements of a piece of code."""
    return list(cst.parse_module(code).body)


def dotted(node: cst.BaseExpression | None) -> str:
    """Return the dotted name that an expression spells, or "" if it spells none."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        parent = dotted(node.value)
        return f"{parent}.{node.attr.value}" if parent else ""
    return ""


def _module_of(statement: cst.CSTNode, modules: Collection[str]) -> str | None:
    """Return the module that an import statement imports, if it is one of `modules` or inside one."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return None
    line = statement.body[0]
    if isinstance(line, cst.ImportFrom) and not line.relative:
        found = dotted(line.module)
    elif isinstance(line, cst.Import) and len(line.names) == 1:
        found = dotted(line.names[0].name)
    else:
        return None
    return found if any(found == module or found.startswith(f"{module}.") for module in modules) else None


def top_level_imports(module: cst.Module, modules: Collection[str]) -> list[cst.SimpleStatementLine]:
    """Return the top-level statements that import from `modules`."""
    return [s for s in module.body if isinstance(s, cst.SimpleStatementLine) and _module_of(s, modules) is not None]


def imported_names(statement: cst.SimpleStatementLine) -> list[str]:
    """Return the names that an import statement binds."""
    line = statement.body[0]
    if not isinstance(line, cst.Import | cst.ImportFrom) or isinstance(line.names, cst.ImportStar):
        return []
    names = []
    for alias in line.names:
        bound = alias.asname.name if alias.asname is not None else alias.name
        names.append(dotted(bound).partition(".")[0])
    return names


def replace_imports(
    module: cst.Module, modules: Collection[str], replacement: Sequence[cst.BaseStatement]
) -> cst.Module:
    """Put `replacement` where the first top-level import from `modules` is, and drop the others."""
    wanted = top_level_imports(module, modules)
    if not wanted:
        raise AnchorMovedError(f"import of {' or '.join(modules)} at its top level")
    body: list[cst.BaseStatement | cst.BaseCompoundStatement] = []
    for statement in module.body:
        if statement is wanted[0]:
            first, *rest = replacement
            leading = wanted[0].leading_lines
            body += [first.with_changes(leading_lines=[*leading, *getattr(first, "leading_lines", ())]), *rest]
        elif not any(statement is other for other in wanted):
            body.append(statement)
    return module.with_changes(body=body)


def rebind(module: cst.Module, names: Sequence[str]) -> cst.Module:
    """Let the module's functions of these names be those of `anymamba.ops`, from its end on.

    Upstream's definitions stay above, so its classes and reference functions keep working.
    """
    defined = {s.name.value for s in module.body if isinstance(s, cst.FunctionDef)}
    if missing := [name for name in names if name not in defined]:
        raise AnchorMovedError(f"top-level function {' and '.join(missing)}")
    return module.with_changes(body=[*module.body, *parse(f"from anymamba.ops import {', '.join(names)}  # noqa\n")])
