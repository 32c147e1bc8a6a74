"""The CPU kernel of one decoding step against the float64 reference, state included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba", reason="numba (the extra anymamba[cpu]) is not installed")

from anymamba.backends import use_backend
from anymamba.ops import selective_state_update
from oracle import relative_error, upcast


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a call with heads: tied or free parameters, groups, cache entries, layouts of the state."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    work = torch.promote_types(dtype, torch.float32)
    batch, groups = draw(st.integers(0, 3)), draw(st.integers(1, 2))
    heads, headdim, dstate = (
        groups * draw(st.integers(1, 3)),
        draw(st.integers(1, 5)),
        draw(st.sampled_from([1, 7, 16])),
    )

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    entries = batch + 2 if draw(st.booleans()) else None
    state = tensor(entries or batch, heads, headdim, dstate, dtype=work)
    if draw(st.booleans()):
        state = state.transpose(2, 3).contiguous().transpose(2, 3)
    A = -torch.rand(heads, headdim, dstate, generator=generator).to(work)
    if draw(st.booleans()):
        A = A[:, :1, :1].expand(heads, headdim, dstate)
    indices = None
    if entries is not None:
        indices = torch.randperm(entries, generator=generator)[:batch].int()
        indices[:1] = -1
    return {
        "state": state,
        "x": tensor(batch, heads, headdim),
        "dt": tensor(batch, heads, 1).expand(batch, heads, headdim),
        "A": A,
        "B": tensor(batch, groups, 2 * dstate)[..., :: draw(st.sampled_from([1, 2]))][..., :dstate],
        "C": tensor(batch, groups, dstate),
        "D": tensor(heads, 1, dtype=work).expand(heads, headdim) if draw(st.booleans()) else None,
        "z": tensor(batch, heads, headdim) if draw(st.booleans()) else None,
        "dt_bias": tensor(heads, headdim, dtype=work) if draw(st.booleans()) else None,
        "dt_softplus": True,
        "state_batch_indices": indices,
    }


@given(steps())
def test_output_and_state_match_the_reference(arguments: dict[str, Any]) -> None:
    ours = {**arguments, "state": arguments["state"].clone(memory_format=torch.preserve_format)}
    exact = {name: upcast(value) for name, value in arguments.items()}
    exact["state"] = exact["state"].clone()
    with use_backend("cpu"):
        out = selective_state_update(**ours)
    with use_backend("reference"):
        wanted = selective_state_update(**exact)
    assert relative_error(out, wanted) <= (5e-3 if out.dtype == torch.bfloat16 else 2e-6)
    assert relative_error(ours["state"], exact["state"]) <= 2e-6
    if arguments["state_batch_indices"] is not None and out.shape[0]:
        assert out[0].eq(0).all()


@pytest.mark.parametrize("threads", [1, 4])
def test_a_large_step_is_the_same_on_any_number_of_threads(threads: int) -> None:
    torch.manual_seed(0)
    state, x, dt = torch.randn(4, 2048, 64), torch.randn(4, 2048), torch.rand(4, 2048)
    A, B, C = -torch.rand(2048, 64), torch.randn(4, 64), torch.randn(4, 64)
    copy = state.clone()
    before = torch.get_num_threads()
    try:
        with use_backend("cpu"):
            torch.set_num_threads(1)
            wanted = selective_state_update(copy, x, dt, A, B, C)
            torch.set_num_threads(threads)
            out = selective_state_update(state, x, dt, A, B, C)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, wanted)
    assert torch.equal(state, copy)
