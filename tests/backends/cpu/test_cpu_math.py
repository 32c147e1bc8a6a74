"""The scalar functions of the CPU kernels, measured against float64 over the range in which they are used."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="numba (the extra anymamba[cpu]) is not installed")

from anymamba.backends.cpu._compile import kernel
from anymamba.backends.cpu._math import exp2, sigmoid, softplus


@kernel
def _computed(first, after, values, out, which):
    for i in range(first, after):
        if which == 0:
            out[i] = exp2(values[i])
        elif which == 1:
            out[i] = sigmoid(values[i])
        else:
            out[i] = softplus(values[i])


def _over(values: np.ndarray, which: int) -> np.ndarray:
    out = np.empty_like(values)
    _computed(0, values.size, torch.from_numpy(values), torch.from_numpy(out), which)
    return out


def test_exp2_is_within_two_units_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-126, 127, 400_001), np.linspace(-1, 1, 200_001)]).astype(np.float32)
    exact = np.exp2(x.astype(np.float64))
    error = np.abs(_over(x, 0) - exact) / np.spacing(exact.astype(np.float32))
    assert error.max() <= 2


def test_exp2_at_the_edges() -> None:
    x = np.array([0, -0.0, 1, -126, -140, -np.inf, 128, 1e30, np.inf, np.nan], dtype=np.float32)
    seen = _over(x, 0)
    assert seen[:4].tolist() == [1, 1, 2, 2.0**-126]
    assert seen[4:6].tolist() == [0, 0]
    assert np.isposinf(seen[6:9]).all()
    assert np.isnan(seen[9])


@pytest.mark.parametrize(
    ("which", "exact"),
    [(1, lambda x: 1 / (1 + np.exp(-x))), (2, lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))],
)
def test_sigmoid_and_softplus_keep_relative_accuracy_at_both_ends(which: int, exact: object) -> None:
    x = np.linspace(-80, 80, 320_001).astype(np.float32)
    wanted = exact(x.astype(np.float64))  # type: ignore[operator]
    # exp(-x) is 2^(-x log2 e): at |x| = 80 rounding the product alone costs 2^-24 * 115 * ln 2 = 5e-6.
    assert (np.abs(_over(x, which) - wanted) / wanted).max() <= 8e-6
    near = np.abs(x) <= 8
    assert (np.abs(_over(x, which) - wanted) / wanted)[near].max() <= 8e-7


def test_float64_uses_full_precision() -> None:
    x = np.linspace(-50, 50, 1001)
    np.testing.assert_allclose(_over(x, 0), np.exp2(x), rtol=1e-13)
