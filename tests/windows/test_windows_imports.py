"""Import orders: on Windows, a DLL is found or not depending on what was loaded before it."""

from __future__ import annotations

import pytest

from windows_helpers import Run

MODULES = ("torch", "anymamba.ops", "anymamba.extensions.selective_scan_cuda")
COMPUTE = """
import torch
from anymamba.ops import selective_scan_fn
u = torch.randn(1, 4, 8, requires_grad=True)
selective_scan_fn(u, torch.rand(1, 4, 8), -torch.rand(4, 2), torch.randn(1, 2, 8), torch.randn(1, 2, 8)).sum().backward()
print(tuple(u.grad.shape))
"""


@pytest.mark.parametrize("first", MODULES)
def test_any_of_them_may_be_first(first: str, python: Run) -> None:
    rest = [module for module in MODULES if module != first]
    result = python(["-c", "\n".join(f"import {module}" for module in (first, *rest)) + COMPUTE])
    assert result.returncode == 0, result.stderr.decode(errors="replace")
    assert result.stdout.strip() == b"(1, 4, 8)"


@pytest.mark.parametrize("order", [("torch", "numba"), ("numba", "torch")], ids=" ".join)
def test_numba_and_torch_share_the_process_in_any_order(order: tuple[str, ...], python: Run) -> None:
    pytest.importorskip("numba")
    result = python(["-c", "\n".join(f"import {module}" for module in order) + COMPUTE], {"ANYMAMBA_BACKEND": "cpu"})
    assert result.returncode == 0, result.stderr.decode(errors="replace")
    assert result.stdout.strip() == b"(1, 4, 8)"
