"""The state-space dual scan's backward kernels against the float64 reference: emulated on the CPU, on the card with --gpu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from anymamba.backends import use_backend
from anymamba.backends.cuda import _ssd_backward as kernels
from anymamba.backends.cuda.runtime.kernel import runtime
from anymamba.measure.accuracy import deviations, outputs_and_gradients, reference_results
from anymamba.ops import mamba_chunk_scan_combined
from anymamba.ops.ssd import SsdBuffers
from cuda_emulator import emulated, needs_emulator
from oracle import GRADIENT_BOUND, OUTPUT_BOUND, relative_error
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


def leaves(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().requires_grad_()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in arguments.items()
    }


def assert_right(arguments: dict[str, Any]) -> None:
    """Check outputs and every gradient against the reference.

    The gradients of A and dt_bias are sums over all steps whose terms may cancel; in 16 bits, where S and R are rounded for the
    tensor cores, as upstream's are, they may be off by four bounds.
    """
    arguments = leaves(arguments)
    dtype = max(
        (v.dtype for v in arguments.values() if isinstance(v, torch.Tensor) and v.is_floating_point()),
        key=OUTPUT_BOUND.__getitem__,
    )
    with use_backend("cuda"):
        seen = outputs_and_gradients(mamba_chunk_scan_combined, arguments, 0)
    wanted = reference_results(mamba_chunk_scan_combined, arguments, 0)
    for name, error, bound in deviations(seen, wanted, OUTPUT_BOUND[dtype], GRADIENT_BOUND[dtype]):
        several = 4 if dtype != F32 and name.split()[-1] in ("A", "dt_bias") else 1
        assert error <= several * bound, (name, error, dtype)


def test_gradients_match_the_reference(device: str) -> None:
    @settings(max_examples=5 if device == "cpu" else 25, deadline=None)
    @given(scans(device))
    def check(arguments: dict[str, Any]) -> None:
        assert_right(arguments)

    check()


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize(("headdim", "dstate"), [(64, 128), (128, 64), (64, 256), (16, 32)])
def test_sizes_of_models(device: str, dtype: torch.dtype, headdim: int, dstate: int) -> None:
    if device == "cpu" and (dtype, headdim, dstate) not in [(BF16, 64, 128), (F32, 16, 32)]:
        pytest.skip("on the card: g++ is slow")
    assert_right(inputs(device, dtype, seqlen=100, headdim=headdim, dstate=dstate, full=False))


@pytest.mark.parametrize("heads", [1, 3, 5])
def test_heads_of_a_group_split_over_blocks_add_up(device: str, heads: int) -> None:
    arguments = inputs(device, F32, batch=2, seqlen=70, heads=2 * heads, groups=2, full=False)
    whole, parts = (gradients(arguments, splits) for splits in (1, heads))
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(parts, whole))


@pytest.mark.parametrize("shape", [(64, 16, 16, 16, 2), (64, 16, 16, 16, 1), (32, 16, 16, 8, 2), (16, 16, 16, 4, 1)])
def test_every_shape_of_a_block_gives_the_same(device: str, shape: tuple[int, ...]) -> None:
    arguments = inputs(device, F32, seqlen=100, heads=3, full=False, decay=0.3)
    wanted = gradients(arguments, 1)
    seen = gradients(arguments, 1, kernels.BackwardShape(*shape))
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(seen, wanted))


def gradients(arguments: dict[str, Any], splits: int, shape: Any = None) -> list[torch.Tensor]:
    """Return the gradients of the kernels launched with these splits, and this shape."""
    a = arguments
    weights = torch.linspace(-1, 1, a["x"].numel(), device=a["x"].device).view(a["x"].shape)
    usual = kernels._plan
    kernels._plan = lambda _shape, _splits, *rest: usual(shape, splits, *rest)  # type: ignore[assignment]
    try:
        found = kernels._gradients(
            weights.to(a["x"].dtype), None, a["x"], a["dt"], a["A"], a["B"], a["C"], a["D"], a["dt_bias"], a["initial_states"],
            a["seq_idx"], a["dt_softplus"], *a["dt_limit"], None,
        )  # fmt: skip
    finally:
        kernels._plan = usual
    return [tensor for tensor in found if tensor is not None]


@pytest.mark.parametrize("which", ["out", "final"])
def test_only_one_result_may_be_differentiated(device: str, which: str) -> None:
    arguments = leaves(inputs(device, F32, full=False))
    results = {}
    for backend in ("cuda", "torch"):
        with use_backend(backend):
            out, final = mamba_chunk_scan_combined(**arguments)
        chosen = out if which == "out" else final
        wanted = [value for value in arguments.values() if isinstance(value, torch.Tensor) and value.requires_grad]
        found = torch.autograd.grad(chosen.square().sum(), wanted, allow_unused=True)
        results[backend] = [torch.zeros(()) if grad is None else grad for grad in found]
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(results["cuda"], results["torch"]))


def test_strong_decay_leaves_no_rounding_behind(device: str) -> None:
    # d(d*A) of a step that forgets everything is tiny beside the sums it is found from
    arguments = inputs(device, F32, seqlen=130, full=False, decay=60.0)
    arguments |= {"dt_limit": (0.5, 2.0)}
    assert_right(arguments)


def test_the_same_call_gives_the_same_bits(device: str) -> None:
    arguments = inputs(device, BF16, batch=2, seqlen=100, heads=4, headdim=16, dstate=32)
    first, second = gradients(arguments | {"z": None}, 2), gradients(arguments | {"z": None}, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_gradients_go_where_the_caller_wants_them(device: str) -> None:
    a = inputs(device, F32, seqlen=70, full=True)
    where = {name: torch.full((*a[of].shape[:-1], 2 * a[of].shape[-1]), 7.0, device=device)[..., : a[of].shape[-1]]
             for name, of in (("dx", "x"), ("ddt", "dt"), ("dB", "B"), ("dC", "C"), ("dz", "z"))}  # fmt: skip
    arguments = (
        torch.ones(a["x"].shape, device=device), None, None, a["x"], a["dt"], a["A"], a["B"], a["C"], a["D"], a["z"],
        a["dt_bias"], a["initial_states"], None, None, True, 0.0, float("inf"),
    )  # fmt: skip
    new = kernels.ssd_backward(*arguments, recompute_out=True)
    placed = kernels.ssd_backward(*arguments, into=SsdBuffers(**where), recompute_out=True)
    for name in where:
        assert getattr(placed, name).data_ptr() == where[name].data_ptr()
        assert torch.equal(getattr(placed, name), getattr(new, name))
    with torch.no_grad(), use_backend("cuda"):
        out = mamba_chunk_scan_combined(**a)[0]
    assert new.out is not None and relative_error(new.out, out) < 1e-5


def test_gradients_of_packed_sequences_states_are_left_to_torch(device: str) -> None:
    assert_right(packed(inputs(device, F32, seqlen=90, headdim=13), [20, 0, 64, 6]))


def test_two_launches_are_all(device: str) -> None:
    if device != "cpu":
        pytest.skip("the emulator counts launches")
    launches: Any = runtime().driver.launches
    before = len(launches)
    gradients(inputs(device, F32, seqlen=70, full=False), 1)
    assert [name for name, _ in launches[before:]] == ["ssd_states", "ssd_backward"]


def test_shared_memory_of_other_cards_suffices() -> None:
    for limit in (64 << 10, 99 << 10, 163 << 10, 227 << 10):
        for dstate in (1, 16, 64, 128):
            for headdim in (1, 16, 64):
                shape = kernels._shape(headdim, dstate, 2, limit)
                assert shape is not None and shape.shared_bytes(2, True) <= limit, (limit, dstate, headdim)
    assert kernels._shape(256, 128, 2, 227 << 10) is None
