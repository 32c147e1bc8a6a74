"""The CPU's convolution: rows and tiles agree, and no number of threads changes a bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba", reason="numba (the extra anymamba[cpu]) is not installed")

from anymamba.backends import use_backend
from anymamba.backends.cpu import causal_conv1d as backend
from anymamba.ops import causal_conv1d_fn


def _gradients(x: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.requires_grad_(), *others]
    with use_backend("cpu"):
        out = causal_conv1d_fn(x, others[0], others[1], None, others[2], activation="silu")
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(-1) / out.shape[-1])]


def _tensors(width: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 70, 300), (70, width), (70,), (2, 70, width - 1)]
    return [torch.randn(*shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("width", [2, 4, 7])
def test_steps_side_by_side_or_channels_side_by_side_give_the_same(width: int) -> None:
    x, *others = _tensors(width)
    rows = _gradients(x.detach(), *others)
    tiles = _gradients(x.detach().transpose(1, 2).contiguous().transpose(1, 2), *others)
    for one, other in zip(rows, tiles):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("layout", ["rows", "tiles"])
def test_results_are_the_same_bits_on_any_number_of_threads(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "STEPS_A_THREAD", 1)
    x, *others = _tensors(4)
    if layout == "tiles":
        x = x.detach().transpose(1, 2).contiguous().transpose(1, 2)
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 3, 2):
            torch.set_num_threads(threads)
            seen.append(_gradients(x.detach(), *others))
    finally:
        torch.set_num_threads(before)
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other))
