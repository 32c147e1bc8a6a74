"""The CPU's kernels for norms and SwiGLU: long rows, and results that do not depend on the number of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("numba", reason="numba (the extra anymamba[cpu]) is not installed")

from anymamba.backends import use_backend
from anymamba.backends.cpu import _norm
from anymamba.ops import swiglu
from anymamba.ops.layer_norm import layer_norm_fn
from anymamba.ops.layernorm_gated import layernorm_fn
from oracle import assert_matches_reference


def _tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "RMS norm": (
        layer_norm_fn,
        lambda: {
            "x": _tensor(150, 700), "weight": _tensor(700), "bias": _tensor(700), "residual": _tensor(150, 700),
            "prenorm": True, "is_rms_norm": True,
        },
    ),
    "gated RMS norm": (
        layernorm_fn,
        lambda: {"x": _tensor(150, 700), "weight": _tensor(700), "bias": None, "z": _tensor(150, 700),
                 "norm_before_gate": False, "is_rms_norm": True},
    ),
    "gated layer norm in groups": (
        layernorm_fn,
        lambda: {"x": _tensor(150, 700), "weight": _tensor(700), "bias": _tensor(700), "z": _tensor(150, 700),
                 "group_size": 175},
    ),
    "swiglu": (swiglu, lambda: {"xy": _tensor(150, 1400)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_long_rows_match_the_reference(name: str) -> None:
    torch.manual_seed(0)
    function, arguments = CALLS[name]
    assert_matches_reference(function, arguments(), backend="cpu")


@pytest.mark.parametrize("name", CALLS)
def test_results_are_the_same_bits_on_any_number_of_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_norm, "ELEMENTS_A_THREAD", 1)
    torch.manual_seed(0)
    function, make = CALLS[name]
    arguments = make()
    leaves = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 3, 1):
            torch.set_num_threads(threads)
            with use_backend("cpu"):
                out = function(**arguments)
                out = out if isinstance(out, torch.Tensor) else out[0]
                seen.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    finally:
        torch.set_num_threads(before)
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other))
