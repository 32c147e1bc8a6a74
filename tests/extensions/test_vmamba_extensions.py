"""VMamba's extension modules, called as VMamba, Mamba-YOLO and their like call them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

from anymamba.errors import OptionError, ShapeError
from anymamba.extensions import selective_scan_cuda_ndstate, selective_scan_cuda_oflex
from anymamba.ops import selective_scan_fn
from oracle import GRADIENT_BOUND, OUTPUT_BOUND, relative_error

LIKE_CORE = ["selective_scan_cuda_core", "selective_scan_cuda_nrow", "selective_scan_cuda_ndrows"]


def draw(dtype: torch.dtype = torch.float32, shared: int = 1, seqlen: int = 140) -> dict[str, Any]:
    """Four directions of one image, as cross-scans lay them out: groups = 4."""
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "u": tensor(2, 8, seqlen).to(dtype),
        "delta": (0.3 * tensor(2, 8 // shared, seqlen)).to(dtype),
        "A": -torch.rand(8, 2, generator=generator) - 0.1,
        "B": tensor(2, 4, 2, seqlen).to(dtype),
        "C": tensor(2, 4, 2, seqlen).to(dtype),
        "D": tensor(8),
        "delta_bias": 0.1 * tensor(8 // shared),
    }


class Scan(torch.autograd.Function):
    """The autograd.Function that such projects write around their extension."""

    @staticmethod
    def forward(ctx: Any, module: ModuleType, options: tuple[Any, ...], *call: Any) -> torch.Tensor:
        out, x, *rest = module.fwd(*call, True, *options)
        assert not rest
        ctx.module, ctx.nrows = module, options[0]
        ctx.save_for_backward(*call, x)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        *call, x = ctx.saved_tensors
        return None, None, *ctx.module.bwd(*call, dout.contiguous(), x, True, ctx.nrows)


def truth(call: dict[str, Any], shared: int = 1) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The scan in float64 with every argument spelled out, and its leaves."""
    leaves = {name: value.detach().double().requires_grad_() for name, value in call.items()}
    whole = dict(leaves)
    if shared > 1:
        whole["delta"] = leaves["delta"].repeat_interleave(shared, 1)
        whole["delta_bias"] = leaves["delta_bias"].repeat_interleave(shared, 0)
    if whole["A"].dim() == 1:
        whole |= {"A": whole["A"][:, None], "B": whole["B"][:, :, None], "C": whole["C"][:, :, None]}
    return selective_scan_fn(**whole, delta_softplus=True), list(leaves.values())


def check(
    module: ModuleType, options: tuple[Any, ...], call: dict[str, Any], out: torch.dtype, shared: int = 1
) -> None:
    dtype = call["u"].dtype
    leaves = [value.detach().requires_grad_() for value in call.values()]
    seen = Scan.apply(module, options, *leaves)
    wanted, wanted_leaves = truth(call, shared)
    assert seen.dtype == out
    assert relative_error(seen, wanted) <= OUTPUT_BOUND[out]
    weights = torch.randn_like(wanted)
    gradients = torch.autograd.grad(seen, leaves, weights.to(out))
    for leaf, gradient, other in zip(leaves, gradients, torch.autograd.grad(wanted, wanted_leaves, weights)):
        assert (gradient.dtype, gradient.shape) == (leaf.dtype, leaf.shape)
        assert relative_error(gradient, other) <= GRADIENT_BOUND[dtype]


@pytest.mark.parametrize("nrows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LIKE_CORE)
def test_core_and_its_rows_give_the_operators_outputs_and_gradients(name: str, dtype: torch.dtype, nrows: int) -> None:
    check(importlib.import_module(f"anymamba.extensions.{name}"), (nrows,), draw(dtype), dtype)


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("out_float", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_oflex_returns_the_dtype_asked_for_and_lets_channels_share_a_delta(
    dtype: torch.dtype, out_float: bool, shared: int
) -> None:
    out = torch.float32 if out_float else dtype
    check(selective_scan_cuda_oflex, (1, out_float), draw(dtype, shared), out, shared)


def test_oflex_in_fp32_is_not_a_rounded_half() -> None:
    call = draw(torch.bfloat16)
    wide, _ = selective_scan_cuda_oflex.fwd(*call.values(), True, 1, True)
    assert not torch.equal(wide, wide.bfloat16().float())
    assert wide.is_contiguous()


def test_ndstate_has_no_dimension_for_the_states() -> None:
    call = draw()
    call |= {"A": call["A"][:, 0], "B": call["B"][:, :, 0], "C": call["C"][:, :, 0]}
    check(selective_scan_cuda_ndstate, (1,), call, torch.float32)
    _, x = selective_scan_cuda_ndstate.fwd(*call.values(), True, 1)
    assert x.shape == (2, 8, 1, 2)
    with pytest.raises(ShapeError, match="A has shape"):
        selective_scan_cuda_ndstate.fwd(*draw().values(), True, 1)


def test_longer_than_a_chunk_and_without_what_is_optional() -> None:
    call = draw(seqlen=2100) | {"D": None, "delta_bias": None}
    out, x = selective_scan_cuda_oflex.fwd(*call.values(), False, 1, True)
    assert x.shape == (2, 8, 2, 4)
    gradients = selective_scan_cuda_oflex.bwd(*call.values(), torch.ones_like(out), x, False, 1)
    assert len(gradients) == 7
    assert gradients[5] is None and gradients[6] is None


@pytest.mark.parametrize("change", [{"delta": torch.zeros(2, 3, 140)}, {"delta": torch.zeros(2, 4, 140)}])
def test_a_delta_that_cannot_be_shared_is_named(change: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ShapeError, match="delta"):
        selective_scan_cuda_oflex.fwd(*(draw() | change).values(), True, 1, False)


def test_rows_must_be_some() -> None:
    with pytest.raises(OptionError, match="nrows"):
        selective_scan_cuda_oflex.fwd(*draw().values(), True, 0, False)
