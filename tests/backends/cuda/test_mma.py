"""mma.cuh: fragments loaded either way, multiplied by tensor cores or shuffles, are the matrices they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from anymamba.backends.cuda.runtime import Variant, runtime
from cuda_emulator import emulated, needs_emulator
from oracle import relative_error

SOURCE = str(Path(__file__).with_name("mma_product.cu"))
NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
pytestmark = needs_emulator


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda":
        yield "cuda"
    else:
        with emulated():
            yield "cpu"


@pytest.mark.parametrize("dtype", list(NAMES), ids=NAMES.get)
@pytest.mark.parametrize(("a_columns", "b_columns"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("tf32", [False, True])
def test_products_of_tiles(device: str, dtype: torch.dtype, a_columns: bool, b_columns: bool, tf32: bool) -> None:
    if tf32 and (dtype != torch.float32 or a_columns or b_columns):
        pytest.skip("tf32 is a matter of fp32, and of multiplying alone")
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(16, 16, generator=generator).to(device, dtype) for _ in range(2))
    by = torch.rand(16, generator=generator).to(device)
    product, scaled = torch.empty(16, 16, device=device), torch.empty(16, 16, device=device)
    again = torch.empty_like(a)
    variant = Variant.of(
        SOURCE, "mma_product", X=NAMES[dtype], A_COLUMNS=a_columns, B_COLUMNS=b_columns, TF32=tf32
    )  # fmt: skip
    kernel = runtime().load(variant, a.get_device())
    kernel.plan((1, 1, 1), (32, 1, 1), 2 * 16 * 40 * 4)(
        a.data_ptr(), b.data_ptr(), by.data_ptr(), product.data_ptr(), scaled.data_ptr(), again.data_ptr()
    )
    left = (a.T if a_columns else a).double()
    right = b.double() if b_columns else b.T.double()
    exact = dtype == torch.float32 and not tf32
    assert relative_error(product, left @ right) < (2e-6 if exact else 1e-3 if tf32 else 5e-7)
    assert relative_error(again, left @ right @ right) < (4e-6 if exact else 1e-2)
    assert relative_error(scaled, left * by.double() @ right) < (4e-6 if exact else 1e-2)
    if tf32:
        assert relative_error(product, left @ right) > 1e-5
