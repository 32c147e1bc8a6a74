"""The whole table of choices: for every registered operator, what each backend says to a typical call.

The operators are those that the modules of `anymamba.ops` define; the typical calls are those of
`anymamba.measure.cases`, made once on the reference backend to see what they ask of `choose`.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any

import torch

from anymamba import backends
from anymamba.backends import Choice, Operator

__all__ = ["SCHEMA", "Row", "calls_asked", "operators", "table"]

SCHEMA = "anymamba-backends/1"
"""Name and version of the JSON form; the number changes when a field changes its meaning or goes away."""


@dataclass(frozen=True)
class Row:
    """One operator's choices for one device and dtype."""

    operator: str
    call: str
    choices: tuple[Choice, ...]
    chosen: str | None

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "operator": self.operator,
            "call": self.call,
            "chosen": self.chosen,
            "refusals": {choice.backend: choice.refusal for choice in self.choices},
        }


def operators() -> list[Operator]:
    """Return every operator that a module of `anymamba.ops` defines, in the modules' order, each once."""
    import anymamba.ops

    found: dict[str, Operator] = {}
    for module in sorted(pkgutil.iter_modules(anymamba.ops.__path__), key=lambda module: module.name):
        if not module.name.startswith("_"):
            for value in vars(importlib.import_module(f"anymamba.ops.{module.name}")).values():
                if isinstance(value, Operator):
                    found.setdefault(value.name, value)
    return list(found.values())


def table(device: torch.device, dtype: torch.dtype) -> list[Row]:
    """Return a row for every operator.

    Parameters
    ----------
    device : torch.device
        Must exist on this machine: the calls are made there.
    dtype : torch.dtype
        Of the calls' activations.
    """
    asked = calls_asked(device, dtype)
    wanted = backends.requested()
    rows = []
    for operator in operators():
        call = asked.get(operator.name)
        if call is None:
            rows.append(Row(operator.name, "", (), None))
            continue
        answers = tuple(backends.choices(operator, call))
        able = [answer.backend for answer in answers if answer.refusal is None]
        if wanted is not None:  # asked for by name: then it or nothing
            able = [name for name in able if name == wanted]
        rows.append(Row(operator.name, backends.describe(call), answers, able[0] if able else None))
    return rows


def calls_asked(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Make the first case of each operator that has this dtype, and return the call that `choose` saw, by operator."""
    from anymamba.measure.cases import Draw, all_cases

    asked: dict[str, Any] = {}
    for case in all_cases():
        if case.operator.name in asked or dtype not in case.dtypes:
            continue
        with backends.recording() as calls, backends.use_backend("reference"), torch.no_grad():
            case.function(**case.arguments(Draw(dtype, device)))
        for operator, call in calls:
            asked.setdefault(operator.name, call)
    return asked
