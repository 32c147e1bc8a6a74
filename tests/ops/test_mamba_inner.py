"""mamba_inner_fn against mamba_inner_ref in float64, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anymamba.errors import DeviceError, OptionError, ShapeError
from anymamba.ops import mamba_inner_fn, mamba_inner_ref
from oracle import relative_error

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# The rounding of five products in a row, each to the inputs' dtype.
BOUND = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}


def draw_block(
    seed: int,
    batch: int = 2,
    dim: int = 6,
    seqlen: int = 9,
    dstate: int = 3,
    *,
    dtype: torch.dtype = torch.float64,
    complex_A: bool = False,
    given_B: bool = False,
    given_C: bool = False,
    biases: bool = True,
    batch_last: bool = True,
) -> dict[str, Any]:
    """Return arguments of mamba_inner_fn; `batch_last` lays xz out as upstream's block does."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.float64 if dtype == torch.float64 else torch.float32

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return (0.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    rank, rows = 2, 2 * dstate if complex_A else dstate
    A = -torch.rand(dim, dstate, generator=generator, dtype=torch.float64).to(state)
    if complex_A:
        A = torch.complex(A, tensor(dim, dstate, dtype=state))
    arguments: dict[str, Any] = {
        "xz": tensor(batch, 2 * dim, seqlen),
        "conv1d_weight": tensor(dim, 1, 4),
        "conv1d_bias": tensor(dim) if biases else None,
        "x_proj_weight": tensor(rank + rows * (2 - given_B - given_C), dim),
        "delta_proj_weight": tensor(dim, rank),
        "out_proj_weight": tensor(5, dim),
        "out_proj_bias": tensor(5) if biases else None,
        "A": A,
        "B": tensor(dim, dstate, dtype=A.dtype) if given_B else None,
        "C": tensor(batch, dstate, 2 * seqlen if complex_A else seqlen) if given_C else None,
        "D": tensor(dim, dtype=state) if biases else None,
        "delta_bias": tensor(dim, dtype=state) if biases else None,
        "B_proj_bias": tensor(rows) if biases and not given_B else None,
        "C_proj_bias": tensor(rows) if biases and not given_C else None,
    }
    if batch_last:
        arguments["xz"] = arguments["xz"].transpose(0, 1).contiguous().transpose(0, 1)
    return {
        name: value.detach().requires_grad_() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def outputs_and_gradients(function: Any, arguments: dict[str, Any], wide: bool) -> dict[str, torch.Tensor]:
    if wide:
        arguments = {
            name: value.detach().to(torch.complex128 if value.is_complex() else torch.float64).requires_grad_()
            if isinstance(value, torch.Tensor)
            else value
            for name, value in arguments.items()
        }
    out = function(**arguments)
    inputs = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = torch.autograd.grad(out, list(inputs.values()), weights.to(out.dtype))
    return {"out": out} | dict(zip(inputs, found))


def assert_equals_ref(arguments: dict[str, Any], bound: float, **options: Any) -> None:
    seen = outputs_and_gradients(lambda **a: mamba_inner_fn(**a, **options), arguments, wide=False)
    wanted = outputs_and_gradients(mamba_inner_ref, arguments, wide=True)
    for name, value in seen.items():
        if name != "out":
            assert value.dtype == arguments[name].dtype
        assert relative_error(value, wanted[name]) <= bound, name


@given(
    st.integers(0, 2**31), st.integers(0, 3), st.integers(1, 7), st.integers(0, 12), st.integers(1, 5),
    st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0, 1]),
)  # fmt: skip
def test_any_call_matches_the_reference_forward_and_backward(
    seed: int,
    batch: int,
    dim: int,
    seqlen: int,
    dstate: int,
    complex_A: bool,
    given_B: bool,
    given_C: bool,
    biases: bool,
    batch_last: bool,
    level: int,
) -> None:
    arguments = draw_block(
        seed, batch, dim, seqlen, dstate,
        complex_A=complex_A, given_B=given_B, given_C=given_C, biases=biases, batch_last=batch_last,
    )  # fmt: skip
    assert_equals_ref(arguments, 1e-9, checkpoint_lvl=level)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_as_near_as_its_rounding_allows(dtype: torch.dtype) -> None:
    assert_equals_ref(draw_block(0, 2, 16, 140, 4, dtype=dtype), BOUND[dtype])


