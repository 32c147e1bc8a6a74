"""The decoding step's kernel against the float64 reference: emulated on the CPU, and on the card with --gpu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anymamba.backends import use_backend
from anymamba.ops import selective_state_update
from cuda_emulator import emulated, needs_emulator
from oracle import OUTPUT_BOUND, relative_error, upcast

pytestmark = needs_emulator
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# (x, state, parameters, dstate, heads tied): every branch of the source; g++ takes a second for each kernel.
COMPILED = [
    (BF16, BF16, F32, 16, False),
    (F32, F32, F32, 16, False),
    (F16, F32, F32, 128, True),
    (F32, F32, F32, 200, False),
    (BF16, F32, BF16, 5, False),
    (F32, F32, F32, 96, False),  # aligned, and not as many vectors as lanes
]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda":
        yield "cuda"
    else:
        with emulated():
            yield "cpu"


@st.composite
def steps(draw: st.DrawFn, device: str) -> dict[str, Any]:
    """Draw arguments of selective_state_update."""
    if device == "cpu":
        dtype, state_dtype, parameters, dstate, tied = draw(st.sampled_from(COMPILED))
        softplus = True
    else:
        dtype, state_dtype, parameters = (draw(st.sampled_from([F32, F16, BF16])) for _ in range(3))
        dstate, tied = draw(st.sampled_from([1, 5, 16, 64, 96, 128, 200, 256])), draw(st.booleans())
        softplus = draw(st.booleans())
    batch, groups = draw(st.integers(1, 3 if device == "cpu" else 70)), draw(st.integers(1, 2))
    heads = groups * draw(st.integers(1, 2)) if tied or draw(st.booleans()) else 0
    dim = draw(st.integers(1, 9 if device == "cpu" else 300))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    of_head = (heads,) if heads else ()
    indices, entries = None, batch
    if draw(st.booleans()):
        entries = batch + 2
        indices = torch.randperm(entries, generator=generator)[:batch].to(device, torch.int32)
        indices[0] = -1
    decay = -tensor(*of_head, 1, 1, dtype=parameters).exp().expand(*of_head, dim, dstate) if tied else None
    state = tensor(entries, *of_head, dim, dstate, dtype=state_dtype)
    if draw(st.booleans()):
        state = tensor(entries, *of_head, dstate, dim, dtype=state_dtype).transpose(-1, -2)
    # For few kernels to compile, all options come together where they are emulated.
    given_option = draw(st.booleans())
    option = st.booleans() if device != "cpu" else st.just(given_option)
    dt = tensor(batch, *of_head, 1).expand(batch, *of_head, dim) if tied else tensor(batch, *of_head, dim)
    return {
        "state": state,
        "x": tensor(batch, *of_head, dim),
        "dt": dt if softplus else dt.abs(),  # a negative step would grow the state beyond fp16
        "A": -tensor(*of_head, dim, dstate, dtype=parameters).exp() if decay is None else decay,
        "B": tensor(batch, groups, dstate) if heads else tensor(batch, dstate),
        "C": tensor(batch, groups, dstate) if heads else tensor(batch, dstate),
        "D": tensor(*of_head, dim, dtype=parameters) if draw(option) else None,
        "z": tensor(batch, *of_head, dim) if draw(option) else None,
        "dt_bias": tensor(*of_head, dim, dtype=parameters) if draw(option) and softplus else None,
        "dt_softplus": softplus,
        "state_batch_indices": indices,
    }


@settings(max_examples=60)
@given(data=st.data())
def test_any_step_matches_the_reference_in_output_and_state(device: str, data: st.DataObject) -> None:
    arguments = data.draw(steps(device))
    exact = {name: upcast(value) for name, value in arguments.items()}
    exact["state"] = exact["state"].clone()
    with use_backend("cuda"):
        out = selective_state_update(**arguments)
    with use_backend("reference"):
        wanted = selective_state_update(**exact)
    assert relative_error(out, wanted) <= OUTPUT_BOUND[out.dtype]
    assert relative_error(arguments["state"], exact["state"]) <= OUTPUT_BOUND[arguments["state"].dtype]
