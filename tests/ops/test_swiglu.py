"""swiglu against the float64 reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from anymamba.backends import use_backend
from anymamba.errors import DtypeError, ShapeError
from anymamba.ops import swiglu as swiglu_fn
from anymamba.ops.swiglu import SwiGLU, _swiglu_bwd, _swiglu_fwd
from checks import opcheck
from oracle import CPU_BACKENDS, assert_matches_reference


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@given(
    leading=st.lists(st.integers(0, 4), min_size=0, max_size=3),
    dim=st.integers(1, 20),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    layout=st.sampled_from(["contiguous", "slice", "columns first"]),
    seed=st.integers(0, 2**31),
)
def test_any_call_matches_the_reference_forward_and_backward(
    backend: str, leading: list[int], dim: int, dtype: torch.dtype, layout: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    xy = torch.randn(*leading, 4 * dim, generator=generator).to(dtype)
    xy = xy[..., : 2 * dim]
    if layout == "columns first":
        xy = xy.movedim(-1, 0).contiguous().movedim(0, -1)
    elif layout == "contiguous":
        xy = xy.contiguous()
    assert_matches_reference(swiglu_fn, {"xy": xy.requires_grad_()}, backend=backend)


def test_gradients_are_those_of_finite_differences() -> None:
    xy = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    for backend in (*CPU_BACKENDS, "reference"):
        with use_backend(backend):
            assert torch.autograd.gradcheck(swiglu_fn, (xy,))


def test_it_is_silu_of_the_first_half_times_the_second() -> None:
    xy = torch.randn(2, 3, 10)
    x, y = xy.chunk(2, dim=-1)
    for backend in (*CPU_BACKENDS, "reference"):
        with use_backend(backend):
            torch.testing.assert_close(swiglu_fn(xy), F.silu(x) * y)
    torch.testing.assert_close(SwiGLU.apply(xy), F.silu(x) * y)


def test_large_and_infinite_gates_do_not_overflow() -> None:
    xy = torch.tensor([[-200.0, 200.0, -1e30, 1.0, 2.0, 3.0]], requires_grad=True)
    out = swiglu_fn(xy)
    assert out.tolist() == [[0.0, 400.0, 0.0]]
    (gradient,) = torch.autograd.grad(out.sum(), xy)
    assert gradient.isfinite().all()


def test_upstreams_private_pair_fills_the_buffers_it_is_given() -> None:
    xy, dout = torch.randn(2, 3, 8), torch.randn(2, 3, 4)
    out, dxy, again = torch.empty(2, 3, 4), torch.empty(2, 3, 8), torch.empty(2, 3, 4)
    assert _swiglu_fwd(xy, out) is out
    found = _swiglu_bwd(xy, dout, dxy, recompute_output=True, out=again)
    assert isinstance(found, tuple) and found[0] is dxy and found[1] is again
    torch.testing.assert_close(again, out)
    leaf = xy.clone().requires_grad_()
    torch.testing.assert_close(dxy, torch.autograd.grad(swiglu_fn(leaf), leaf, dout)[0])


@pytest.mark.parametrize(
    ("xy", "error", "words"),
    [
        (torch.zeros(2, 5), ShapeError, "xy has shape (2, 5), but its last dimension must be even"),
        (torch.zeros(2, 0), ShapeError, "xy has shape (2, 0)"),
        (torch.zeros(2, 4, dtype=torch.int64), DtypeError, "xy has dtype torch.int64"),
    ],
)
def test_wrong_arguments_are_named_before_any_work(xy: torch.Tensor, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        swiglu_fn(xy)
    assert words in str(caught.value)


def test_operators_pass_opcheck() -> None:
    xy = torch.randn(5, 12, requires_grad=True)
    opcheck(torch.ops.anymamba.swiglu, (xy,))
    for recompute in (True, False):
        opcheck(torch.ops.anymamba.swiglu_backward, (xy.detach(), torch.randn(5, 6), recompute))


def test_torch_compile_gives_what_eager_gives() -> None:
    xy = torch.randn(2, 3, 8, requires_grad=True)
    eager = swiglu_fn(xy)
    compiled = torch.compile(swiglu_fn, fullgraph=True, backend="aot_eager")(xy)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(torch.autograd.grad(compiled.sum(), xy), torch.autograd.grad(eager.sum(), xy))
