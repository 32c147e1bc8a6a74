"""How the CPU kernels see tensors: the memory itself, whatever its layout, and the tensor keeps all its rights."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from anymamba.backends import use_backend
from anymamba.backends.cpu._compile import flat
from anymamba.ops import causal_conv1d_fn


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("layout", ["plain", "transposed", "stepped", "expanded"])
def test_the_view_is_the_memory_that_the_tensor_spans(dtype: torch.dtype, layout: str) -> None:
    base = torch.arange(24).to(dtype).reshape(4, 6)
    tensor = {"plain": base, "transposed": base[1:].t(), "stepped": base[1:, ::2], "expanded": base[:1].expand(3, 6)}[
        layout
    ]
    view = flat(tensor)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    assert view.shape == (span,)
    torch.testing.assert_close(torch.from_numpy(view.copy()), torch.as_strided(tensor, (span,), (1,)))
    view[0] = 1
    assert tensor[0, 0] == 1


def test_an_empty_tensor_is_an_empty_view() -> None:
    assert flat(torch.empty(2, 0)).shape == (0,)


def test_the_memory_outlives_the_tensor() -> None:
    assert flat(torch.full((5,), 7.0)).tolist() == [7.0] * 5


def test_memory_that_kernels_have_seen_can_still_be_given_back() -> None:
    """FSDP frees the gathered weights of a layer after its forward by resizing their storage."""
    weight = torch.nn.Parameter(torch.ones(3, 2))
    with use_backend("cpu"):
        causal_conv1d_fn(torch.ones(1, 3, 4), weight).sum().backward()
    weight.untyped_storage().resize_(0)
