"""ANYMAMBA_CHECK_FINITE: the first tensor that is not finite gets its name said."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import anymamba
from anymamba.errors import NonFiniteError
from anymamba.ops import causal_conv1d_fn, selective_scan_fn
from anymamba.ops._finite import check_finite

conv = check_finite(causal_conv1d_fn)
scan = check_finite(selective_scan_fn)


def inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    named = {
        "u": torch.randn(1, 2, 5), "delta": torch.rand(1, 2, 5), "A": -torch.rand(2, 3),
        "B": torch.randn(1, 3, 5), "C": torch.randn(1, 3, 5),
    }  # fmt: skip
    return {name: tensor.requires_grad_() for name, tensor in named.items()}


def test_finite_values_pass_with_the_same_results_and_gradients() -> None:
    plain, looked_at = inputs(), inputs()
    expected, out = selective_scan_fn(**plain), scan(**looked_at)
    expected.sum().backward()
    out.sum().backward()
    assert torch.equal(out, expected)
    assert all(torch.equal(looked_at[name].grad, plain[name].grad) for name in plain)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["u", "delta", "A", "B", "C"])
def test_a_bad_argument_is_named_with_its_first_place(name: str, value: float) -> None:
    arguments = {key: tensor.detach().clone() for key, tensor in inputs().items()}
    arguments[name][..., -1] = value
    with pytest.raises(NonFiniteError, match=rf"selective_scan_fn: argument {name}, .*first at \(0, ") as caught:
        scan(**arguments)
    assert "before this operator" in caught.value.why


def test_a_result_out_of_range_is_named() -> None:
    x = torch.full((1, 2, 3), 60000.0, dtype=torch.float16)
    with pytest.raises(NonFiniteError, match=r"causal_conv1d_fn: the result, torch\.float16") as caught:
        conv(x, torch.full((2, 2), 2.0, dtype=torch.float16))
    assert "arguments were finite" in caught.value.why and "float32" in caught.value.next_step


def test_a_gradient_that_arrives_bad_is_told_from_one_made_here() -> None:
    arguments = inputs()
    with pytest.raises(NonFiniteError, match="the gradient that arrives for the result") as caught:
        scan(**arguments).backward(torch.full((1, 2, 5), float("nan")))
    assert "after" in caught.value.why
    x = torch.ones(1, 2, 3, dtype=torch.float16, requires_grad=True)
    out = conv(x, torch.full((2, 2), 2.0, dtype=torch.float16))
    with pytest.raises(NonFiniteError, match="the gradient of x") as caught:
        out.backward(torch.full((1, 2, 3), 60000.0, dtype=torch.float16))
    assert "this operator's backward" in caught.value.why


def test_signature_and_name_stay() -> None:
    assert inspect.signature(scan) == inspect.signature(selective_scan_fn)
    assert scan.__name__ == "selective_scan_fn"


@pytest.mark.parametrize("setting", ["1", "0", None])
def test_the_variable_switches_it_on_everywhere_and_costs_nothing_unset(setting: str | None) -> None:
    code = (
        "import anymamba.ops as ops, anymamba.ops.selective_scan as family\n"
        "print(hasattr(ops.selective_scan_fn, '__wrapped__'), hasattr(family.selective_scan_fn, '__wrapped__'))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(anymamba.__path__[0]).parent)}
    environment.pop("ANYMAMBA_CHECK_FINITE", None)
    if setting is not None:
        environment["ANYMAMBA_CHECK_FINITE"] = setting
    seen = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert seen.stdout.split() == [str(setting == "1")] * 2
