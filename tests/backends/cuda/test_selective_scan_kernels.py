"""The scan's kernels against the float64 reference: emulated on the CPU, and on the card with --gpu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anymamba.backends import choices, use_backend
from anymamba.backends.cuda import selective_scan as kernels
from anymamba.ops import selective_scan as ops
from anymamba.ops.selective_scan import SELECTIVE_SCAN, SelectiveScanCall, selective_scan_fn
from cuda_emulator import emulated, needs_emulator
from oracle import assert_matches_reference, relative_error

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
pytestmark = needs_emulator


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda":
        yield "cuda"
    else:
        with emulated():
            yield "cpu"


def inputs(
    device: str,
    dtype: torch.dtype = F32,
    batch: int = 2,
    dim: int = 6,
    seqlen: int = 40,
    dstate: int = 16,
    groups: int = 1,
    layout: str = "rows",
    full: bool = True,
    initial: bool = True,
    seed: int = 0,
) -> dict[str, Any]:
    """Return arguments of selective_scan_fn with gradients wanted for all of them."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    def sequence() -> torch.Tensor:
        if layout == "channels":
            return tensor(batch, seqlen, dim).transpose(1, 2)
        if layout == "dim first":
            return tensor(dim, batch, seqlen).transpose(0, 1)
        if layout == "aligned rows":  # of a longer buffer: rows begin at multiples of 16 bytes whatever seqlen is
            return tensor(batch, dim, (seqlen + 15) // 8 * 8)[..., :seqlen]
        return tensor(batch, dim, seqlen)

    def matrix() -> torch.Tensor:
        if layout == "channels":
            return tensor(batch, seqlen, groups, dstate).permute(0, 2, 3, 1)
        return tensor(batch, groups, dstate, seqlen)

    found = {
        "u": sequence(),
        "delta": sequence() if full else (sequence().abs() * 0.3).detach(),
        "A": -torch.rand(dim, dstate, generator=generator).to(device) - 0.05,
        "B": matrix(),
        "C": matrix(),
        "D": tensor(dim, dtype=F32) if full else None,
        "z": sequence() if full else None,
        "delta_bias": tensor(dim, dtype=F32) if full else None,
        "delta_softplus": full,
        "initial_state": tensor(batch, dim, dstate, dtype=F32) if initial else None,
        "return_last_state": True,
    }
    return {
        name: value.detach().requires_grad_() if isinstance(value, torch.Tensor) else value
        for name, value in found.items()
    }


@st.composite
def scans(draw: st.DrawFn, device: str) -> dict[str, Any]:
    """Draw arguments: any layout, any options. On the CPU such as need few kernels: g++ takes two seconds for each."""
    if device == "cpu":
        dtype, full = draw(st.sampled_from([(F32, True), (BF16, False)]))
        dstate, groups, dim = (
            draw(st.sampled_from([16, 13])),
            draw(st.sampled_from([1, 2])),
            draw(st.sampled_from([2, 6])),
        )
        layout = draw(st.sampled_from(["rows", "channels"]))
        seqlen = draw(st.integers(0, 20)) * 8 if layout == "rows" else draw(st.integers(0, 150))
    else:
        dtype, full = draw(st.sampled_from([F32, F16, BF16])), draw(st.booleans())
        dstate = draw(st.sampled_from([16, 13, 1, 4, 8, 20, 33, 64, 100, 256]))
        groups = draw(st.sampled_from([1, 2, 3]))
        dim = groups * draw(st.integers(1, 70))
        layout = draw(st.sampled_from(["rows", "channels", "dim first", "aligned rows"]))
        seqlen = draw(st.one_of(st.integers(0, 300), st.sampled_from([32, 64, 128])))
    return inputs(
        device, dtype, draw(st.integers(1, 3)), dim, seqlen, dstate, groups, layout, full, draw(st.booleans()),
        draw(st.integers(0, 2**31)),
    )  # fmt: skip


def test_outputs_and_gradients_match_the_reference(device: str) -> None:
    @settings(max_examples=12 if device == "cpu" else 50, deadline=None)
    @given(scans(device))
    def check(arguments: dict[str, Any]) -> None:
        assert_matches_reference(selective_scan_fn, arguments, backend="cuda")

    check()


@pytest.mark.parametrize("dstate", [3, 8, 32, 60, 128, 200])
def test_any_number_of_states(device: str, dstate: int) -> None:
    if device == "cpu" and dstate not in (3, 60):
        pytest.skip("on the card: g++ is slow")
    assert_matches_reference(selective_scan_fn, inputs(device, F32, 1, 3, 37, dstate, seed=dstate), backend="cuda")


@pytest.mark.parametrize(("lanes", "each"), [(1, 1), (2, 2), (4, 1), (4, 2), (8, 4), (16, 1)])
def test_time_cut_into_segments_changes_nothing(device: str, lanes: int, each: int) -> None:
    if device == "cpu" and (lanes, each) not in ((2, 2), (8, 4)):
        pytest.skip("on the card: g++ is slow")
    arguments = inputs(device, F32, 1, 5, 700, seed=lanes)
    arguments.pop("return_last_state")
    values = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with use_backend("reference"):
        wanted, wanted_state = selective_scan_fn(
            **{k: v.double() if isinstance(v, torch.Tensor) else v for k, v in values.items()}, return_last_state=True
        )
    u, delta, A, B, C, D, z, bias, softplus, initial = values.values()
    out, state = torch.empty_like(delta), torch.full((1, 5, 16), float("nan"), device=device)
    shape = kernels.ForwardShape(lanes, 16, 4, 128, 1, 2, each)
    kernels._forward(shape, 3, u, delta, A, B.detach(), C, D, z, bias, softplus, initial, out, state, None)
    assert relative_error(out, wanted) < 1e-6
    assert relative_error(state, wanted_state) < 1e-6


def test_backward_cut_into_segments(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_segments", lambda blocks, resident, seqlen: 3)
    assert_matches_reference(selective_scan_fn, inputs(device, F32, 1, 5, 700), backend="cuda")


def test_deterministic_backward_is_bit_equal_and_right(device: str) -> None:
    arguments = inputs(device, F32, 2, 40, 200)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert_matches_reference(selective_scan_fn, arguments, backend="cuda")
        runs = []
        for _ in range(2 if device == "cpu" else 5):
            with use_backend("cuda"):
                out, state = selective_scan_fn(**arguments)
            leaves = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
            runs.append(torch.autograd.grad(out.sum() + state.sum(), leaves))
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


def test_out_comes_again_and_dz_goes_where_asked(device: str) -> None:
    arguments = inputs(device, F32, 2, 6, 40)
    values = [
        v.detach() if isinstance(v, torch.Tensor) else v for k, v in arguments.items() if k != "return_last_state"
    ]
    out, _, checkpoints = kernels.selective_scan_forward(*values, True)
    buffer = torch.full((2, 12, 40), float("nan"), device=device)
    dout = torch.ones_like(out)
    *gradients, again = kernels.selective_scan_backward(
        *values, checkpoints, dout, None, return_out=True, dz_out=buffer[:, 6:]
    )
    assert gradients[6].data_ptr() == buffer[:, 6:].data_ptr()
    assert not buffer[:, 6:].isnan().any() and buffer[:, :6].isnan().all()
    assert relative_error(again, out) < 1e-6
    without = kernels.selective_scan_backward(*values, None, dout, None)
    assert relative_error(without[3], gradients[3]) < 1e-6


def test_a_call_like_one_before_goes_straight_to_the_launch(device: str) -> None:
    first, second = (
        {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in drawn.items()}
        for drawn in (inputs(device, F32, 2, 6, 40, seed=1), inputs(device, F32, 2, 6, 40, seed=2))
    )
    with use_backend("reference"):
        wanted = selective_scan_fn(**second)
    with use_backend("cuda"):
        selective_scan_fn(**first)
        seen = selective_scan_fn(**second)
    assert ops._prepared._calls
    assert all(relative_error(a, b) < 2e-6 for a, b in zip(seen, wanted))


def test_what_the_kernels_do_not_take_says_why(device: str) -> None:
    place = torch.device(device)
    for call, word in [
        (SelectiveScanCall(place, torch.float64, torch.float64, 16, True, True), "float64"),
        (SelectiveScanCall(place, F32, torch.complex64, 16, True, True), "complex64"),
        (SelectiveScanCall(place, F32, F32, 16, False, True), "constant"),
        (SelectiveScanCall(place, F32, F32, 300, True, True), "300"),
    ]:
        answer = next(choice for choice in choices(SELECTIVE_SCAN, call) if choice.backend == "cuda")
        assert answer.refusal is not None and word in answer.refusal
    assert ops.SELECTIVE_SCAN.functions == ("selective_scan_forward", "selective_scan_backward")
