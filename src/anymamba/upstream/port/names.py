"""What upstream's kernel modules define, and which of it runs without a kernel compiler; read from the text, not run."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Names", "read_names"]

_COMPILERS = {"triton", "tl", "tilelang", "cutlass", "cute", "T"}


@dataclass
class Names:
    """The top level of a kernel module.

    Attributes
    ----------
    defined : list of str
        In the order of the text.
    imported : dict of str to str
        Names taken from other kernel modules, and which.
    plain : list of str
        Those of `defined` that neither are kernels nor lead to one.
    """

    defined: list[str] = field(default_factory=list)
    imported: dict[str, str] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)


def read_names(modules: Mapping[str, Path]) -> dict[str, Names]:
    """Read the kernel modules of a package.

    Parameters
    ----------
    modules : mapping of str to Path
        Module names and their files.
    """
    names: dict[str, Names] = {}
    uses: dict[tuple[str, str], set[str]] = {}
    for module, path in modules.items():
        names[module] = Names()
        _read(ast.parse(path.read_text(encoding="utf-8")).body, module, names[module], uses, set(modules))
    kernels = {key for key, used in uses.items() if used & _COMPILERS or "torch.cuda" in used}
    while True:  # what leads to a kernel is none the less bound to it
        found = {
            (module, name)
            for (module, name), used in uses.items()
            if (module, name) not in kernels
            and any((names[module].imported.get(other, module), other) in kernels for other in used)
        }
        if not found:
            break
        kernels |= found
    for module, there in names.items():
        there.plain = [name for name in there.defined if (module, name) not in kernels]
    return names


def _read(
    statements: list[ast.stmt], module: str, names: Names, uses: dict[tuple[str, str], set[str]], modules: set[str]
) -> None:
    def define(name: str, node: ast.AST) -> None:
        if name not in names.defined:
            names.defined.append(name)
        uses.setdefault((module, name), set()).update(_used(node))

    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            define(statement.name, statement)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                if isinstance(target, ast.Name):
                    define(target.id, statement)
        elif isinstance(statement, ast.ImportFrom):
            source = _absolute(statement, module)
            if source in modules:
                names.imported.update((alias.asname or alias.name, source) for alias in statement.names)
        elif isinstance(statement, ast.If):
            _read([*statement.body, *statement.orelse], module, names, uses, modules)
        elif isinstance(statement, ast.Try):
            handlers = [inner for handler in statement.handlers for inner in handler.body]
            _read([*statement.body, *handlers, *statement.orelse], module, names, uses, modules)


def _used(node: ast.AST) -> set[str]:
    """Return the names that a piece of code mentions, and `torch.cuda` if it mentions that."""
    used = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            used.add(inner.id)
        elif isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
            used.add(f"{inner.value.id}.{inner.attr}")
    return used


def _absolute(statement: ast.ImportFrom, module: str) -> str:
    if not statement.level:
        return statement.module or ""
    return ".".join([*module.split(".")[: -statement.level], *filter(None, [statement.module])])
