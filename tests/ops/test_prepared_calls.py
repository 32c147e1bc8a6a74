"""A call like one before goes straight to the backend's prepared function; anything different does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from anymamba.backends import recording, use_backend
from anymamba.backends.torch import causal_conv1d as backend
from anymamba.errors import ShapeError
from anymamba.ops import _prepared, causal_conv1d_fn, causal_conv1d_update
from anymamba.ops.causal_conv1d import _prepared_forward as _prepared_of_convolution


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let backend torch prepare calls on the CPU; the list tells what happened."""
    happened: list[str] = []

    def prepare(operator: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        happened.append(f"prepared {operator.name}")

        class Call:
            def __call__(self, *tensors: Any) -> torch.Tensor:
                happened.append("called")
                return tensors[0] * 0 + 7

            def backward(self, *tensors: Any) -> tuple[torch.Tensor | None, ...]:
                happened.append("backward")
                return (*(None if tensor is None else torch.full_like(tensor, 3) for tensor in tensors[:-1]),)

        return Call()

    monkeypatch.setattr(backend, "prepare", prepare, raising=False)
    _prepared.forget()
    _prepared.DEVICES.add("cpu")
    with use_backend("torch"):
        yield happened
    _prepared.DEVICES.discard("cpu")
    _prepared.forget()


def test_the_second_call_alike_is_the_prepared_one(prepared: list[str]) -> None:
    x, weight = torch.randn(1, 2, 5), torch.randn(2, 3)
    first = causal_conv1d_fn(x, weight)
    assert not first.eq(7).all()
    assert causal_conv1d_fn(torch.randn(1, 2, 5), weight).eq(7).all()
    assert prepared == ["prepared causal_conv1d", "called"]


def test_while_choices_are_noted_every_call_makes_one(prepared: list[str]) -> None:
    x, weight = torch.randn(1, 2, 5), torch.randn(2, 3)
    causal_conv1d_fn(x, weight)
    with recording() as calls:
        causal_conv1d_fn(x, weight)
    assert [operator.name for operator, _ in calls] == ["causal_conv1d"]
    assert "called" not in prepared


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x[..., :4],
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.double(),
        lambda x: torch.nn.functional.pad(x, (1, 0)).flatten()[1:11].view(1, 2, 5),  # another alignment
    ],
)
def test_a_call_that_differs_is_not(prepared: list[str], other: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x, weight = torch.randn(1, 2, 5), torch.randn(2, 3)
    causal_conv1d_fn(x, weight)
    causal_conv1d_fn(other(x), weight)
    assert "called" not in prepared


def test_a_differentiable_call_alike_uses_the_prepared_backward(prepared: list[str]) -> None:
    x, weight = torch.randn(1, 2, 5, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    causal_conv1d_fn(x, weight)
    gradients = torch.autograd.grad(causal_conv1d_fn(x, weight).sum(), (x, weight))
    assert all(gradient.eq(3).all() for gradient in gradients)
    assert prepared == ["prepared causal_conv1d", "called", "backward"]


def test_options_and_backends_are_told_apart(prepared: list[str]) -> None:
    x, weight = torch.randn(1, 2, 5), torch.randn(2, 3)
    causal_conv1d_fn(x, weight)
    causal_conv1d_fn(x, weight, activation="silu")
    causal_conv1d_fn(x, weight, return_final_states=True)
    with use_backend("reference"):
        causal_conv1d_fn(x, weight)
    assert "called" not in prepared


def test_a_wrong_call_is_still_refused_and_never_remembered(prepared: list[str]) -> None:
    for _ in range(2):
        with pytest.raises(ShapeError):
            causal_conv1d_update(torch.randn(1, 2), torch.zeros(1, 2, 1), torch.randn(2, 4))
    assert prepared == []


def test_calls_of_one_kind_are_told_at_a_glance(prepared: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "CHECKS_ALIGNMENT", True, raising=False)
    x, weight = torch.randn(1, 2, 5), torch.randn(2, 3)
    causal_conv1d_fn(x, weight)
    alike = _prepared_of_convolution.alike
    known = alike((torch.randn(1, 2, 5), weight, None), None) is not None
    assert known == (_prepared.same_kind((x,)) is not None)
    assert alike((x, weight, None), "silu") is None
    assert alike((x, weight, torch.randn(2)), None) is None
    for other in (x[..., :4], x.half(), x.transpose(1, 2).contiguous().transpose(1, 2), torch.nn.Parameter(x)):
        assert alike((other, weight, None), None) is None
    with use_backend("reference"):
        assert alike((x, weight, None), None) is None


def test_tensors_that_begin_elsewhere_go_the_longer_way(prepared: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "CHECKS_ALIGNMENT", True, raising=False)

    def prepare(operator: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        return lambda x, *others: None if x.data_ptr() & 15 else x * 0 + 7

    monkeypatch.setattr(backend, "prepare", prepare)
    x, weight = torch.randn(1, 2, 5), torch.randn(2, 3)
    causal_conv1d_fn(x, weight)
    assert causal_conv1d_fn(x, weight).eq(7).all()
    shifted = torch.nn.functional.pad(x, (1, 0)).flatten()[1:11].view(1, 2, 5)
    assert not causal_conv1d_fn(shifted, weight).eq(7).all()


def test_same_kind_works_with_every_pytorch_that_has_the_guards() -> None:
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    assert _prepared._guards_work == hasattr(guards, "TensorGuards")
