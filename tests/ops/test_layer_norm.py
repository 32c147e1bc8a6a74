"""layer_norm_fn, rms_norm_fn, RMSNorm and layer_norm_linear_fn against the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from anymamba.backends import use_backend
from anymamba.errors import DeviceError, DtypeError, OptionError, ShapeError
from anymamba.ops import layer_norm
from anymamba.ops.layer_norm import (
    RMSNorm,
    layer_norm_fn,
    layer_norm_linear_fn,
    layer_norm_ref,
    rms_norm_fn,
    rms_norm_ref,
)
from checks import opcheck
from oracle import CPU_BACKENDS, assert_matches_reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def with_fixed_dropout(**arguments: Any) -> Any:
    """Both runs of a comparison draw the same masks."""
    torch.manual_seed(1)
    return layer_norm_fn(**arguments)


@st.composite
def norms(draw: st.DrawFn) -> dict[str, Any]:
    """Draw arguments of layer_norm_fn: any rank, layout, dtypes and options."""
    dim = draw(st.integers(4, 20))
    leading = draw(st.lists(st.integers(0, 4), min_size=0, max_size=3))
    dtype, weight_dtype, residual_dtype = (draw(st.sampled_from(DTYPES)) for _ in range(3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    layout = draw(st.sampled_from(["contiguous", "slice", "columns first"]))

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    def rows(dtype: torch.dtype = dtype) -> torch.Tensor:
        if layout == "slice":
            return tensor(*leading, 2 * dim, dtype=dtype).chunk(2, dim=-1)[1].detach().requires_grad_()
        if layout == "columns first":
            return tensor(dim, *leading, dtype=dtype).movedim(0, -1).detach().requires_grad_()
        return tensor(*leading, dim, dtype=dtype)

    second_branch, second_weight = draw(st.booleans()), draw(st.booleans())
    vector = [draw(st.booleans()) for _ in range(2)]
    rowscale = None
    if not second_branch and draw(st.booleans()):
        rowscale = torch.rand(leading, generator=generator).to(dtype) + 0.5
    return {
        "x": rows(),
        "weight": tensor(dim, dtype=weight_dtype),
        "bias": tensor(dim, dtype=weight_dtype) if vector[0] else None,
        "residual": rows(residual_dtype) if draw(st.booleans()) else None,
        "x1": rows() if second_branch else None,
        "weight1": tensor(dim, dtype=weight_dtype) if second_weight else None,
        "bias1": tensor(dim, dtype=weight_dtype) if second_weight and vector[1] else None,
        "eps": draw(st.sampled_from([1e-6, 1e-5])),
        "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.3])),
        "rowscale": rowscale,
        "prenorm": draw(st.booleans()),
        "residual_in_fp32": draw(st.booleans()),
        "is_rms_norm": draw(st.booleans()),
        "return_dropout_mask": draw(st.booleans()),
    }


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@given(arguments=norms())
def test_any_call_matches_the_reference_forward_and_backward(backend: str, arguments: dict[str, Any]) -> None:
    assert_matches_reference(with_fixed_dropout, arguments, backend=backend)


@pytest.mark.parametrize("is_rms_norm", [True, False])
def test_gradients_are_those_of_finite_differences(is_rms_norm: bool) -> None:
    torch.manual_seed(0)
    rows, vector = (3, 6), (6,)
    inputs = [
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in (rows, vector, vector, rows, rows, vector, vector)
    ]

    def run(*inputs: torch.Tensor) -> Any:
        torch.manual_seed(1)
        return layer_norm_fn(*inputs, dropout_p=0.2, prenorm=True, is_rms_norm=is_rms_norm)

    for backend in (*CPU_BACKENDS, "reference"):
        with use_backend(backend):
            assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, 1),
        ({"prenorm": True}, 2),
        ({"weight1": torch.ones(4)}, 2),
        ({"weight1": torch.ones(4), "prenorm": True}, 3),
        ({"return_dropout_mask": True}, 3),
        ({"prenorm": True, "return_dropout_mask": True}, 4),
        ({"weight1": torch.ones(4), "prenorm": True, "return_dropout_mask": True}, 5),
    ],
)
def test_results_come_in_upstreams_order(options: dict[str, Any], wanted: int) -> None:
    found = rms_norm_fn(torch.randn(2, 3, 4), torch.ones(4), None, **options)
    assert (1 if isinstance(found, torch.Tensor) else len(found)) == wanted
    if options.get("return_dropout_mask"):
        assert found[-2:] == (None, None)  # no dropout, no masks


@pytest.mark.parametrize(
    ("x_dtype", "residual_dtype", "in_fp32", "wanted"),
    [
        (torch.bfloat16, None, False, torch.bfloat16),
        (torch.bfloat16, None, True, torch.float32),
        (torch.bfloat16, torch.float32, False, torch.float32),
        (torch.bfloat16, torch.bfloat16, True, torch.bfloat16),  # a residual keeps its dtype, as upstream
        (torch.float32, torch.float16, False, torch.float16),
        (torch.float64, None, True, torch.float64),
    ],
)
def test_the_residual_keeps_its_own_dtype_and_the_output_that_of_x(
    x_dtype: torch.dtype, residual_dtype: torch.dtype | None, in_fp32: bool, wanted: torch.dtype
) -> None:
    x = torch.randn(2, 4).to(x_dtype)
    residual = None if residual_dtype is None else torch.randn(2, 4).to(residual_dtype)
    for backend in (*CPU_BACKENDS, "reference"):
        with use_backend(backend):
            out, total = rms_norm_fn(x, torch.ones(4), None, residual=residual, prenorm=True, residual_in_fp32=in_fp32)
        assert out.dtype == x_dtype
        assert total.dtype == wanted


@pytest.mark.parametrize("upcast", [True, False])
def test_the_plain_formulas_say_the_same(upcast: bool) -> None:
    torch.manual_seed(0)
    x, residual, x1 = (torch.randn(2, 3, 8) for _ in range(3))
    w, b, w1, b1 = (torch.randn(8) for _ in range(4))
    for function, plain in ((layer_norm_fn, layer_norm_ref), (rms_norm_fn, rms_norm_ref)):
        *found, mask, mask1 = function(
            x, w, b, residual, x1, w1, b1, dropout_p=0.4, prenorm=True, return_dropout_mask=True
        )
        wanted = plain(
            x, w, b, residual, x1, w1, b1, dropout_p=0.4, prenorm=True, dropout_mask=mask, dropout_mask1=mask1,
            upcast=upcast,
        )  # fmt: skip
        torch.testing.assert_close(tuple(found), wanted)
        rowscale = torch.rand(2, 3)
        torch.testing.assert_close(
            function(x, w, None, rowscale=rowscale), plain(x, w, None, rowscale=rowscale, upcast=upcast)
        )


def test_dropout_follows_pytorchs_generator_and_keeps_the_expectation() -> None:
    x = torch.ones(200, 50)

    def run(seed: int) -> Any:
        torch.manual_seed(seed)
        return rms_norm_fn(x, torch.ones(50), None, dropout_p=0.25, prenorm=True, return_dropout_mask=True)

    out, total, mask, mask1 = run(0)
    assert mask1 is None
    assert mask.dtype == torch.bool and mask.shape == x.shape
    assert abs(mask.float().mean().item() - 0.75) < 0.02
    torch.testing.assert_close(total, mask / 0.75)
    assert torch.equal(run(0)[0], out)
    assert not torch.equal(run(1)[2], mask)


def test_activation_checkpointing_recomputes_with_the_same_masks() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(16, 32, requires_grad=True), torch.randn(32, requires_grad=True)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = rms_norm_fn(x, weight, None, dropout_p=0.5)
        return out

    gradients = []
    for recompute in (False, True):
        torch.manual_seed(3)
        out = checkpoint(run, x, weight, use_reentrant=False) if recompute else run(x, weight)
        gradients.append(torch.autograd.grad(out.square().sum(), (x, weight)))
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_a_dropped_infinity_is_gone() -> None:
    x = torch.full((64, 8), float("inf"))
    torch.manual_seed(0)
    _, total, mask, _ = rms_norm_fn(x, torch.ones(8), None, dropout_p=0.5, prenorm=True, return_dropout_mask=True)
    assert total[~mask].eq(0).all()


def test_the_unchanged_input_is_its_own_residual_and_gets_both_gradients() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8)
    out, total = rms_norm_fn(x, weight, None, prenorm=True)
    both = torch.autograd.grad(out.sum() + 3 * total.sum(), x)[0]
    alone = torch.autograd.grad(rms_norm_fn(x, weight, None).sum(), x)[0]
    torch.testing.assert_close(both, alone + 3)


def test_the_module_drops_only_in_training() -> None:
    norm = RMSNorm(16, dropout_p=0.5)
    x = torch.randn(4, 16)
    assert not torch.equal(norm(x), norm(x))
    norm.eval()
    torch.testing.assert_close(norm(x), rms_norm_fn(x, torch.ones(16), None, eps=1e-5))
    out, total = norm(x.half(), prenorm=True, residual_in_fp32=True)
    assert (out.dtype, total.dtype) == (torch.float16, torch.float32)


@given(
    st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.booleans(),
    st.integers(0, 1000),
)  # fmt: skip
def test_norm_and_projection_match_the_reference(
    dtype: torch.dtype, biases: bool, residual: bool, prenorm: bool, in_fp32: bool, is_rms_norm: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    arguments = {
        "x": tensor(2, 3, 8),
        "norm_weight": tensor(8),
        "norm_bias": tensor(8) if biases else None,
        "linear_weight": tensor(5, 8),
        "linear_bias": tensor(5) if biases else None,
        "residual": tensor(2, 3, 8) if residual else None,
        "prenorm": prenorm,
        "residual_in_fp32": in_fp32,
        "is_rms_norm": is_rms_norm,
    }
    # The normalised values are rounded to x's dtype before the product, as upstream's.
    assert_matches_reference(layer_norm_linear_fn, arguments)


def test_norm_and_projection_follow_autocast() -> None:
    torch.manual_seed(0)
    x, norm_weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    weight, bias = torch.randn(5, 8, requires_grad=True), torch.randn(5, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, total = layer_norm_linear_fn(x, norm_weight, None, weight, bias, prenorm=True, is_rms_norm=True)
    assert (out.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    gradients = torch.autograd.grad(out.float().sum(), (x, norm_weight, weight, bias))
    plain = F.linear(rms_norm_fn(x, norm_weight, None), weight, bias)
    for seen, wanted in zip(gradients, torch.autograd.grad(plain.sum(), (x, norm_weight, weight, bias))):
        assert seen.dtype == torch.float32
        torch.testing.assert_close(seen, wanted, rtol=3e-2, atol=3e-2)


def test_norm_and_projection_do_not_keep_the_normalised_values() -> None:
    kept: list[tuple[int, ...]] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    x, weight = torch.randn(7, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer_norm_linear_fn(x, torch.ones(8), None, weight, None)
    assert kept.count((7, 8)) == 1  # x itself


def test_upstreams_private_pair_has_upstreams_shapes() -> None:
    torch.manual_seed(0)
    x, residual, x1, dy, dy1, dresidual = (torch.randn(5, 8) for _ in range(6))
    w, b, w1, b1 = (torch.randn(8) for _ in range(4))
    y, y1, mean, rstd, total, seeds, mask, mask1 = layer_norm._layer_norm_fwd(
        x, w, b, 1e-5, residual, x1, w1, b1, dropout_p=0.5, return_dropout_mask=True
    )
    assert mean is not None and rstd is not None and mean.shape == rstd.shape == (5,)
    wanted = layer_norm_ref(x, w, b, residual, x1, w1, b1, 1e-5, 0.5, None, True, mask, mask1)
    torch.testing.assert_close((y, y1, total), wanted)
    found = layer_norm._layer_norm_bwd(
        dy, total, w, b, 1e-5, mean, rstd, dresidual, dy1, w1, b1, seeds, 0.5, has_residual=True, has_x1=True
    )
    leaves = [t.clone().requires_grad_() for t in (x, w, b, residual, x1, w1, b1)]
    outputs = layer_norm_ref(*leaves, 1e-5, 0.5, None, True, mask, mask1)
    torch.testing.assert_close(found, torch.autograd.grad(outputs, leaves, (dy, dy1, dresidual)))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.zeros(2, 0)}, ShapeError, "x has shape (2, 0)"),
        ({"x": torch.zeros(2, 6, dtype=torch.int32)}, DtypeError, "x has dtype torch.int32"),
        ({"weight": torch.zeros(5)}, ShapeError, "weight has shape (5,)"),
        ({"bias": torch.zeros(6, device="meta")}, DeviceError, "bias is on meta"),
        ({"residual": torch.zeros(6)}, ShapeError, "residual has shape (6,)"),
        ({"x1": torch.zeros(2, 5)}, ShapeError, "x1 has shape (2, 5)"),
        ({"bias1": torch.zeros(6)}, OptionError, "weight1 is None"),
        ({"rowscale": torch.zeros(3)}, ShapeError, "rowscale has shape (3,)"),
        ({"rowscale": torch.zeros(2), "x1": torch.zeros(2, 6)}, OptionError, "rowscale is given together with x1"),
        ({"dropout_p": 1.0}, OptionError, "dropout_p is 1.0"),
    ],
)
def test_wrong_arguments_are_named_before_any_work(change: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = {"x": torch.zeros(2, 6), "weight": torch.zeros(6), "bias": None} | change
    with pytest.raises(error) as caught:
        layer_norm_fn(**arguments)
    assert words in str(caught.value)


def test_a_projection_of_the_wrong_width_is_named() -> None:
    with pytest.raises(ShapeError) as caught:
        layer_norm_linear_fn(torch.zeros(2, 6), torch.zeros(6), None, torch.zeros(4, 5), None)
    assert "linear_weight has shape (4, 5), but must be (out_dim, dim) = (4, 6)" in str(caught.value)


@pytest.mark.parametrize("full", [True, False])
def test_operators_pass_opcheck(full: bool) -> None:
    def rows() -> torch.Tensor:
        return torch.randn(5, 6, requires_grad=True)

    def vector() -> torch.Tensor | None:
        return torch.randn(6, requires_grad=True) if full else None

    weight = torch.randn(6, requires_grad=True)
    keep = [torch.rand(5, 6) > 0.2 if full else None for _ in range(2)]
    forward = (
        rows(), weight, vector(), rows() if full else None, rows() if full else None, vector(), vector(), None, *keep,
        0.2 if full else 0.0, 1e-5, not full, torch.float32, torch.float64 if full else None,
    )  # fmt: skip
    opcheck(torch.ops.anymamba.layer_norm, forward)
    with torch.no_grad():
        _, _, total, mean, rstd = torch.ops.anymamba.layer_norm(*forward)
    v = total.float() if full else forward[0].detach()
    vectors = [None if t is None else t.detach() for t in (forward[1], forward[2], forward[5], forward[6])]
    opcheck(
        torch.ops.anymamba.layer_norm_backward,
        (
            torch.randn(5, 6), v, *vectors, torch.randn(5, 6) if full else None, torch.randn(5, 6), None, *keep,
            0.2 if full else 0.0, mean, rstd, 1e-5, not full, torch.float32, full, full, full,
        ),
    )  # fmt: skip


def test_torch_compile_gives_what_eager_gives() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(*s, requires_grad=True) for s in [(2, 3, 8), (8,), (2, 3, 8), (5, 8)]]

    def step(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
        out, total = rms_norm_fn(x * 2, weight, None, residual=residual, prenorm=True)
        projected: torch.Tensor = layer_norm_linear_fn(out, weight, None, linear, None, residual=total)
        return projected

    eager = step(*leaves)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(torch.autograd.grad(compiled.sum(), leaves), torch.autograd.grad(eager.sum(), leaves))
