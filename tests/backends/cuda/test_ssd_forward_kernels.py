"""The state-space dual scan's forward kernel against the float64 reference: emulated on the CPU, and on the card with --gpu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from anymamba.backends import choices, use_backend
from anymamba.backends.cuda import ssd as kernels
from anymamba.ops import mamba_chunk_scan_combined
from anymamba.ops.ssd import SSD, SsdCall
from cuda_emulator import emulated, needs_emulator
from oracle import OUTPUT_BOUND, assert_matches_reference, relative_error, upcast
from ssd_inputs import inputs, packed, scans

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
pytestmark = needs_emulator


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda":
        yield "cuda"
    else:
        with emulated():
            yield "cpu"


def assert_right(arguments: dict[str, Any], bound: float | None = None) -> None:
    """Check every output against the reference."""
    with torch.no_grad(), use_backend("cuda"):
        seen = mamba_chunk_scan_combined(**arguments)
    with torch.no_grad(), use_backend("reference"):
        wanted = mamba_chunk_scan_combined(**{name: upcast(value) for name, value in arguments.items()})
    for name, ours, theirs in zip(("out", "final", "varlen"), seen, wanted):
        error = relative_error(ours, theirs)
        assert error <= (OUTPUT_BOUND[arguments["x"].dtype] if bound is None else bound), (name, error)


def test_outputs_and_states_match_the_reference(device: str) -> None:
    @settings(max_examples=15 if device == "cpu" else 30, deadline=None)
    @given(scans(device))
    def check(arguments: dict[str, Any]) -> None:
        assert_right(arguments)

    check()


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize(("headdim", "dstate"), [(64, 128), (128, 64), (64, 256), (16, 32)])
def test_sizes_of_models(device: str, dtype: torch.dtype, headdim: int, dstate: int) -> None:
    if device == "cpu" and (dtype, headdim, dstate) not in [(BF16, 64, 128), (F16, 64, 256), (F32, 128, 64)]:
        pytest.skip("on the card: g++ is slow")
    assert_right(inputs(device, dtype, seqlen=100, headdim=headdim, dstate=dstate))


def test_states_of_packed_sequences_and_of_empty_ones(device: str) -> None:
    arguments = packed(inputs(device, F32, seqlen=150, headdim=13), [3, 0, 64, 64, 0, 1, 18])
    assert_right(arguments)
    with use_backend("cuda"):
        varlen = mamba_chunk_scan_combined(**arguments)[2]
    assert not varlen[1].any() and not varlen[4].any()


@pytest.mark.parametrize("sequences", [False, True])
def test_time_cut_into_segments_changes_nothing(device: str, sequences: bool) -> None:
    arguments = inputs(device, F32, batch=2, seqlen=500, headdim=13, sequences=sequences, decay=0.05, seed=3)
    whole, cut = (forced(arguments, segments) for segments in (1, 3))
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(cut, whole))


@pytest.mark.parametrize(
    "shape",
    [
        (64, 64, 16, 4, 2, 1, 1), (64, 64, 16, 4, 1, 2, 1), (32, 32, 32, 4, 2, 2, 1), (32, 64, 16, 4, 1, 1, 1),
        (16, 32, 32, 2, 1, 1, 1), (64, 64, 32, 8, 2, 1, 1),
    ],
)  # fmt: skip
def test_every_shape_of_a_block_gives_the_same(device: str, shape: tuple[int, ...]) -> None:
    if device == "cpu" and shape[:2] == (64, 64) and shape[3] == 4:
        pytest.skip("on the card: g++ is slow")
    arguments = inputs(device, F32, seqlen=150, headdim=40, seed=5, full=False)
    wanted = forced(arguments, 1)
    seen = forced(arguments, 1, kernels.ForwardShape(*shape))
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(seen, wanted))


def forced(arguments: dict[str, Any], segments: int, shape: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and final states of the kernel launched with this many segments, and this shape."""
    a = arguments
    x, B = a["x"], a["B"]
    out = torch.full(x.shape, float("nan"), dtype=x.dtype, device=x.device)
    final = torch.full((*x.shape[:1], *x.shape[2:], B.shape[3]), float("nan"), device=x.device)
    usual = kernels._shapes(x.shape[3], B.shape[3], kernels.SIZES[x.dtype], 227 << 10)[0]
    kernels._forward(
        shape or usual, segments, x, a["dt"], a["A"], B, a["C"], a["D"], a["z"], a["dt_bias"], a["initial_states"],
        a["seq_idx"], None, a["dt_softplus"], *a["dt_limit"], out, final, None,
    )  # fmt: skip
    return out, final


def test_mixed_dtypes_come_back_as_asked(device: str) -> None:
    arguments = inputs(device, F32, headdim=13, full=True, sequences=True)
    arguments |= {"x": arguments["x"].to(BF16), "z": arguments["z"].to(F16), "dt": arguments["dt"].to(BF16)}
    assert_right(arguments)
    with use_backend("cuda"):
        assert mamba_chunk_scan_combined(**arguments)[0].dtype == BF16


def test_tf32_is_used_when_pytorch_may_use_it(device: str) -> None:
    arguments = inputs(device, F32, headdim=16, full=False)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with use_backend("cuda"):
            rough = mamba_chunk_scan_combined(**arguments)[0]
        assert_right(arguments, bound=1e-3)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    with use_backend("cuda"):
        exact = mamba_chunk_scan_combined(**arguments)[0]
    assert 1e-5 < relative_error(rough, exact) < 1e-3


def test_gradients_match_the_reference(device: str) -> None:
    arguments = {
        name: value.detach().requires_grad_()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in inputs(device, F32, headdim=13, sequences=True).items()
    }
    assert_matches_reference(mamba_chunk_scan_combined, arguments, backend="cuda")


def test_a_nan_step_stays_one(device: str) -> None:
    arguments = inputs(device, F32, headdim=13, full=True, sequences=True)
    arguments["dt"][0, 5, 1] = float("nan")
    with use_backend("cuda"):
        out = mamba_chunk_scan_combined(**arguments)[0]
    assert out[0, 5, 1].isnan().all() and not out[0, :, 0].isnan().any()


def test_what_the_kernel_does_not_take_says_why(device: str) -> None:
    place = torch.device(device)
    for call, word in [
        (SsdCall(place, torch.float64, F32, 64, 128, torch.float64), "float64"),
        (SsdCall(place, F32, F32, 64, 128, torch.float64), "float64"),
        (SsdCall(place, F32, F32, 300, 128), "300"),
        (SsdCall(place, F32, F32, 64, 512), "512"),
    ]:
        answer = next(choice for choice in choices(SSD, call) if choice.backend == "cuda")
        assert answer.refusal is not None and word in answer.refusal
    assert kernels._shapes(64, 256, 4, 64 << 10) == []  # fp32 with 256 states on a card with little shared memory


def test_shared_memory_of_other_cards_suffices() -> None:
    for limit in (64 << 10, 99 << 10, 163 << 10, 227 << 10):
        for dstate in (1, 16, 20, 64, 128, 256):
            for headdim in (1, 16, 64, 256):
                for size in (2, 4):
                    if (dstate, size, limit) != (256, 4, 64 << 10):
                        assert kernels._shapes(headdim, dstate, size, limit), (limit, dstate, headdim, size)
