"""layernorm_fn, rmsnorm_fn and their modules (gated, in groups) against the float64 reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from anymamba.backends import use_backend
from anymamba.errors import DeviceError, DtypeError, OptionError, ShapeError
from anymamba.ops import layernorm_gated
from anymamba.ops.layernorm_gated import LayerNorm, RMSNorm, layernorm_fn, rms_norm_ref, rmsnorm_fn
from checks import opcheck
from oracle import CPU_BACKENDS, assert_matches_reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@st.composite
def gated_norms(draw: st.DrawFn) -> dict[str, object]:
    """Draw arguments of layernorm_fn: any rank, layout, grouping and options."""
    # Of one, two or three columns a norm leaves little but a sign: its gradient is rounding (see the test of one column).
    group_size, groups = draw(st.integers(4, 9)), draw(st.integers(1, 4))
    dim = group_size * groups
    leading = draw(st.lists(st.integers(0, 4), min_size=0, max_size=3))
    dtype, weight_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    layout = draw(st.sampled_from(["contiguous", "slice", "columns first"]))

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    def rows() -> torch.Tensor:
        if layout == "slice":
            return tensor(*leading, 2 * dim).chunk(2, dim=-1)[1].detach().requires_grad_()
        if layout == "columns first":
            return tensor(dim, *leading).movedim(0, -1).detach().requires_grad_()
        return tensor(*leading, dim)

    return {
        "x": rows(),
        "weight": tensor(dim, dtype=weight_dtype),
        "bias": tensor(dim, dtype=weight_dtype) if draw(st.booleans()) else None,
        "z": rows() if draw(st.booleans()) else None,
        "eps": draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        "group_size": draw(st.sampled_from([group_size, None])),
        "norm_before_gate": draw(st.booleans()),
        "is_rms_norm": draw(st.booleans()),
    }


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@given(arguments=gated_norms())
def test_any_call_matches_the_reference_forward_and_backward(backend: str, arguments: dict[str, object]) -> None:
    assert_matches_reference(layernorm_fn, arguments, backend=backend)


@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("is_rms_norm", [True, False])
def test_gradients_are_those_of_finite_differences(norm_before_gate: bool, is_rms_norm: bool) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in [(3, 8), (8,), (8,), (3, 8)]]

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        return layernorm_fn(*inputs, 1e-5, 4, norm_before_gate, is_rms_norm)

    for backend in (*CPU_BACKENDS, "reference"):
        with use_backend(backend):
            assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("group_size", [None, 4])
def test_the_plain_formula_says_the_same(norm_before_gate: bool, group_size: int | None) -> None:
    torch.manual_seed(0)
    x, z, weight, bias = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8), torch.randn(8)
    torch.testing.assert_close(
        rmsnorm_fn(x, weight, bias, z, 1e-5, group_size, norm_before_gate),
        rms_norm_ref(x, weight, bias, z, 1e-5, group_size, norm_before_gate),
    )


def test_without_gate_and_groups_it_is_pytorchs_layer_norm() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 6), torch.randn(6), torch.randn(6)
    for backend in (*CPU_BACKENDS, "reference"):
        with use_backend(backend):
            torch.testing.assert_close(layernorm_fn(x, weight, bias), F.layer_norm(x, (6,), weight, bias, 1e-6))


def test_modules_start_as_plain_norms_and_pass_their_options_on() -> None:
    torch.manual_seed(0)
    x, z = torch.randn(2, 8), torch.randn(2, 8)
    norm = RMSNorm(8, eps=1e-3, group_size=4, norm_before_gate=False)
    assert norm.bias is None
    wanted = rmsnorm_fn(x, torch.ones(8), None, z, 1e-3, 4, False)
    torch.testing.assert_close(norm(x, z), wanted)
    layer = LayerNorm(8, eps=1e-3, group_size=2)
    torch.testing.assert_close(layer(x, z), layernorm_fn(x, torch.ones(8), torch.zeros(8), z, 1e-3, 2))
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]


def test_one_column_is_its_own_group() -> None:
    x, weight = torch.tensor([[2.0, -3.0, 0.0]]), torch.tensor([1.0, 2.0, 3.0])
    for backend in (*CPU_BACKENDS, "reference"):
        with use_backend(backend):
            torch.testing.assert_close(rmsnorm_fn(x, weight, None, group_size=1), torch.tensor([[1.0, -2.0, 0.0]]))
            assert layernorm_fn(x, weight, None, group_size=1).eq(0).all()


def test_groups_are_independent() -> None:
    x = torch.randn(3, 12, requires_grad=True)
    out = rmsnorm_fn(x, torch.ones(12), None, group_size=4)
    (dx,) = torch.autograd.grad(out[:, :4].square().sum() + out[:, 0].sum(), x)
    assert dx[:, :4].abs().sum() > 0
    assert dx[:, 4:].eq(0).all()


def test_a_row_is_normalised_alike_in_any_batch() -> None:
    x, z, weight = torch.randn(7, 64), torch.randn(7, 64), torch.randn(64)
    whole = rmsnorm_fn(x, weight, None, z)
    assert torch.equal(whole[3:4], rmsnorm_fn(x[3:4], weight, None, z[3:4]))


def test_upstreams_private_pair_has_upstreams_shapes() -> None:
    torch.manual_seed(0)
    x, z, weight, bias, dy = (torch.randn(*s) for s in [(5, 12), (5, 12), (12,), (12,), (5, 12)])
    buffer = torch.empty(5, 12)
    out, mean, rstd = layernorm_gated._layer_norm_fwd(x, weight, bias, 1e-5, z=z, out=buffer, group_size=4)
    assert out is buffer
    assert mean is not None and mean.shape == rstd.shape == (15,)
    torch.testing.assert_close(mean.view(3, 5), x.view(5, 3, 4).mean(-1).t())
    dz = torch.empty(*z.shape[:-1], 2 * z.shape[-1], dtype=z.dtype)[..., z.shape[-1] :]
    found = layernorm_gated._layer_norm_bwd(
        dy, x, weight, bias, 1e-5, mean, rstd, z=z, group_size=4, recompute_output=True, dz=dz
    )
    assert len(found) == 5
    assert found[3] is dz
    torch.testing.assert_close(found[4], out)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias, z)]
    wanted = torch.autograd.grad(layernorm_fn(*leaves, 1e-5, 4), leaves, dy)
    torch.testing.assert_close(found[:4], tuple(wanted))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.zeros(())}, ShapeError, "x has shape (), but must be (..., dim)"),
        ({"x": torch.zeros(2, 0)}, ShapeError, "x has shape (2, 0)"),
        ({"x": torch.zeros(2, 6, dtype=torch.int32)}, DtypeError, "x has dtype torch.int32"),
        ({"weight": torch.zeros(5)}, ShapeError, "weight has shape (5,)"),
        ({"bias": torch.zeros(6, device="meta")}, DeviceError, "bias is on meta"),
        ({"z": torch.zeros(6)}, ShapeError, "z has shape (6,), but must be the shape of x = (2, 6)"),
        ({"group_size": 4}, OptionError, "group_size is 4"),
        ({"group_size": 0}, OptionError, "group_size is 0"),
    ],
)
def test_wrong_arguments_are_named_before_any_work(
    change: dict[str, object], error: type[Exception], words: str
) -> None:
    arguments = {"x": torch.zeros(2, 6), "weight": torch.zeros(6), "bias": None} | change
    with pytest.raises(error) as caught:
        layernorm_fn(**arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize("full", [True, False])
def test_operators_pass_opcheck(full: bool) -> None:
    x, weight = torch.randn(5, 12, requires_grad=True), torch.randn(12, requires_grad=True)
    bias = torch.randn(12, requires_grad=True) if full else None
    z = torch.randn(5, 12, requires_grad=True) if full else None
    opcheck(torch.ops.anymamba.layernorm_gated, (x, weight, bias, z, 1e-5, 4, full, not full))
    inputs = [None if t is None else t.detach() for t in (x, weight, bias, z)]
    _, mean, rstd = torch.ops.anymamba.layernorm_gated(*inputs, 1e-5, 4, full, not full)
    opcheck(
        torch.ops.anymamba.layernorm_gated_backward,
        (torch.randn(5, 12), *inputs, mean, rstd, 1e-5, 4, full, not full, full),
    )


def test_torch_compile_gives_what_eager_gives() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(*s, requires_grad=True) for s in [(2, 3, 8), (8,), (2, 3, 8)]]

    def step(x: torch.Tensor, weight: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return rmsnorm_fn(x * 2, weight, None, z, group_size=4)

    eager = step(*leaves)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(torch.autograd.grad(compiled.sum(), leaves), torch.autograd.grad(eager.sum(), leaves))
