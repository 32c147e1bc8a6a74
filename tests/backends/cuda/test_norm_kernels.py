"""The kernels of norms and gates against the float64 reference: emulated on the CPU, and on the card with --gpu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anymamba.backends import use_backend
from anymamba.errors import BackendRefusedError
from anymamba.ops import _prepared, layer_norm, layernorm_gated, swiglu
from anymamba.ops.layer_norm import layer_norm_fn, layer_norm_linear_fn
from anymamba.ops.layernorm_gated import layernorm_fn, rmsnorm_fn
from cuda_emulator import emulated, needs_emulator
from oracle import assert_matches_reference

pytestmark = needs_emulator
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda":
        yield "cuda"
    else:
        with emulated():
            yield "cpu"


def leaf(
    generator: torch.Generator, device: str, dtype: torch.dtype, *shape: int, layout: str = "rows"
) -> torch.Tensor:
    if layout == "slice":
        whole = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator, dtype=torch.float64)
        return whole.to(device, dtype).chunk(2, dim=-1)[1].requires_grad_()
    if layout == "columns first":
        return (
            torch.randn(*shape[::-1], generator=generator, dtype=torch.float64).to(device, dtype).t().requires_grad_()
        )
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()


# (x, weights, groups, columns of a group, bias, z, before the gate, RMS): g++ takes a second for each kernel.
GATED = [
    (BF16, BF16, 1, 48, False, True, False, True),  # Mamba-2's own norm: 16-byte accesses, less than a warp's columns
    (BF16, F32, 2, 1032, False, True, True, True),  # several warps, the last not full
    (F32, F32, 3, 7, True, True, False, False),
    (F16, F32, 1, 600, True, True, True, False),
    (F32, F32, 1, 520, True, False, True, False),
    (F32, F32, 2, 64, False, True, False, True),
]


@st.composite
def gated(draw: st.DrawFn, device: str) -> dict[str, Any]:
    """Draw arguments of layernorm_fn."""
    if device == "cpu":
        dtype, weights, groups, size, has_bias, has_z, before, rms = draw(st.sampled_from(GATED))
    else:
        dtype, weights = draw(st.sampled_from([F32, F16, BF16])), draw(st.sampled_from([F32, F16, BF16]))
        groups, size = (
            draw(st.integers(1, 4)),
            draw(st.sampled_from([4, 33, 256, 512, 1000, 1024, 2048, 4096, 5000, 8192])),
        )
        has_bias, has_z, before, rms = (draw(st.booleans()) for _ in range(4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, layout = (
        draw(st.integers(0, 7 if device == "cpu" else 700)),
        draw(st.sampled_from(["rows", "slice", "columns first"])),
    )
    dim = groups * size
    return {
        "x": leaf(generator, device, dtype, rows, dim, layout=layout),
        "weight": leaf(generator, device, weights, dim),
        "bias": leaf(generator, device, weights, dim) if has_bias else None,
        "z": leaf(generator, device, dtype, rows, dim, layout=draw(st.sampled_from(["rows", layout])))
        if has_z
        else None,
        "eps": 1e-5,
        "group_size": size,
        "norm_before_gate": before,
        "is_rms_norm": rms,
    }


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_gated_norm_matches_the_reference_forward_and_backward(device: str, data: st.DataObject) -> None:
    assert_matches_reference(layernorm_fn, data.draw(gated(device)), backend="cuda")


# (x, residual, weights, columns, RMS, bias, second branch and weight, row scale, dropout)
PLAIN = [
    (BF16, F32, F32, 48, True, False, False, False, 0.0),  # what stands before a mixer: 16-byte accesses
    (F32, None, F32, 1033, False, True, False, False, 0.0),
    (F16, F16, F32, 7, False, True, True, False, 0.3),
    (F32, F32, BF16, 520, True, True, False, True, 0.5),
    (BF16, None, BF16, 640, True, False, True, False, 0.0),
]


@st.composite
def plain(draw: st.DrawFn, device: str) -> dict[str, Any]:
    """Draw arguments of layer_norm_fn."""
    if device == "cpu":
        dtype, added, weights, dim, rms, has_bias, second, scaled, dropped = draw(st.sampled_from(PLAIN))
    else:
        dtype, weights = draw(st.sampled_from([F32, F16, BF16])), draw(st.sampled_from([F32, F16, BF16]))
        added = draw(st.sampled_from([None, F32, dtype]))
        dim = draw(st.sampled_from([4, 33, 256, 512, 768, 1000, 1024, 2048, 4096, 5000, 8192]))
        rms, has_bias, second, scaled = (draw(st.booleans()) for _ in range(4))
        scaled, dropped = scaled and not second, draw(st.sampled_from([0.0, 0.3]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, layout = (
        draw(st.integers(0, 7 if device == "cpu" else 700)),
        draw(st.sampled_from(["rows", "slice", "columns first"])),
    )
    return {
        "x": leaf(generator, device, dtype, rows, dim, layout=layout),
        "weight": leaf(generator, device, weights, dim),
        "bias": leaf(generator, device, weights, dim) if has_bias else None,
        "residual": None if added is None else leaf(generator, device, added, rows, dim, layout=layout),
        "x1": leaf(generator, device, dtype, rows, dim) if second else None,
        "weight1": leaf(generator, device, weights, dim) if second else None,
        "bias1": leaf(generator, device, weights, dim) if second and has_bias else None,
        "rowscale": leaf(generator, device, F32, rows).detach() if scaled else None,
        "dropout_p": dropped,
        "eps": 1e-5,
        "prenorm": True,
        "residual_in_fp32": added is None and draw(st.booleans()) and device == "cuda",
        "is_rms_norm": rms,
    }


def same_masks(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Draw dropout's masks the same on every device: the reference runs on the CPU."""
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(x.shape, generator=generator) >= dropout_p).to(x.device)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_norm_matches_the_reference_forward_and_backward(device: str, data: st.DataObject) -> None:
    arguments = data.draw(plain(device))

    with mock.patch.object(layer_norm, "_keep", same_masks):
        assert_matches_reference(layer_norm_fn, arguments, backend="cuda")


