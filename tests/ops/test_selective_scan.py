"""selective_scan_fn against the float64 reference, and its properties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import anymamba.backends.torch.selective_scan as torch_backend
from anymamba.backends import use_backend
from anymamba.errors import DeviceError, DtypeError, ShapeError
from anymamba.ops import selective_scan_fn, selective_scan_ref
from checks import opcheck
from oracle import GRADIENT_BOUND, OUTPUT_BOUND, assert_matches_reference, relative_error

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def draw_scan(
    generator: torch.Generator,
    batch: int,
    dim: int,
    seqlen: int,
    dstate: int,
    *,
    dtype: torch.dtype = torch.float64,
    groups: int | None = 1,
    B_constant: bool = False,
    C_constant: bool = False,
    complex_A: bool = False,
    options: bool = True,
) -> dict[str, Any]:
    """Return arguments of selective_scan_fn as in a model: A negative, steps small and positive."""
    state = torch.float64 if dtype == torch.float64 else torch.float32

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    A = -torch.rand(dim, dstate, generator=generator, dtype=torch.float64).to(state) - 0.1
    if complex_A:
        A = torch.complex(A, tensor(dim, dstate, dtype=state))

    def matrix(constant: bool) -> torch.Tensor:
        if constant:
            values = tensor(dim, dstate, dtype=state)
            return torch.complex(values, tensor(dim, dstate, dtype=state)) if complex_A else values
        columns = 2 * seqlen if complex_A else seqlen
        return tensor(batch, dstate, columns) if groups is None else tensor(batch, groups, dstate, columns)

    return {
        "u": tensor(batch, dim, seqlen),
        "delta": (0.5 * torch.rand(batch, dim, seqlen, generator=generator, dtype=torch.float64)).to(dtype),
        "A": A,
        "B": matrix(B_constant),
        "C": matrix(C_constant),
        "D": tensor(dim, dtype=torch.float32) if options else None,
        "z": tensor(batch, dim, seqlen) if options else None,
        "delta_bias": tensor(dim, dtype=torch.float32) if options else None,
        "delta_softplus": options,
        "return_last_state": True,
        "initial_state": tensor(batch, dim, dstate, dtype=A.dtype) if options else None,
    }


def leaves(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the same arguments, every floating tensor a leaf that wants its gradient."""
    return {
        name: value.detach().requires_grad_() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


@st.composite
def scans(draw: st.DrawFn) -> dict[str, Any]:
    """Draw arguments of selective_scan_fn: any layout, any options, dtypes mixed."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    groups = draw(st.sampled_from([None, 1, 2, 3]))
    dim = (groups or 1) * draw(st.integers(1, 4))
    arguments = draw_scan(
        generator,
        draw(st.integers(0, 3)),
        dim,
        draw(st.integers(0, 20)),
        draw(st.integers(1, 7)),
        dtype=draw(st.sampled_from(DTYPES)),
        groups=groups,
        B_constant=draw(st.booleans()),
        C_constant=draw(st.booleans()),
        complex_A=draw(st.booleans()),
    )
    for name in ("D", "z", "delta_bias", "initial_state"):
        if draw(st.booleans()):
            arguments[name] = None
    arguments["delta_softplus"] = draw(st.booleans())
    arguments["return_last_state"] = draw(st.booleans())
    for name in ("u", "delta", "z", "B", "C"):
        value = arguments[name]
        if value is None:
            continue
        layout = draw(st.sampled_from(["as it is", "as it is", "transposed", "every second", "expanded batch"]))
        if layout == "transposed":
            value = value.transpose(0, 1).contiguous().transpose(0, 1)
        elif layout == "every second":
            value = torch.stack([value, torch.full_like(value, float("nan"))], dim=-1).flatten(-2)[..., ::2]
        elif layout == "expanded batch" and value.dim() > 2 and value.shape[0]:
            value = value[:1].expand(value.shape)
        if draw(st.integers(0, 9)) == 0 and value.dim() > 2:
            value = value.to(draw(st.sampled_from(DTYPES[:3])))
        arguments[name] = value
    return leaves(arguments)


@given(scans())
@settings(max_examples=60)
def test_any_call_matches_the_reference_forward_and_backward(arguments: dict[str, Any]) -> None:
    assert_matches_reference(selective_scan_fn, arguments)


@pytest.mark.parametrize("seqlen", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("limit", [2**19, 64])
@pytest.mark.parametrize("complex_A", [False, True])
def test_lengths_around_a_piece_match_in_long_and_in_short_segments(
    seqlen: int, limit: int, complex_A: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_backend, "CPU_SEGMENT", limit)
    arguments = draw_scan(torch.Generator().manual_seed(0), 1, 4, seqlen, 3, groups=2, complex_A=complex_A)
    assert_matches_reference(selective_scan_fn, leaves(arguments))


@pytest.mark.parametrize("complex_A", [False, True])
def test_pieces_side_by_side_match_the_reference(complex_A: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "_pieces_beside", lambda device, step: 3)
    arguments = draw_scan(torch.Generator().manual_seed(0), 2, 4, 6 * 128 + 5, 2, groups=2, complex_A=complex_A)
    assert_matches_reference(selective_scan_fn, leaves(arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("complex_A", [False, True])
def test_on_a_gpu_pieces_do_run_side_by_side_and_match(dtype: torch.dtype, complex_A: bool) -> None:
    arguments = draw_scan(
        torch.Generator().manual_seed(0), 2, 4, 6 * 128 + 5, 2, dtype=dtype, groups=2, complex_A=complex_A
    )
    on_device = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    assert torch_backend._blocks(on_device["u"], on_device["A"])[0].pieces == 6
    assert_matches_reference(selective_scan_fn, leaves(on_device))


@pytest.mark.parametrize("complex_A", [False, True])
@pytest.mark.parametrize("constant", [False, True])
def test_gradients_are_those_of_finite_differences(complex_A: bool, constant: bool) -> None:
    arguments = leaves(
        draw_scan(
            torch.Generator().manual_seed(1), 1, 4, 4, 2,
            groups=2, B_constant=constant, C_constant=constant, complex_A=complex_A,
        )
    )  # fmt: skip
    names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    arguments = {
        k: v.detach().double().requires_grad_() if k in ("D", "delta_bias") else v for k, v in arguments.items()
    }

    def run(*tensors: torch.Tensor) -> Any:
        return selective_scan_fn(**(arguments | dict(zip(names, tensors))))

    for backend in ("torch", "reference"):
        with use_backend(backend):
            assert torch.autograd.gradcheck(run, tuple(arguments[name] for name in names))


@pytest.mark.parametrize("cut", [1, 64, 128, 199])
def test_a_sequence_cut_anywhere_and_continued_equals_the_whole_and_trains_alike(cut: int) -> None:
    arguments = leaves(draw_scan(torch.Generator().manual_seed(2), 2, 3, 200, 4))
    whole, last = selective_scan_fn(**arguments)
    parts = []
    state = arguments["initial_state"]
    for piece in (slice(None, cut), slice(cut, None)):
        cut_arguments = {name: arguments[name][..., piece] for name in ("u", "delta", "B", "C", "z")}
        part, state = selective_scan_fn(**(arguments | cut_arguments | {"initial_state": state}))
        parts.append(part)
    joined = torch.cat(parts, dim=-1)
    torch.testing.assert_close(joined, whole)
    torch.testing.assert_close(state, last)
    inputs = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    weights, more = torch.randn_like(whole), torch.randn_like(last)
    of_parts = torch.autograd.grad((joined * weights).sum() + (state * more).sum(), inputs)
    of_whole = torch.autograd.grad((whole * weights).sum() + (last * more).sum(), inputs)
    torch.testing.assert_close(of_parts, of_whole)


@pytest.mark.parametrize("complex_A", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strong_decay_gives_no_nan(dtype: torch.dtype, complex_A: bool) -> None:
    arguments = draw_scan(torch.Generator().manual_seed(3), 1, 4, 150, 3, dtype=dtype, complex_A=complex_A)
    arguments["A"] = arguments["A"] * 1e4
    arguments["delta"] = arguments["delta"] + 1
    assert_matches_reference(selective_scan_fn, leaves(arguments))


def test_a_backward_from_the_last_state_alone_reaches_every_input_it_depends_on() -> None:
    arguments = leaves(draw_scan(torch.Generator().manual_seed(4), 1, 2, 6, 2))
    _, last = selective_scan_fn(**arguments)
    last.sum().backward()
    for name in ("u", "delta", "A", "B", "delta_bias", "initial_state"):
        assert arguments[name].grad.abs().sum() > 0, name
    for name in ("C", "D", "z"):
        assert arguments[name].grad.abs().sum() == 0, name


def test_an_empty_sequence_hands_its_state_through() -> None:
    arguments = leaves(draw_scan(torch.Generator().manual_seed(5), 2, 3, 0, 2))
    out, last = selective_scan_fn(**arguments)
    assert out.shape == (2, 3, 0)
    assert torch.equal(last, arguments["initial_state"])
    last.sum().backward()
    assert arguments["initial_state"].grad.eq(1).all()


def test_a_sequence_in_a_batch_is_computed_as_it_is_alone() -> None:
    arguments = draw_scan(torch.Generator().manual_seed(6), 3, 4, 140, 2, dtype=torch.float32)
    out, _ = selective_scan_fn(**arguments)
    for row in range(3):
        alone = {
            name: value[row : row + 1] if isinstance(value, torch.Tensor) and value.dim() > 2 else value
            for name, value in arguments.items()
        }
        torch.testing.assert_close(selective_scan_fn(**alone)[0][0], out[row])


def test_out_has_the_dtype_of_u_and_the_layout_of_delta() -> None:
    arguments = draw_scan(torch.Generator().manual_seed(7), 2, 4, 6, 2, dtype=torch.bfloat16)
    arguments["delta"] = arguments["delta"].transpose(0, 1).contiguous().transpose(0, 1)
    for backend in ("torch", "reference"):
        with use_backend(backend):
            out, last = selective_scan_fn(**arguments)
        assert out.dtype == torch.bfloat16
        assert last.dtype == torch.float32
        assert out.stride() == arguments["delta"].stride()


def test_ref_is_the_reference_whatever_backend_is_chosen() -> None:
    arguments = draw_scan(torch.Generator().manual_seed(8), 1, 3, 9, 2)
    with use_backend("reference"):
        wanted = selective_scan_fn(**arguments)
    torch.testing.assert_close(selective_scan_ref(**arguments), wanted, rtol=0, atol=0)


def test_autocast_leaves_the_scan_in_full_precision() -> None:
    arguments = leaves(draw_scan(torch.Generator().manual_seed(9), 1, 4, 40, 4, dtype=torch.float32))

    def run(**arguments: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return selective_scan_fn(**arguments)

    assert_matches_reference(run, arguments, dtype=torch.float32)


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    arguments = leaves(draw_scan(torch.Generator().manual_seed(10), 1, 4, 40, 4, dtype=torch.float32))
    inputs = [value for value in arguments.values() if isinstance(value, torch.Tensor)]

    def run() -> torch.Tensor:
        out: torch.Tensor = selective_scan_fn(**arguments)[0]
        return out

    plain = torch.autograd.grad(run().sum(), inputs)
    again = torch.autograd.grad(checkpoint(run, use_reentrant=False).sum(), inputs)
    torch.testing.assert_close(again, plain, rtol=0, atol=0)


def test_training_stores_no_state_per_step() -> None:
    arguments = leaves(draw_scan(torch.Generator().manual_seed(11), 1, 8, 1024, 16, dtype=torch.float32))
    saved = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        selective_scan_fn(**arguments)
    own = {id(value) for value in arguments.values()}
    extra = sum(tensor.numel() for tensor in saved if id(tensor) not in own and tensor.shape[:3] == (1, 8, 8))
    assert extra == 1 * 8 * 8 * 16  # the checkpoints: (batch, dim, 1024 / 128, dstate)
    assert max(tensor.numel() for tensor in saved) < 8 * 1024 * 16


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"u": torch.zeros(1, 4)}, ShapeError, "u has shape (1, 4), but must be (batch, dim, seqlen)"),
        ({"u": torch.zeros(1, 4, 6).long()}, DtypeError, "u has dtype torch.int64"),
        ({"delta": torch.zeros(1, 4, 5)}, ShapeError, "delta has shape (1, 4, 5)"),
        ({"A": torch.zeros(3, 2)}, ShapeError, "A has shape (3, 2)"),
        ({"A": torch.zeros(4, 2).long()}, DtypeError, "A has dtype torch.int64"),
        ({"A": torch.zeros(4, 2, dtype=torch.complex64)}, ShapeError, "B has shape (1, 2, 6)"),
        ({"B": torch.zeros(1, 3, 6)}, ShapeError, "B has shape (1, 3, 6)"),
        ({"B": torch.zeros(6)}, ShapeError, "B has shape (6,)"),
        ({"B": torch.zeros(1, 3, 2, 6)}, ShapeError, "B has 3 groups"),
        ({"C": torch.zeros(4, 2, dtype=torch.complex64)}, DtypeError, "C has dtype torch.complex64"),
        ({"C": torch.zeros(1, 2, 2, 6)}, ShapeError, "C has 2 groups, but must have 1 like B"),
        ({"D": torch.zeros(5)}, ShapeError, "D has shape (5,)"),
        ({"z": torch.zeros(1, 4, 7)}, ShapeError, "z has shape (1, 4, 7)"),
        ({"delta_bias": torch.zeros(4, device="meta")}, DeviceError, "delta_bias is on meta"),
        ({"initial_state": torch.zeros(1, 4, 3)}, ShapeError, "initial_state has shape (1, 4, 3)"),
    ],
)
def test_wrong_arguments_are_named_before_any_work(change: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = {
        "u": torch.zeros(1, 4, 6),
        "delta": torch.zeros(1, 4, 6),
        "A": torch.zeros(4, 2),
        "B": torch.zeros(1, 2, 6),
        "C": torch.zeros(1, 2, 6),
    } | change
    with pytest.raises(error) as caught:
        selective_scan_fn(**arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("complex_A", [True, False])
def test_operators_pass_opcheck(full: bool, complex_A: bool) -> None:
    arguments = draw_scan(
        torch.Generator().manual_seed(12), 2, 4, 6, 3,
        dtype=torch.float32, complex_A=complex_A, B_constant=not full, options=full,
    )  # fmt: skip
    arguments["delta"] = arguments["delta"].transpose(0, 1).contiguous().transpose(0, 1)
    arguments.pop("return_last_state")
    inputs = list(arguments.values())
    opcheck(torch.ops.anymamba.selective_scan, (*leaves(arguments).values(), full))
    dout = torch.randn(2, 4, 6)
    dlast_state = torch.randn(2, 4, 3).to(arguments["A"].dtype) if full else None
    _, _, checkpoints = torch.ops.anymamba.selective_scan(*inputs, True)
    opcheck(torch.ops.anymamba.selective_scan_backward, (*inputs, checkpoints if full else None, dout, dlast_state))


def test_torch_compile_and_export_give_what_eager_gives() -> None:
    arguments = leaves(draw_scan(torch.Generator().manual_seed(13), 1, 4, 20, 3, dtype=torch.float32))
    inputs = [value for value in arguments.values() if isinstance(value, torch.Tensor)]

    def step(arguments: dict[str, Any]) -> torch.Tensor:
        out, last = selective_scan_fn(**arguments)
        return out.sum() + (last * last).sum()

    eager = step(arguments)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(arguments)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(torch.autograd.grad(compiled, inputs), torch.autograd.grad(eager, inputs))

    class Module(torch.nn.Module):
        def forward(self, u: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
            return step(fixed | {"u": u, "delta": delta})

    fixed = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    exported = torch.export.export(Module(), (fixed["u"], fixed["delta"]))
    torch.testing.assert_close(exported.module()(fixed["u"], fixed["delta"]), eager.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dz_and_out_are_written_where_the_fused_block_wants_them(dtype: torch.dtype) -> None:
    arguments = draw_scan(torch.Generator().manual_seed(14), 2, 4, 140, 3, dtype=dtype)
    arguments.pop("return_last_state")
    out, _ = selective_scan_fn(**arguments, return_last_state=True)
    inputs = [
        value.unsqueeze(1) if name in ("B", "C") and value.dim() == 3 else value for name, value in arguments.items()
    ]
    results = {}
    for backend in ("torch", "reference"):
        with use_backend(backend):
            from anymamba.ops.selective_scan import _backward

            both = torch.full((2, 8, 140), float("nan"), dtype=dtype)
            gradients = _backward(*inputs, None, torch.ones_like(out), None, return_out=True, dz_out=both[:, 4:])
        assert gradients[-1] is not None
        assert relative_error(gradients[-1], out) <= OUTPUT_BOUND[dtype]
        assert both[:, :4].isnan().all()
        results[backend] = both[:, 4:]
    assert relative_error(results["torch"], results["reference"]) <= GRADIENT_BOUND[dtype]
