"""Every generation of `causal_conv1d_cuda`'s interface gives what the operator gives."""

from __future__ import annotations

import pytest
import torch

from anymamba.errors import OptionError
from anymamba.extensions import causal_conv1d_cuda as extension
from anymamba.ops import causal_conv1d_fn, causal_conv1d_update

B, D, L, W = 2, 6, 9, 4


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"x": (B, D, L), "weight": (D, W), "bias": (D,), "states": (B, D, W - 1), "dout": (B, D, L)}
    return {name: torch.randn(*shape) for name, shape in shapes.items()}


def test_forward_of_1_0_and_1_1(tensors: dict[str, torch.Tensor]) -> None:
    x, w, b = tensors["x"], tensors["weight"], tensors["bias"]
    seq_idx = torch.arange(L).div(4, rounding_mode="floor").int().expand(B, L)
    torch.testing.assert_close(extension.causal_conv1d_fwd(x, w, b, True), causal_conv1d_fn(x, w, b, activation="silu"))
    torch.testing.assert_close(extension.causal_conv1d_fwd(x, w, b, seq_idx, False), causal_conv1d_fn(x, w, b, seq_idx))


def test_forward_of_1_2_fills_the_final_states(tensors: dict[str, torch.Tensor]) -> None:
    x, w, states = tensors["x"], tensors["weight"], tensors["states"]
    final = torch.empty(B, D, W - 1)
    out = extension.causal_conv1d_fwd(x, w, None, None, states, final, True)
    wanted, wanted_final = causal_conv1d_fn(x, w, None, None, states, True, activation="silu")
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(final, wanted_final)


def test_forward_of_1_5_1_writes_into_out(tensors: dict[str, torch.Tensor]) -> None:
    x, w, b = tensors["x"], tensors["weight"], tensors["bias"]
    out = torch.full_like(x, float("nan"))
    assert extension.causal_conv1d_fwd(x, w, b, None, None, out, None, True) is None
    torch.testing.assert_close(out, causal_conv1d_fn(x, w, b, activation="silu"))


@pytest.mark.parametrize("generation", [6, 7, 10, 12])
def test_backward_of_every_generation_equals_autograd(generation: int, tensors: dict[str, torch.Tensor]) -> None:
    x, w, b, states = (tensors[k].requires_grad_() for k in ("x", "weight", "bias", "states"))
    with_states = generation >= 10
    out = causal_conv1d_fn(x, w, b, None, states if with_states else None, activation="silu")
    wanted = torch.autograd.grad(out, [x, w, b, states], tensors["dout"], allow_unused=True)
    x, w, b, states = (t.detach() for t in (x, w, b, states))
    buffer = torch.full((B, 2 * D, L), float("nan"))
    dx = buffer[:, :D]
    if generation == 6:
        got = extension.causal_conv1d_bwd(x, w, b, tensors["dout"], dx, True)
    elif generation == 7:
        got = extension.causal_conv1d_bwd(x, w, b, tensors["dout"], None, dx, True)
    elif generation == 10:
        got = extension.causal_conv1d_bwd(x, w, b, tensors["dout"], None, states, None, dx, True, True)
    else:
        got = [dx, torch.zeros(D, W), torch.zeros(D), torch.full((B, D, W - 1), float("nan"))]
        assert extension.causal_conv1d_bwd(x, w, b, tensors["dout"], None, states, None, *got, True) is None
    assert got is not None
    assert got[0] is dx
    assert buffer[:, D:].isnan().all()
    for seen, expected in zip(got, wanted):
        torch.testing.assert_close(seen, expected)


def test_update_of_every_generation_changes_the_state_in_place(tensors: dict[str, torch.Tensor]) -> None:
    x, w, b = tensors["x"][..., 0], tensors["weight"], tensors["bias"]
    lengths = torch.tensor([3, 11], dtype=torch.int32)
    rows = torch.tensor([2, 0], dtype=torch.int32)
    out = torch.empty_like(x)
    for given, kept in [
        ((True,), {}),
        ((True, lengths), {"cache_seqlens": lengths}),
        ((True, lengths, rows), {"cache_seqlens": lengths, "conv_state_indices": rows}),
        ((out, True, None, rows), {"conv_state_indices": rows}),
    ]:
        entries = 3 if "conv_state_indices" in kept else B
        state = torch.randn(entries, D, W)
        ours = state.clone()
        got = extension.causal_conv1d_update(x, ours, w, b, *given)
        torch.testing.assert_close(
            out if given[0] is out else got, causal_conv1d_update(x, state, w, b, "silu", **kept)
        )
        assert torch.equal(ours, state)


def test_another_number_of_arguments_is_explained() -> None:
    with pytest.raises(OptionError, match="causal_conv1d_fwd got 6 arguments, but must get 4, 5, 7 or 8"):
        extension.causal_conv1d_fwd(1, 2, 3, 4, 5, 6)
