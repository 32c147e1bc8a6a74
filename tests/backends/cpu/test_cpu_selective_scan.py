"""The CPU kernels of the selective scan against the float64 reference: what their tiles and pieces could get wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba", reason="numba (the extra anymamba[cpu]) is not installed")

from anymamba.backends import choose, use_backend
from anymamba.backends.cpu._tiles import LANES
from anymamba.ops.selective_scan import CHECKPOINT_LENGTH, SELECTIVE_SCAN, SelectiveScanCall, selective_scan_fn
from oracle import assert_matches_reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def scan(
    batch: int, dim: int, seqlen: int, dstate: int, groups: int = 1, dtype: torch.dtype = torch.float64, seed: int = 0
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    state = torch.float64 if dtype == torch.float64 else torch.float32

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return {
        "u": tensor(batch, dim, seqlen),
        "delta": tensor(batch, dim, seqlen),
        "A": (-torch.rand(dim, dstate, generator=generator, dtype=torch.float64) * 4).to(state).requires_grad_(),
        "B": tensor(batch, groups, dstate, seqlen),
        "C": tensor(batch, groups, dstate, seqlen),
        "D": tensor(dim, dtype=state),
        "z": tensor(batch, dim, seqlen),
        "delta_bias": tensor(dim, dtype=state),
        "delta_softplus": True,
        "return_last_state": True,
        "initial_state": tensor(batch, dim, dstate, dtype=state),
    }


@st.composite
def scans(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a call: sizes around the tile and piece boundaries, any options, any layout."""
    groups = draw(st.integers(1, 3))
    channels = draw(st.sampled_from([1, 3, LANES - 1, LANES, LANES + 1]))
    seqlen = draw(st.sampled_from([0, 1, 5, 63, 64, 65, CHECKPOINT_LENGTH, CHECKPOINT_LENGTH + 1]))
    arguments = scan(
        draw(st.integers(0, 2)), groups * channels, seqlen, draw(st.sampled_from([1, 4, 16])), groups,
        draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**31)),
    )  # fmt: skip
    for name in ("D", "z", "delta_bias", "initial_state"):
        if draw(st.booleans()):
            arguments[name] = None
    arguments["delta_softplus"] = draw(st.booleans())
    if not arguments["delta_softplus"]:  # without it steps must be small and positive, as in any use
        arguments["delta"] = arguments["delta"].detach().abs().mul(0.5).requires_grad_()
        arguments["delta_bias"] = None
    if arguments["u"].dtype == torch.float64:  # a kernel each, compiled for seconds: in one dtype, which names them all
        for name in draw(st.sampled_from(["", "C", "BC"])):  # constant: one a channel
            arguments[name] = arguments["A"].detach().flip(0).mul(-0.7).add(0.3).requires_grad_()
    for name in ("u", "delta", "z", "B", "C"):
        value = arguments[name]
        layout = draw(st.sampled_from(["plain", "transposed", "every second", "expanded"]))
        if value is None or layout == "plain":
            continue
        value = value.detach()
        if layout == "transposed":
            value = value.transpose(-1, -2).contiguous().transpose(-1, -2)
        elif layout == "every second":
            value = torch.stack([value, torch.full_like(value, float("nan"))], dim=-1).flatten(-2)[..., ::2]
        elif value.shape[0]:
            value = value[:1].expand(value.shape)
        arguments[name] = value.requires_grad_()
    return arguments


@given(scans())
def test_any_call_matches_the_reference_forward_and_backward(arguments: dict[str, Any]) -> None:
    assert_matches_reference(selective_scan_fn, arguments, backend="cpu")


def test_gradients_are_those_of_finite_differences() -> None:
    arguments = scan(1, 3, 7, 2)
    leaves = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]

    def run(*values: torch.Tensor) -> Any:
        return selective_scan_fn(**{**arguments, **dict(zip(leaves, values))})

    with use_backend("cpu"):
        assert torch.autograd.gradcheck(run, tuple(arguments[name] for name in leaves))


def test_results_are_the_same_bits_on_one_thread_and_on_many_and_again() -> None:
    arguments = scan(2, 2 * LANES + 5, 300, 8, dtype=torch.float32)
    leaves = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5, 2):
            torch.set_num_threads(threads)
            with use_backend("cpu"):
                out, last = selective_scan_fn(**arguments)
                results.append([out, last, *torch.autograd.grad(out.sum() + last.sum(), leaves)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_strong_decay_neither_overflows_nor_makes_a_nan() -> None:
    arguments = scan(1, 4, 40, 4, dtype=torch.float32)
    arguments["delta"] = (arguments["delta"].detach().abs() * 1e4).requires_grad_()
    with use_backend("cpu"):
        out, last = selective_scan_fn(**arguments)
        (out.sum() + last.sum()).backward()
    assert out.isfinite().all()
    assert all(v.grad.isfinite().all() for v in arguments.values() if isinstance(v, torch.Tensor))


def test_a_nan_in_the_input_comes_out_from_its_step_on() -> None:
    arguments = scan(1, 2, 10, 3, dtype=torch.float32)
    arguments["u"].data[0, 1, 4] = float("nan")
    with use_backend("cpu"), torch.no_grad():
        out, _ = selective_scan_fn(**arguments)
    assert out[0, 0].isfinite().all()
    assert out[0, 1, :4].isfinite().all()
    assert out[0, 1, 4:].isnan().all()


@pytest.mark.parametrize(
    ("change", "chosen"),
    [({}, "cpu"), ({"A_dtype": torch.complex64}, "torch"), ({"B_varies": False}, "cpu")],
)
def test_what_it_cannot_do_goes_to_the_next_backend(change: dict[str, Any], chosen: str) -> None:
    call = SelectiveScanCall(torch.device("cpu"), torch.float32, torch.float32, 16, True, True)
    assert choose(SELECTIVE_SCAN, call._replace(**change)).__name__ == f"anymamba.backends.{chosen}.selective_scan"
