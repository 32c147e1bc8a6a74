"""How the CPU kernels see tensors: the memory itself, from the first element on, and the tensor keeps all its rights."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from anymamba.backends import use_backend
from anymamba.backends.cpu._compile import CODES, kernel
from anymamba.ops import causal_conv1d_fn


@kernel
def _doubled(first, after, source, stride, target):
    for i in range(first, after):
        target[i] = source[i * stride] + source[i * stride]


@pytest.mark.parametrize("dtype", [dtype for dtype in CODES if dtype not in (torch.bool, torch.uint8)])
@pytest.mark.parametrize("layout", ["plain", "transposed", "stepped", "expanded"])
def test_a_kernel_reads_the_tensor_where_it_lies(dtype: torch.dtype, layout: str) -> None:
    base = torch.arange(24).to(dtype).reshape(4, 6)
    tensor = {"plain": base, "transposed": base[1:].t(), "stepped": base[1:, ::2], "expanded": base[:1].expand(3, 6)}[
        layout
    ]
    out = torch.zeros(tensor.shape[0], dtype=dtype)
    _doubled(0, tensor.shape[0], tensor, tensor.stride(0), out)
    torch.testing.assert_close(out, tensor[:, 0] + tensor[:, 0])


def test_memory_that_kernels_have_seen_can_still_be_given_back() -> None:
    """FSDP frees the gathered weights of a layer after its forward by resizing their storage."""
    weight = torch.nn.Parameter(torch.ones(3, 2))
    with use_backend("cpu"):
        causal_conv1d_fn(torch.ones(1, 3, 4), weight).sum().backward()
    weight.untyped_storage().resize_(0)
