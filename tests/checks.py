"""Checks of torch's own that have moved between its releases, under one name."""

from __future__ import annotations

from typing import Any

import pytest

try:
    from torch.library import opcheck
except ImportError:  # torch < 2.4 has it among its own test helpers, which want one package more

    def opcheck(op: Any, args: tuple[Any, ...]) -> None:
        pytest.importorskip("expecttest", reason="opcheck of torch < 2.4 needs the package expecttest")
        from torch.testing._internal.optests import opcheck as internal

        # Nor can that torch functionalise a custom operator that writes into an input, so nothing is traced then.
        which = (
            ("test_schema", "test_autograd_registration", "test_faketensor") if op.default._schema.is_mutable else "ALL"
        )
        internal(op, args, test_utils=which)


__all__ = ["opcheck"]
