"""Checks of torch's own that have moved between its releases, under one name."""

from __future__ import annotations

from typing import Any

import pytest

try:
    from torch.library import opcheck as _opcheck
except ImportError:  # torch < 2.4 has it among its own test helpers, which want one package more

    def _opcheck(op: Any, args: tuple[Any, ...]) -> Any:
        pytest.importorskip("expecttest", reason="opcheck of torch < 2.4 needs the package expecttest")
        from torch.testing._internal.optests import opcheck as internal

        # Nor can that torch functionalise a custom operator that writes into an input, so nothing is traced then.
        which = (
            ("test_schema", "test_autograd_registration", "test_faketensor") if op.default._schema.is_mutable else "ALL"
        )
        internal(op, args, test_utils=which)


__all__ = ["opcheck"]


def opcheck(op: Any, args: tuple[Any, ...]) -> None:
    """Check an operator's registration.

    The schema check compares inputs of every inner operator before and after; an output that is not yet written may hold a
    NaN, which equals nothing, itself included. A real mutation is found every time, such a NaN only now and then.
    """
    for attempt in range(6):
        try:
            _opcheck(op, args)
        except Exception as error:
            if attempt == 5 or "not defined as mutable but was mutated" not in str(error):
                raise
        else:
            return
