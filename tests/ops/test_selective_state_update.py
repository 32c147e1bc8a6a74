"""selective_state_update against the float64 reference, and stepping against the whole scan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anymamba.backends import use_backend
from anymamba.errors import DeviceError, DtypeError, ShapeError
from anymamba.ops import selective_scan_fn, selective_state_update, selective_state_update_ref
from checks import opcheck
from oracle import OUTPUT_BOUND, upcast

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def draw_step(
    seed: int,
    batch: int = 2,
    heads: int | None = None,
    groups: int = 1,
    dim: int = 4,
    dstate: int = 3,
    *,
    dtype: torch.dtype = torch.float64,
    state_dtype: torch.dtype = torch.float64,
    tied: bool = False,
    options: bool = True,
) -> dict[str, Any]:
    """Return arguments of selective_state_update; without `heads` as Mamba-1 passes them."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    lead = () if heads is None else (heads,)
    dt, bias, A = tensor(batch, *lead, dim), tensor(*lead, dim), -tensor(*lead, dim, dstate).abs()
    if tied:
        dt, bias = dt[..., :1].expand(dt.shape), bias[..., :1].expand(bias.shape)
        A = A[..., :1, :1].expand(A.shape)
    group = () if heads is None else (groups,)
    return {
        "state": tensor(batch, *lead, dim, dstate, dtype=state_dtype),
        "x": tensor(batch, *lead, dim),
        "dt": dt,
        "A": A,
        "B": tensor(batch, *group, dstate),
        "C": tensor(batch, *group, dstate),
        "D": tensor(*lead, dim) if options else None,
        "z": tensor(batch, *lead, dim) if options else None,
        "dt_bias": bias if options else None,
        "dt_softplus": options,
    }


@given(
    st.integers(0, 2**31), st.integers(0, 3), st.sampled_from([None, 1, 2, 4]), st.integers(1, 5), st.integers(1, 6),
    st.booleans(), st.booleans(), st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.booleans(), st.booleans(),
)  # fmt: skip
def test_any_call_matches_the_reference_and_changes_the_state_alike(
    seed: int,
    batch: int,
    heads: int | None,
    dim: int,
    dstate: int,
    tied: bool,
    options: bool,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    indexed: bool,
    strided: bool,
) -> None:
    arguments = draw_step(
        seed, batch, heads, 2 if heads in (2, 4) else 1, dim, dstate,
        dtype=dtype, state_dtype=state_dtype, tied=tied, options=options,
    )  # fmt: skip
    if indexed:
        generator = torch.Generator().manual_seed(seed)
        shape = (batch + 2, *arguments["state"].shape[1:])
        entries = torch.randn(shape, generator=generator, dtype=torch.float64).to(state_dtype)
        indices = torch.randperm(batch + 2, generator=generator)[:batch].int()
        indices[1:2] = -1
        arguments |= {"state": entries, "state_batch_indices": indices}
    if strided:
        arguments["state"] = arguments["state"].transpose(0, 1).contiguous().transpose(0, 1)
        arguments["x"] = torch.stack([arguments["x"]] * 2, dim=-1)[..., 0]
    wide = {name: upcast(value) for name, value in arguments.items()}
    wide["state"] = wide["state"].clone()
    before = arguments["state"].clone()
    with use_backend("torch"):
        out = selective_state_update(**arguments)
    with use_backend("reference"):
        wanted = selective_state_update(**wide)
    assert out.dtype == dtype
    # A few numbers may all be near zero by cancellation: then what counts is the size of what was added.
    for seen, truth, rounded in ((out, wanted, dtype), (arguments["state"], wide["state"], state_dtype)):
        scale = max(truth.norm().item(), truth.numel() ** 0.5)
        assert (seen.double() - truth).norm().item() <= 2 * max(OUTPUT_BOUND[dtype], OUTPUT_BOUND[rounded]) * scale
    if indexed:
        untouched = [entry for entry in range(batch + 2) if entry not in indices.tolist()]
        assert torch.equal(arguments["state"][untouched], before[untouched])
        assert out[indices < 0].eq(0).all()