def test_a_norm_and_projection_computes_its_rows_again_in_the_backward(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (5, 48), "norm_weight": (48,), "norm_bias": (48,), "linear_weight": (6, 48), "linear_bias": (6,)}
    arguments = {name: leaf(generator, device, F32, *shape) for name, shape in shapes.items()}
    assert_matches_reference(layer_norm_linear_fn, arguments, backend="cuda")


def test_a_residual_in_double_precision_is_left_to_backends_that_have_it(device: str) -> None:
    x = torch.ones(2, 8, device=device)
    with use_backend("cuda"), pytest.raises(BackendRefusedError, match="float64"):
        layer_norm_fn(x, x[0], None, residual=x.double())


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_swiglu_matches_the_reference_forward_and_backward(device: str, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    dtype = data.draw(st.sampled_from([F32, BF16] if device == "cpu" else [F32, F16, BF16]))
    dim, rows = data.draw(st.sampled_from([1, 5, 16, 200, 264])), data.draw(st.integers(0, 9))
    layout = data.draw(st.sampled_from(["rows", "slice", "columns first"]))
    assert_matches_reference(
        swiglu, {"xy": leaf(generator, device, dtype, rows, 2 * dim, layout=layout)}, backend="cuda"
    )


def test_the_weights_gradients_of_many_rows_are_the_same_bits_in_every_run(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, z, weight = (leaf(generator, device, F32, *shape) for shape in ((90, 64), (90, 64), (64,)))
    runs = []
    for _ in range(2):
        with use_backend("cuda"):
            out = rmsnorm_fn(x, weight, None, z, norm_before_gate=False)
        runs.append(torch.autograd.grad(out.square().sum(), [x, z, weight]))
    assert all(torch.equal(a, b) for a, b in zip(*runs))


@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_a_norm_like_one_before_goes_straight_to_the_launch(device: str, has_residual: bool, prenorm: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = leaf(generator, device, F32, 48)
    _prepared.forget()
    for shift in (0, 0, 1):  # the last ones begin elsewhere than at 16 bytes, and go the longer way
        x, residual = (leaf(generator, device, F32, 2 * 3 * 48 + shift).detach() for _ in range(2))
        x, residual = (t[shift:].unflatten(0, (2, 3, 48)) for t in (x, residual))
        arguments = {"x": x, "weight": weight, "bias": None, "residual": residual if has_residual else None}
        arguments |= {"eps": 1e-5, "prenorm": prenorm, "is_rms_norm": True}
        with torch.no_grad():
            assert_matches_reference(layer_norm_fn, arguments, backend="cuda")
    assert len(layer_norm._prepared._calls) == 2


@pytest.mark.parametrize("has_z", [False, True])
def test_a_gated_norm_like_one_before_goes_straight_to_the_launch(device: str, has_z: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = leaf(generator, device, F32, 96)
    _prepared.forget()
    for shift in (0, 0, 1):
        whole = leaf(generator, device, BF16, 5, 192 + 8 * shift).detach()[:, shift:]
        arguments = {"x": leaf(generator, device, BF16, 5, 96).detach(), "weight": weight, "bias": None}
        arguments |= {"z": whole[:, :96] if has_z else None, "eps": 1e-5, "group_size": 48, "is_rms_norm": True}
        with torch.no_grad():
            assert_matches_reference(layernorm_fn, arguments, backend="cuda")
    assert len(layernorm_gated._prepared._calls) == (2 if has_z else 1)


def test_the_gates_gradient_is_written_where_it_shall_go(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, z, dout, weight = (leaf(generator, device, F32, *s).detach() for s in ((5, 48), (5, 48), (5, 48), (48,)))
    options = {"z": z, "norm_before_gate": False, "is_rms_norm": True}
    with use_backend("cuda"):
        _, mean, rstd = layernorm_gated._layer_norm_fwd(x, weight, None, 1e-5, **options)
        wanted = layernorm_gated._layer_norm_bwd(dout, x, weight, None, 1e-5, mean, rstd, **options)
        for whole in (torch.zeros(5, 96, device=device)[:, 48:], torch.zeros(48, 5, device=device).t()):
            found = layernorm_gated._layer_norm_bwd(dout, x, weight, None, 1e-5, mean, rstd, **options, dz=whole)
            assert found[3] is whole
            assert torch.equal(whole, wanted[3])


def test_a_row_too_long_for_registers_is_refused_with_the_reason(device: str) -> None:
    x = torch.ones(1, 8193, device=device)
    with use_backend("cuda"), pytest.raises(BackendRefusedError, match="8193 columns"):
        layernorm_fn(x, x[0], None)
