"""What the package offers is what it says it offers: `__all__` exists, is true, and everything in it explains itself."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import anymamba
from anymamba import distributed, ops


def modules() -> list[str]:
    """Return the names of all modules that import without numba, Triton or a card."""
    found = pkgutil.walk_packages(anymamba.__path__, "anymamba.", onerror=lambda name: None)
    return [info.name for info in found if ".cpu" not in info.name and not info.name.endswith("__main__")]


@pytest.mark.parametrize("name", modules())
def test_every_name_in_all_is_there_and_every_module_says_what_it_is(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no opening words"
    listed = list(getattr(module, "__all__", []))
    assert [entry for entry in listed if not hasattr(module, entry)] == []
    assert len(listed) == len(set(listed))


def public_operators() -> list[str]:
    return [name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))]


@pytest.mark.parametrize("name", public_operators())
def test_every_operator_documents_its_arguments_with_shapes(name: str) -> None:
    function = getattr(ops, name)
    text = inspect.getdoc(function) or ""
    assert text, f"{name} has no docstring"
    if name.startswith("_") or name.endswith("_ref"):
        return  # a reference has the arguments of the operator it is named after
    if "see there" in text:
        assert re.findall(r"`(\w+)`", text)[0] in ops.__all__
        return
    assert "Parameters" in text
    assert "Returns" in text
    assert "(" in text.partition("Parameters")[2], f"{name} gives no shapes"
    for parameter in inspect.signature(function).parameters:
        assert parameter in text, f"{name} does not document {parameter}"


@pytest.mark.parametrize(
    "name", [name for name in distributed.__all__ if inspect.isfunction(getattr(distributed, name))]
)
def test_every_function_for_many_ranks_documents_its_arguments(name: str) -> None:
    function = getattr(distributed, name)
    text = inspect.getdoc(function) or ""
    assert "Returns" in text or "Yields" in text
    for parameter in inspect.signature(function).parameters:
        assert parameter in text.partition("Parameters")[2], f"{name} does not document {parameter}"


def test_nothing_heavy_is_imported_with_the_package() -> None:
    code = "import sys, anymamba, anymamba.errors; print([m for m in ('torch', 'numba', 'rich', 'numpy') if m in sys.modules])"
    source = str(Path(anymamba.__path__[0]).parent)
    seen = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r}); {code}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert seen.stdout.strip() == "[]"


def test_the_exported_names_are_those_of_the_families() -> None:
    families = [
        importlib.import_module(f"anymamba.ops.{info.name}")
        for info in pkgutil.iter_modules(ops.__path__)
        if not info.name.startswith("_")
    ]
    assert all(isinstance(family, ModuleType) for family in families)
    offered = {name for family in families for name in family.__all__}
    assert set(ops.__all__) <= offered | {info.name for info in pkgutil.iter_modules(ops.__path__)}
