"""The product is F.linear's, and half precision works on CPU whether torch has a product for it or not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from anymamba.ops import _linear


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_half_on_cpu_is_right_with_and_without_torchs_own_product(
    native: bool, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native and not _linear._cpu_multiplies_half():
        pytest.skip("this torch multiplies no float16 on CPU (torch < 2.2)")
    monkeypatch.setattr(_linear, "_cpu_multiplies_half", lambda: native)
    torch.manual_seed(0)
    x, weight = torch.randn(5, 7).half().requires_grad_(), torch.randn(3, 7).half().requires_grad_()
    bias = torch.randn(3).half() if with_bias else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    got = _linear.linear(x, weight, bias)
    assert got.dtype is torch.float16
    torch.testing.assert_close(got.double(), expected, atol=4e-3, rtol=4e-3)
    grads = torch.autograd.grad(got.float().sum(), (x, weight))
    for grad, right in zip(grads, torch.autograd.grad(expected.sum(), (x, weight))):
        torch.testing.assert_close(grad, right, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("native", [True, False])
def test_einsum_of_half_on_cpu_is_right_too(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if native and not _linear._cpu_multiplies_half():
        pytest.skip("this torch multiplies no float16 on CPU (torch < 2.2)")
    monkeypatch.setattr(_linear, "_cpu_multiplies_half", lambda: native)
    torch.manual_seed(0)
    a, b = torch.randn(2, 3, 5).half(), torch.randn(2, 5, 4).half()
    got = _linear.einsum("bij,bjk->bik", a, b)
    assert got.dtype is torch.float16
    torch.testing.assert_close(got.double(), a.double() @ b.double(), atol=1e-2, rtol=1e-2)
