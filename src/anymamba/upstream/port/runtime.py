"""What a redirect module in an installed port calls: where each of upstream's names comes from, decided at import.

1. a reference function (`*_ref`): upstream's own text, which needs no kernel compiler;
2. an operator of `anymamba.ops`, if the module's family has it;
3. upstream's own text, where it is plain (it leads to no kernel) or its compiler can be imported;
4. otherwise a stand-in that raises `MissingOperatorError` when it is used. Importing never fails, not even where a module of
   anymamba's own is broken: libraries import these modules for names that most of their users never call.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from anymamba.errors import MissingOperatorError
from anymamba.upstream.port.families import FAMILIES
from anymamba.upstream.port.home import complete_environment

__all__ = ["Redirect"]


class Redirect:
    """The names of one redirect module.

    Parameters
    ----------
    name : str
        The redirect's module name, such as ``mamba_ssm.ops.triton.layer_norm``.
    original : str
        The name under which upstream's module is kept.
    defined : tuple of str
        The names that upstream's module defines at its top level.
    plain : tuple of str
        Those of them that lead to no kernel.
    imported : mapping of str to str
        Names that it imports from other kernel modules: callers import them from here too.
    """

    def __init__(
        self, name: str, original: str, defined: tuple[str, ...], plain: tuple[str, ...], imported: Mapping[str, str]
    ) -> None:
        self._name = name
        self._original = original
        self._names = dict.fromkeys(defined, name) | dict(imported)
        self._plain = frozenset(plain)
        self._broken = ""
        complete_environment()

    def ours(self) -> dict[str, Any]:
        """Return what can be bound at once: the operators that anymamba has."""
        found: dict[str, Any] = {}
        family = self._name.partition(".ops.")[2]
        for module in map(self._operators, FAMILIES.get(family, ())):
            for name in getattr(module, "__all__", ()):
                if self._names.get(name) == self._name and not name.endswith("_ref"):
                    found.setdefault(name, getattr(module, name))
        return found

    def names(self) -> list[str]:
        """Return every name that upstream's module has."""
        return sorted(self._names)

    def get(self, name: str) -> Any:
        """Return a name that `ours` did not bind (PEP 562)."""
        home = self._names.get(name)
        if home is None:
            raise AttributeError(f"module {self._name!r} has no attribute {name!r}")
        if home != self._name:
            return getattr(importlib.import_module(home), name)
        try:
            original = importlib.import_module(self._original)
            compiler = _compiler(original)
            if compiler is None or name in self._plain:
                return getattr(original, name)
            why = f"{compiler} is not installed"
        except AttributeError as error:
            why = str(error)
        except (
            Exception
        ) as error:  # whatever a kernel compiler raises: a name that nobody uses must not break the import
            why = f"{type(error).__name__}: {error}"
        return self._our_reference(name) or Missing(f"{self._name}.{name}", self._broken or why)

    def _our_reference(self, name: str) -> Any:
        family = self._name.partition(".ops.")[2]
        modules = [self._operators(module) for module in FAMILIES.get(family, ())]
        return next((getattr(module, name) for module in modules if name in getattr(module, "__all__", ())), None)

    def _operators(self, module: str) -> ModuleType | None:
        full = f"anymamba.ops.{module}"
        try:
            return importlib.import_module(full)
        except Exception as error:  # ModuleNotFoundError: this version of anymamba has no such family
            if getattr(error, "name", None) != full:
                self._broken = f"{full} cannot be imported: {type(error).__name__}: {error}"
            return None


class Missing:
    """Stands for a name of upstream's that cannot be had here; any use of it says why."""

    def __init__(self, name: str, why: str) -> None:
        self._anymamba_missing = (name, why)

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raise."""
        raise self._error()

    def __getitem__(self, _: Any) -> Any:
        """Raise (a kernel's launch grid)."""
        raise self._error()

    def __getattr__(self, name: str) -> Any:
        """Raise; special names stay absent, so that inspection and copying work."""
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        raise self._error()

    def __repr__(self) -> str:
        """Say what is missing."""
        return f"<{self._anymamba_missing[0]}: not available here>"

    def _error(self) -> MissingOperatorError:
        name, why = self._anymamba_missing
        return MissingOperatorError(
            f"{name} cannot run here: anymamba has no operator of that name, and upstream's own kernel cannot be used.",
            why=why,
            next_step="install its compiler (pip install triton; on Windows: triton-windows), or ask for the operator",
        )


def _compiler(original: ModuleType) -> str | None:
    """Return the name of the compiler that the kept module had to do without."""
    stand_in = getattr(original, "triton", None)
    return "triton" if getattr(stand_in, "__anymamba_stand_in__", False) else None
