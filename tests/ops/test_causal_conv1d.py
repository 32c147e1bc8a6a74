"""causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states against the float64 reference."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anymamba.backends import use_backend
from anymamba.errors import DeviceError, DtypeError, OptionError, ShapeError
from anymamba.ops import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states
from anymamba.ops.causal_conv1d import _backward
from checks import opcheck
from oracle import CPU_BACKENDS, assert_matches_reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@st.composite
def convolutions(draw: st.DrawFn) -> dict[str, object]:
    """Draw arguments of causal_conv1d_fn: any layout, any options."""
    batch, dim, seqlen = draw(st.integers(0, 3)), draw(st.integers(1, 9)), draw(st.integers(0, 40))
    width = draw(st.integers(1, 5))
    dtype, weight_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    x = tensor(batch, dim, seqlen)
    layout = draw(st.sampled_from(["channel first", "channel last", "slice", "every second"]))
    if layout == "channel last":
        x = tensor(batch, seqlen, dim).transpose(1, 2).detach().requires_grad_()
    elif layout == "slice":
        x = tensor(batch, 2 * dim, seqlen).chunk(2, dim=1)[1].detach().requires_grad_()
    elif layout == "every second":
        x = tensor(batch, dim, 2 * seqlen)[..., ::2].detach().requires_grad_()
    seq_idx = None
    if draw(st.booleans()):
        seq_idx = torch.randint(-1, 4, (batch, seqlen), generator=generator).sort(dim=1)[0].int()
    return {
        "x": x,
        "weight": tensor(dim, width, dtype=weight_dtype),
        "bias": tensor(dim, dtype=weight_dtype) if draw(st.booleans()) else None,
        "seq_idx": seq_idx,
        "initial_states": tensor(batch, dim, width - 1) if draw(st.booleans()) else None,
        "return_final_states": draw(st.booleans()),
        "activation": draw(st.sampled_from([None, "silu", "swish"])),
    }


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@given(arguments=convolutions())
def test_any_call_matches_the_reference_forward_and_backward(backend: str, arguments: dict[str, object]) -> None:
    assert_matches_reference(causal_conv1d_fn, arguments, backend=backend)


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    x, weight, bias, states = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in [(2, 3, 6), (3, 4), (3,), (2, 3, 3)]
    )

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, states: torch.Tensor) -> object:
        return causal_conv1d_fn(x, weight, bias, None, states, return_final_states=True, activation="silu")

    for backend in (*CPU_BACKENDS, "reference"):
        with use_backend(backend):
            assert torch.autograd.gradcheck(run, (x, weight, bias, states))


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 11])
def test_a_sequence_cut_anywhere_and_continued_with_states_equals_the_whole(cut: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    whole, last = causal_conv1d_fn(x, weight, return_final_states=True)
    head, states = causal_conv1d_fn(x[..., :cut], weight, return_final_states=True)
    tail, end = causal_conv1d_fn(x[..., cut:], weight, initial_states=states, return_final_states=True)
    torch.testing.assert_close(torch.cat([head, tail], dim=-1), whole)
    torch.testing.assert_close(end, last)


def test_packed_sequences_equal_separate_ones() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(1, 4, length, dtype=torch.float64) for length in (1, 5, 2, 7)]
    weight, bias = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    seq_idx = torch.cat([torch.full((1, part.shape[2]), i, dtype=torch.int32) for i, part in enumerate(parts)], dim=1)
    packed = causal_conv1d_fn(torch.cat(parts, dim=2), weight, bias, seq_idx, activation="silu")
    separate = torch.cat([causal_conv1d_fn(part, weight, bias, activation="silu") for part in parts], dim=2)
    torch.testing.assert_close(packed, separate)


def test_final_states_out_receives_the_states_and_keeps_their_gradient() -> None:
    x = torch.randn(1, 2, 5, requires_grad=True)
    buffer = torch.full((1, 2, 3), float("nan"))
    _, states = causal_conv1d_fn(x, torch.randn(2, 4), return_final_states=True, final_states_out=buffer)
    assert states is buffer
    torch.testing.assert_close(buffer, x[..., 2:])
    states.sum().backward()
    assert x.grad is not None
    assert x.grad[..., 2:].eq(1).all()


@pytest.mark.parametrize("backend", [*CPU_BACKENDS, "reference"])
def test_backward_writes_into_the_buffer_it_is_given(backend: str) -> None:
    x, weight, dout = torch.randn(2, 3, 8), torch.randn(3, 4), torch.randn(2, 3, 8)
    buffer = torch.full((2, 6, 8), float("nan"))
    half = buffer.chunk(2, dim=1)[1]
    with use_backend(backend):
        fresh = _backward(x, weight, None, dout, None, None, None, True)[0]
        given = _backward(x, weight, None, dout, None, None, None, True, dx_out=half)[0]
    assert given is half
    assert torch.equal(half, fresh)
    assert buffer.chunk(2, dim=1)[0].isnan().all()


@given(
    st.integers(1, 4), st.integers(1, 6), st.integers(1, 7), st.integers(1, 4), st.integers(0, 4),
    st.booleans(), st.booleans(), st.sampled_from(DTYPES), st.integers(0, 1000),
)  # fmt: skip
def test_update_matches_the_reference_and_changes_the_state_alike(
    batch: int,
    dim: int,
    seqlen: int,
    width: int,
    extra: int,
    circular: bool,
    indexed: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    state_len = max(width - 1 + extra, 1)
    entries = batch + 3
    state = tensor(entries if indexed else batch, dim, state_len)
    lengths = torch.randint(0, 50, (batch,), generator=generator).int() if circular else None
    indices = None
    if indexed:
        indices = torch.randperm(entries, generator=generator)[:batch].int()
        indices[0] = -1
    x, weight, bias = tensor(batch, dim, seqlen), tensor(dim, width), tensor(dim)
    expected = state.clone()
    with use_backend("reference"):
        wanted = causal_conv1d_update(x, expected, weight, bias, "silu", lengths, indices)
    for backend in CPU_BACKENDS:
        for _ in range(2):  # the second call is a prepared one where the backend prepares calls
            ours = state.clone()
            with use_backend(backend):
                out = causal_conv1d_update(x, ours, weight, bias, "silu", lengths, indices)
            torch.testing.assert_close(out, wanted)
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("state_len", [3, 4, 6])
def test_a_whole_layers_step_matches_the_reference(backend: str, state_len: int) -> None:
    torch.manual_seed(0)
    state, weight, bias = torch.randn(5, 70, state_len), torch.randn(70, 4), torch.randn(70)
    x = torch.randn(3, 70)
    indices = torch.tensor([4, -1, 2])
    for activation in (None, "silu"):
        ours, expected = state.clone(), state.clone()
        with use_backend("reference"):
            wanted = causal_conv1d_update(x, expected, weight, bias, activation, None, indices)
        with use_backend(backend):
            out = causal_conv1d_update(x, ours, weight, bias, activation, None, indices)
        torch.testing.assert_close(out, wanted)
        assert torch.equal(ours, expected)


def test_stepping_with_update_equals_the_whole_convolution() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 3, 9), torch.randn(3, 4), torch.randn(3)
    whole = causal_conv1d_fn(x, weight, bias, activation="silu")
    state = torch.zeros(2, 3, 4)
    steps = [causal_conv1d_update(x[..., t], state, weight, bias, "silu") for t in range(9)]
    torch.testing.assert_close(torch.stack(steps, dim=-1), whole)


def test_varlen_states_are_the_last_columns_of_each_sequence() -> None:
    x = torch.arange(12.0).reshape(6, 2)
    states = causal_conv1d_varlen_states(x, torch.tensor([0, 1, 1, 6], dtype=torch.int32), 3)
    assert states.shape == (3, 2, 3)
    assert states.stride(1) == 1
    assert states[0].tolist() == [[0, 0, 0], [0, 0, 1]]
    assert states[1].eq(0).all()
    assert states[2].tolist() == [[6, 8, 10], [7, 9, 11]]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.zeros(2, 3)}, ShapeError, "x has shape (2, 3), but must be (batch, dim, seqlen)"),
        ({"x": torch.zeros(1, 3, 4, dtype=torch.int64)}, DtypeError, "x has dtype torch.int64"),
        ({"weight": torch.zeros(2, 4)}, ShapeError, "weight has shape (2, 4)"),
        ({"bias": torch.zeros(4)}, ShapeError, "bias has shape (4,)"),
        ({"seq_idx": torch.zeros(1, 4)}, DtypeError, "seq_idx has dtype torch.float32"),
        ({"initial_states": torch.zeros(1, 3, 2)}, ShapeError, "initial_states has shape (1, 3, 2)"),
        ({"weight": torch.zeros(3, 4, device="meta")}, DeviceError, "weight is on meta"),
        ({"activation": "relu"}, OptionError, "activation is 'relu'"),
        ({"final_states_out": torch.zeros(1, 3, 3)}, OptionError, "return_final_states is False"),
    ],
)
def test_wrong_arguments_are_named_before_any_work(
    change: dict[str, object], error: type[Exception], words: str
) -> None:
    arguments = {"x": torch.zeros(1, 3, 4), "weight": torch.zeros(3, 4)} | change
    with pytest.raises(error) as caught:
        causal_conv1d_fn(**arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize("full", [True, False])
def test_operators_pass_opcheck(full: bool) -> None:
    x, weight = torch.randn(2, 5, 7, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    bias = torch.randn(5, requires_grad=True) if full else None
    states = torch.randn(2, 5, 3, requires_grad=True) if full else None
    opcheck(torch.ops.anymamba.causal_conv1d, (x, weight, bias, None, states, True, full))
    detached = [None if t is None else t.detach() for t in (x, weight, bias, states)]
    opcheck(
        torch.ops.anymamba.causal_conv1d_backward,
        (*detached[:3], torch.randn(2, 5, 7), None, detached[3], torch.randn(2, 5, 3) if full else None, True),
    )
    opcheck(
        torch.ops.anymamba.causal_conv1d_update,
        (detached[0], torch.randn(2, 5, 6), detached[1], detached[2], True, None, None),
    )
    opcheck(
        torch.ops.anymamba.causal_conv1d_varlen_states,
        (torch.randn(9, 4), torch.tensor([0, 3, 9], dtype=torch.int32), 5),
    )


def test_torch_compile_and_export_give_what_eager_gives() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 4, 6, requires_grad=True), torch.randn(4, 3, requires_grad=True)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = causal_conv1d_fn(x * 2, weight, activation="silu")
        return out

    eager = step(x, weight)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(x, weight)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(
        torch.autograd.grad(compiled.sum(), (x, weight)), torch.autograd.grad(eager.sum(), (x, weight))
    )

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return step(x, weight)

    exported = torch.export.export(Module(), (x.detach(), weight.detach()))
    torch.testing.assert_close(exported.module()(x.detach(), weight.detach()), eager.detach())


def test_the_backward_runs_where_the_forward_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for name in ("torch", "reference"):
        module = importlib.import_module(f"anymamba.backends.{name}.causal_conv1d")
        original = module.causal_conv1d_backward

        def noted(*arguments: object, name: str = name, original: Any = original, **options: object) -> Any:
            ran.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(module, "causal_conv1d_backward", noted)
    x = torch.randn(1, 2, 5, requires_grad=True)
    with use_backend("reference"):
        out = causal_conv1d_fn(x, torch.randn(2, 4))
    out.sum().backward(retain_graph=True)
    with use_backend("torch"):
        out.sum().backward()
    assert ran == ["reference", "reference"]
