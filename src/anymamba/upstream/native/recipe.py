"""What setup.py would compile, read without running it: extension modules and their source files."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from anymamba.errors import SourceError

__all__ = ["Recipe", "read_recipe"]


@dataclass(frozen=True)
class Recipe:
    """One extension module.

    Attributes
    ----------
    module : str
        "selective_scan_cuda".
    sources : tuple of str
        Paths below the source folder.
    headers : tuple of str
        What they may include: when one changes, everything is compiled again.
    requirements : tuple of str
        install_requires, for the wheel of sources that came without metadata.
    """

    module: str
    sources: tuple[str, ...]
    headers: tuple[str, ...]
    requirements: tuple[str, ...] = ()


def read_recipe(source: Path, name: str) -> Recipe:
    """Read the extension of a package from its setup.py.

    Raises
    ------
    SourceError
        setup.py names none, or files that are not there (some source archives were published without them).
    """
    try:
        tree = ast.parse((source / "setup.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise SourceError(f"The setup.py of {name} cannot be read.", why=str(error)) from error
    module, sources, requirements = "", (), ()  # type: str, tuple[str, ...], tuple[str, ...]
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = call.func.id if isinstance(call.func, ast.Name) else ""
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if called == "CUDAExtension" and not module:
            module, sources = "".join(_texts(given.get("name"))), _texts(given.get("sources"))
        elif called == "setup":
            requirements = _texts(given.get("install_requires"))
    if not module or not sources:
        raise SourceError(f"The setup.py of {name} names no CUDAExtension with its sources.")
    if missing := [path for path in sources if not (source / path).is_file()]:
        raise SourceError(
            f"These sources of {name} are not complete: {', '.join(missing)} is missing.",
            why="Some archives on the package index were published without all of csrc/.",
            next_step=f"another release, or the git tag: anymamba source {name}==VERSION",
        )
    headers = sorted(
        path.relative_to(source).as_posix()
        for path in (source / "csrc").rglob("*")
        if path.suffix in (".h", ".cuh", ".hpp")
    )
    return Recipe(module, sources, tuple(headers), requirements)


def _texts(node: ast.expr | None) -> tuple[str, ...]:
    """Return the text literals of an expression, in order."""
    if node is None:
        return ()
    found = [part for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return tuple(str(part.value) for part in sorted(found, key=lambda part: (part.lineno, part.col_offset)))