def test_gradients_are_those_of_finite_differences() -> None:
    arguments = draw_block(1, 1, 3, 4, 2)
    names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return mamba_inner_fn(**(arguments | dict(zip(names, tensors))))

    assert torch.autograd.gradcheck(run, tuple(arguments[name] for name in names))


def test_inference_gives_what_training_gives() -> None:
    arguments = draw_block(2, dtype=torch.float32)
    trained = mamba_inner_fn(**arguments)
    with torch.no_grad():
        torch.testing.assert_close(mamba_inner_fn(**arguments), trained.detach())


def test_the_backward_keeps_no_more_than_upstream_does() -> None:
    arguments = draw_block(3, 1, 64, 256, 4, dtype=torch.float32)
    saved = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mamba_inner_fn(**arguments)
    own = {value.data_ptr() for value in arguments.values() if isinstance(value, torch.Tensor)}
    extra = sum(tensor.numel() for tensor in saved if tensor.data_ptr() not in own)
    assert extra == (2 + 2 * 4) * 256 + 64 * 2 * 4  # x_dbl and the states at steps 0 and 128


def test_under_autocast_products_are_bf16_and_gradients_keep_their_dtypes() -> None:
    arguments = draw_block(4, 2, 16, 40, 4, dtype=torch.float32)

    def run(**arguments: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: torch.Tensor = mamba_inner_fn(**arguments)
        assert out.dtype == torch.bfloat16
        return out

    seen = outputs_and_gradients(run, arguments, wide=False)
    wanted = outputs_and_gradients(mamba_inner_ref, arguments, wide=True)
    for name, value in seen.items():
        if name != "out":
            assert value.dtype == torch.float32
        assert relative_error(value, wanted[name]) <= BOUND[torch.bfloat16], name


def test_rms_norms_have_their_gradients() -> None:
    arguments = draw_block(5, 1, 3, 4, 2)
    torch.manual_seed(0)
    weights = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in (2, 2, 3)]

    def run(xz: torch.Tensor, b: torch.Tensor, c: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
        return mamba_inner_fn(**(arguments | {"xz": xz}), b_rms_weight=b, c_rms_weight=c, dt_rms_weight=dt)

    assert torch.autograd.gradcheck(run, (arguments["xz"], *weights))


def test_torch_compile_gives_what_eager_gives() -> None:
    arguments = draw_block(6, dtype=torch.float32)
    inputs = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    eager = mamba_inner_fn(**arguments)
    compiled = torch.compile(lambda a: mamba_inner_fn(**a), fullgraph=True, backend="aot_eager")(arguments)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(
        torch.autograd.grad(compiled.sum(), inputs), torch.autograd.grad(eager.sum(), inputs), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"xz": torch.zeros(2, 5, 4)}, ShapeError, "xz has shape (2, 5, 4)"),
        ({"conv1d_weight": torch.zeros(6, 4)}, ShapeError, "conv1d_weight has shape (6, 4)"),
        ({"x_proj_weight": torch.zeros(7, 6)}, ShapeError, "x_proj_weight has 7 rows, but must have at least 8"),
        ({"delta_proj_weight": torch.zeros(5, 2)}, ShapeError, "delta_proj_weight has shape (5, 2)"),
        ({"out_proj_weight": torch.zeros(5, 7)}, ShapeError, "out_proj_weight has shape (5, 7)"),
        ({"out_proj_bias": torch.zeros(4)}, ShapeError, "out_proj_bias has shape (4,)"),
        ({"B_proj_bias": torch.zeros(4)}, ShapeError, "B_proj_bias has shape (4,)"),
        ({"D": torch.zeros(4)}, ShapeError, "D has shape (4,)"),
        ({"x_proj_weight": torch.zeros(8, 6, device="meta")}, DeviceError, "x_proj_weight is on meta"),
        ({"checkpoint_lvl": 2}, OptionError, "checkpoint_lvl is 2"),
    ],
)
def test_wrong_arguments_are_named_before_any_work(change: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = draw_block(7, dtype=torch.float32) | change
    with pytest.raises(error) as caught:
        mamba_inner_fn(**arguments)
    assert words in str(caught.value)
