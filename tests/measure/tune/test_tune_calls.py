"""A call that was caught can be made again with tensors alike: shapes, strides, alignment, dtypes, values of the same kind."""

from __future__ import annotations

import pytest
import torch

from anymamba import backends
from anymamba.measure.tune.calls import SAMPLE, VERBATIM, Recorded, _Tensor, catching
from anymamba.ops import causal_conv1d_fn, selective_state_update


def caught(*arguments: object, **options: object) -> Recorded:
    with catching() as found, backends.use_backend("torch"):
        causal_conv1d_fn(*arguments, **options)  # type: ignore[arg-type]
    ((call, count),) = found
    assert count == 1
    return call


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_tensor_made_again_is_laid_out_as_it_was(large: bool, transposed: bool) -> None:
    size = 300 if large else 9
    tensor = torch.rand(size * size + 3)[3:].view(size, size)  # begins 12 bytes past 16
    tensor = tensor.t() if transposed else tensor
    made = _Tensor.of(tensor).make()
    assert (made.shape, made.stride(), made.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert made.data_ptr() % 16 == tensor.data_ptr() % 16
    assert (tensor.numel() > VERBATIM) == large
    if large:
        assert torch.isin(made, tensor).all()
        assert made.unique().numel() > SAMPLE // 2
    else:
        assert torch.equal(made, tensor)


def test_an_expanded_tensor_stays_one_number_a_row() -> None:
    tensor = torch.rand(4, 1).expand(4, 6)
    made = _Tensor.of(tensor).make()
    assert made.stride() == (1, 0)
    assert torch.equal(made, tensor)


def test_integers_are_kept_whatever_their_number() -> None:
    numbers = torch.arange(VERBATIM + 10)
    assert torch.equal(_Tensor.of(numbers).make(), numbers)


def test_a_call_says_what_it_is() -> None:
    call = caught(torch.rand(2, 6, 10, dtype=torch.bfloat16), torch.rand(6, 4), activation="silu")
    assert (call.backend, call.operator, call.function) == ("torch", "causal_conv1d", "causal_conv1d_forward")
    assert (call.size, call.dtype) == ("2x6x10", torch.bfloat16)


def test_it_gives_what_the_first_one_gave() -> None:
    x, weight = torch.rand(2, 6, 10), torch.rand(6, 4)
    wanted = causal_conv1d_fn(x, weight, activation="silu")
    (out,) = caught(x, weight, activation="silu").ready().results()
    assert torch.allclose(out, wanted)


def test_what_a_call_changes_in_place_is_a_result_and_starts_as_it_was_each_time() -> None:
    state, x = torch.rand(2, 8, 4), torch.rand(2, 8)
    arguments = (x, torch.rand(2, 8), -torch.rand(8, 4), torch.rand(2, 4), torch.rand(2, 4))
    with catching() as found, backends.use_backend("torch"):
        selective_state_update(state.clone(), *arguments)
        selective_state_update(state.clone(), *arguments)
    ((call, count),) = found
    assert count == 2
    ready = call.ready()
    once = [tensor.clone() for tensor in ready.results()]
    again = ready.results()
    assert len(once) == 2  # the output and the state
    assert not torch.equal(once[1].flatten(), state.flatten())
    for seen, wanted in zip(again, once):
        assert torch.equal(seen, wanted)


def test_kinds_are_told_apart_and_counted_also_in_a_backward() -> None:
    x, weight = torch.rand(2, 6, 10, requires_grad=True), torch.rand(6, 4, requires_grad=True)
    with catching() as found, backends.use_backend("torch"):
        for _ in range(3):
            causal_conv1d_fn(x, weight).sum().backward()
        causal_conv1d_fn(x, weight, activation="silu")
    assert [(call.function, count) for call, count in found] == [
        ("causal_conv1d_forward", 3), ("causal_conv1d_backward", 3), ("causal_conv1d_forward", 1)
    ]  # fmt: skip


def test_after_catching_calls_go_their_usual_way() -> None:
    with catching() as found:
        pass
    causal_conv1d_fn(torch.rand(1, 2, 3), torch.rand(2, 4))
    assert found == []
    assert not backends.is_recording()