def test_stepping_equals_the_scan() -> None:
    torch.manual_seed(0)
    batch, dim, seqlen, dstate = 2, 5, 9, 3
    u, delta, z = (torch.randn(batch, dim, seqlen, dtype=torch.float64) for _ in range(3))
    B, C = (torch.randn(batch, dstate, seqlen, dtype=torch.float64) for _ in range(2))
    A = -torch.rand(dim, dstate, dtype=torch.float64)
    D, bias = torch.randn(dim, dtype=torch.float64), torch.randn(dim, dtype=torch.float64)
    whole, last = selective_scan_fn(u, delta, A, B, C, D, z, bias, True, True)
    state = torch.zeros(batch, dim, dstate, dtype=torch.float64)
    steps = [
        selective_state_update(state, u[..., t], delta[..., t], A, B[..., t], C[..., t], D, z[..., t], bias, True)
        for t in range(seqlen)
    ]
    torch.testing.assert_close(torch.stack(steps, dim=-1), whole)
    torch.testing.assert_close(state, last)


def test_a_padding_row_does_not_disturb_the_row_that_owns_entry_zero() -> None:
    arguments = draw_step(1, batch=3)
    state = arguments["state"].clone()
    indices = torch.tensor([-1, 0, -1])
    out = selective_state_update(**(arguments | {"state_batch_indices": indices}))
    alone = {name: value[1:2] if name in ("x", "dt", "B", "C", "z") else value for name, value in arguments.items()} | {
        "state": state[:1]
    }
    torch.testing.assert_close(out[1:2], selective_state_update(**alone))
    torch.testing.assert_close(arguments["state"], torch.cat([state[:1], state[1:]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strong_decay_gives_no_nan(dtype: torch.dtype) -> None:
    arguments = draw_step(2, dtype=dtype, state_dtype=torch.float32)
    arguments["A"] = arguments["A"] * 1e4
    assert selective_state_update(**arguments).isfinite().all()
    assert arguments["state"].isfinite().all()


def test_ref_is_the_reference_whatever_backend_is_chosen() -> None:
    arguments = draw_step(3, heads=4, groups=2)
    state = arguments["state"].clone()
    seen = selective_state_update_ref(**arguments)
    with use_backend("reference"):
        wanted = selective_state_update(**(arguments | {"state": state}))
    assert torch.equal(seen, wanted)
    assert torch.equal(state, arguments["state"])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"state": torch.zeros(2, 4)}, ShapeError, "state has shape (2, 4)"),
        ({"x": torch.zeros(3, 4)}, ShapeError, "x has shape (3, 1, 4)"),
        ({"dt": torch.zeros(2, 5)}, ShapeError, "dt has shape (2, 1, 5)"),
        ({"A": torch.zeros(4, 2)}, ShapeError, "A has shape (1, 4, 2)"),
        ({"B": torch.zeros(2, 4)}, ShapeError, "B has shape (2, 1, 4)"),
        ({"C": torch.zeros(2, 2, 3)}, ShapeError, "C has shape (2, 2, 3)"),
        ({"D": torch.zeros(5)}, ShapeError, "D has shape (1, 5)"),
        ({"z": torch.zeros(2, 4).int()}, DtypeError, "z has dtype torch.int32"),
        ({"dt_bias": torch.zeros(4, device="meta")}, DeviceError, "dt_bias is on meta"),
        ({"state_batch_indices": torch.zeros(2)}, DtypeError, "state_batch_indices has dtype torch.float32"),
        ({"B": torch.zeros(2, 2, 3), "C": torch.zeros(2, 2, 3)}, ShapeError, "B has 2 groups, but nheads = 1"),
    ],
)
def test_wrong_arguments_are_named_before_any_work(change: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = draw_step(4, dtype=torch.float32, state_dtype=torch.float32) | change
    with pytest.raises(error) as caught:
        selective_state_update(**arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize("full", [True, False])
def test_the_operator_passes_opcheck(full: bool) -> None:
    arguments = draw_step(5, heads=2, groups=2, options=full, dtype=torch.float32, state_dtype=torch.float32)
    indices = torch.tensor([1, 0]) if full else None
    opcheck(torch.ops.anymamba.selective_state_update, (*arguments.values(), indices))


def test_torch_compile_gives_what_eager_gives() -> None:
    arguments = draw_step(6, dtype=torch.float32, state_dtype=torch.float32)
    compiled_arguments = arguments | {"state": arguments["state"].clone()}
    eager = selective_state_update(**arguments)
    step = torch.compile(lambda a: selective_state_update(**a), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(compiled_arguments), eager)
    torch.testing.assert_close(compiled_arguments["state"], arguments["state"])
