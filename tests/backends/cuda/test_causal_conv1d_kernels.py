"""The convolution's kernels against the float64 reference: emulated on the CPU, and on the card with --gpu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anymamba.backends import choices, use_backend
from anymamba.ops import causal_conv1d as ops
from anymamba.ops import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states
from cuda_emulator import emulated, needs_emulator
from oracle import assert_matches_reference

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# (x, weight, width, silu, packed): together every branch of the sources; g++ takes a second for each kernel.
COMPILED = [
    (BF16, F32, 4, True, False),
    (F32, F32, 3, False, True),
    (F16, F16, 2, True, True),
    (F32, F32, 4, True, False),
]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda":
        yield "cuda"
    else:
        with emulated():
            yield "cpu"


pytestmark = needs_emulator


@st.composite
def convolutions(draw: st.DrawFn, device: str) -> dict[str, Any]:
    """Draw arguments of causal_conv1d_fn: any layout, any options."""
    if device == "cpu":
        dtype, weight_dtype, width, silu, packed = draw(st.sampled_from(COMPILED))
        sizes = (3, 10, 70)
    else:
        dtype, weight_dtype = draw(st.sampled_from([F32, F16, BF16])), draw(st.sampled_from([F32, F16, BF16]))
        width, silu, packed = draw(st.integers(2, 4)), draw(st.booleans()), draw(st.booleans())
        sizes = draw(st.sampled_from([(3, 10, 70), (2, 300, 20), (2, 5, 5000), (40, 9, 300)]))
    batch, seqlen = draw(st.integers(0, sizes[0])), draw(st.integers(0, sizes[2]))
    dim = draw(st.sampled_from([4, 8, 1, 3])) if sizes[1] < 100 else draw(st.integers(1, sizes[1]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()

    x = tensor(batch, dim, seqlen)
    layout = draw(st.sampled_from(["rows", "channels", "aligned rows", "slice of channels", "every second"]))
    if layout == "channels":
        x = tensor(batch, seqlen, dim).transpose(1, 2).detach().requires_grad_()
    elif layout == "aligned rows":  # of a longer buffer: rows begin at multiples of 16 bytes whatever seqlen is
        x = tensor(batch, dim, (seqlen + 15) // 8 * 8)[..., :seqlen].detach().requires_grad_()
    elif layout == "slice of channels":
        x = tensor(batch, seqlen, 2 * dim).chunk(2, dim=2)[1].transpose(1, 2).detach().requires_grad_()
    elif layout == "every second":
        x = tensor(batch, dim, 2 * seqlen)[..., ::2].detach().requires_grad_()
    seq_idx = None
    if packed:
        kind = draw(st.sampled_from([torch.int32, torch.int64] if device != "cpu" else [torch.int32]))
        seq_idx = torch.randint(-1, 4, (batch, seqlen), generator=generator).sort(dim=1)[0].to(device, kind)
    return {
        "x": x,
        "weight": tensor(dim, width, dtype=weight_dtype),
        "bias": tensor(dim, dtype=weight_dtype) if draw(st.booleans()) else None,
        "seq_idx": seq_idx,
        "initial_states": tensor(batch, dim, width - 1) if draw(st.booleans()) else None,
        "return_final_states": draw(st.booleans()),
        "activation": "silu" if silu else None,
    }


@settings(max_examples=60)
@given(data=st.data())
def test_any_call_matches_the_reference_forward_and_backward(device: str, data: st.DataObject) -> None:
    arguments = data.draw(convolutions(device))
    for _ in range(3):  # the first call prepares the next, the second's backward the third's
        assert_matches_reference(causal_conv1d_fn, arguments, backend="cuda")


@settings(max_examples=40)
@given(data=st.data())
def test_update_matches_the_reference_and_changes_the_state_alike(device: str, data: st.DataObject) -> None:
    draw = data.draw
    dtype, weight_dtype, width, silu, _ = draw(st.sampled_from(COMPILED))
    batch, dim, seqlen = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 7))
    state_len = width - 1 + draw(st.integers(0, 4))
    circular, indexed = draw(st.booleans()), draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    state = tensor(batch + 3 if indexed else batch, state_len, dim).transpose(1, 2)
    if draw(st.booleans()):
        state = state.contiguous()
    lengths = torch.randint(0, 50, (batch,), generator=generator).int().to(device) if circular else None
    indices = None
    if indexed:
        indices = torch.randperm(batch + 3, generator=generator)[:batch].int().to(device)
        indices[0] = -1
    x, weight, bias = (
        tensor(batch, dim, seqlen),
        tensor(dim, width, dtype=weight_dtype),
        tensor(dim, dtype=weight_dtype),
    )
    outputs, states = [], []
    for backend in ("cuda", "reference"):
        ours = state.clone()
        with use_backend(backend):
            outputs.append(causal_conv1d_update(x, ours, weight, bias, "silu" if silu else None, lengths, indices))
        states.append(ours)
    torch.testing.assert_close(outputs[0], outputs[1])
    assert torch.equal(states[0], states[1])


def test_varlen_states_match_the_reference(device: str) -> None:
    for dtype in (F32, F16) if device == "cpu" else (F32, F16, BF16, torch.float64):
        x = torch.randn(40, 6, dtype=torch.float64).to(device, dtype)
        cu_seqlens = torch.tensor([0, 1, 1, 9, 40], dtype=torch.int32, device=device)
        for state_len in (0, 1, 3, 12):
            with use_backend("cuda"):
                seen = causal_conv1d_varlen_states(x, cu_seqlens, state_len)
            with use_backend("reference"):
                wanted = causal_conv1d_varlen_states(x, cu_seqlens, state_len)
            assert torch.equal(seen, wanted)
            assert seen.stride(1) == 1


def test_dx_can_be_written_into_a_slice_of_a_larger_buffer(device: str) -> None:
    x, weight, dout = (
        torch.randn(2, 4, 12, device=device),
        torch.randn(4, 4, device=device),
        torch.randn(2, 4, 12, device=device),
    )
    buffer = torch.full((2, 8, 12), float("nan"), device=device)
    backend = torch.no_grad()(lambda name, dx_out: _backend(name).causal_conv1d_backward(
        x, weight, None, dout, None, None, None, True, dx_out=dx_out
    ))  # fmt: skip
    dx, *_ = backend("cuda", buffer[:, 4:])
    wanted, *_ = backend("reference", None)
    assert dx.data_ptr() == buffer[:, 4:].data_ptr()
    torch.testing.assert_close(buffer[:, 4:], wanted)
    assert buffer[:, :4].isnan().all()


def test_refusals_name_the_reason(device: str) -> None:
    def reason(**change: Any) -> str:
        call = ops.CausalConv1dCall(torch.device(device), F32, F32, 4)._replace(**change)
        return next(str(c.refusal) for c in choices(ops.CAUSAL_CONV1D, call) if c.backend == "cuda")

    assert reason() == "None"
    assert reason(width=5) == "weight has width 5; the kernels take 2, 3 and 4"
    assert reason(dtype=torch.float64) == "x is torch.float64; the kernels take fp32, fp16 and bf16"
    assert "not on a CUDA device" in reason(device=torch.device("meta"))


def _backend(name: str) -> Any:
    import importlib

    return importlib.import_module(f"anymamba.backends.{name}.causal_conv1d")
