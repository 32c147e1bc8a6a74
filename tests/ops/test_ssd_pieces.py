"""The steps of the chunked scan: put together they are the scan, alone they are what upstream's callers expect."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from anymamba.ops import mamba_chunk_scan_combined, ssd_pieces
from oracle import outputs_and_gradients

INFINITY = float("inf")


def make(
    batch: int = 2,
    seqlen: int = 21,
    heads: int = 4,
    headdim: int = 3,
    groups: int = 2,
    dstate: int = 5,
    dtype: torch.dtype = torch.float64,
) -> dict[str, torch.Tensor]:
    """Return x, dt, A, B, C, D, z, dt_bias; dt is positive after softplus only."""
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    wide = torch.promote_types(dtype, torch.float32)
    return {
        "x": tensor(batch, seqlen, heads, headdim),
        "dt": tensor(batch, seqlen, heads),
        "A": (-0.1 - tensor(heads, dtype=wide).detach().abs()).requires_grad_(),
        "B": tensor(batch, seqlen, groups, dstate),
        "C": tensor(batch, seqlen, groups, dstate),
        "D": tensor(heads, headdim, dtype=wide),
        "z": tensor(batch, seqlen, heads, headdim),
        "dt_bias": tensor(heads, dtype=wide),
    }


def together(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    **rest: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and final states, made of the public steps."""
    sums, step = ssd_pieces._chunk_cumsum_fwd(dt, A, chunk_size, rest["dt_bias"], dt_softplus=True)
    alone = ssd_pieces.chunk_state(B, x, step, sums)
    states, final = ssd_pieces.state_passing(alone.flatten(-2), sums[..., -1])
    padding = (0, 0, 0, 0, 0, -x.shape[1] % chunk_size)  # upstream's chunk_scan takes whole chunks
    out = ssd_pieces.chunk_scan(
        *(F.pad(tensor, padding) for tensor in (B, C, x)),
        step,
        sums,
        states.view(alone.shape),
        rest["D"],
        F.pad(rest["z"], padding),
    )
    return out[:, : x.shape[1]], final.view(x.shape[0], *alone.shape[2:])


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 21, 64])
def test_the_steps_together_are_the_scan_with_its_gradients(chunk_size: int) -> None:
    arguments = make() | {"chunk_size": chunk_size}
    wanted = outputs_and_gradients(
        lambda **kw: mamba_chunk_scan_combined(**kw, dt_softplus=True, return_final_states=True), arguments, 0
    )
    torch.testing.assert_close(outputs_and_gradients(together, arguments, 0), wanted)


@pytest.mark.parametrize("chunk_size", [7, 8])
def test_the_refs_are_the_steps(chunk_size: int) -> None:
    arguments = make() | {"chunk_size": chunk_size, "dt_softplus": True}
    from anymamba.ops import mamba_chunk_scan

    wanted = outputs_and_gradients(mamba_chunk_scan, arguments, 0)
    torch.testing.assert_close(outputs_and_gradients(ssd_pieces.ssd_chunk_scan_combined_ref, arguments, 0), wanted)


def test_a_reference_does_not_become_nan_where_the_decay_is_strong() -> None:
    arguments = make(dtype=torch.float32)
    arguments["A"] = torch.full((4,), -1e3, requires_grad=True)
    found = outputs_and_gradients(
        ssd_pieces.ssd_chunk_scan_combined_ref, arguments | {"chunk_size": 8, "dt_softplus": True}, 0
    )
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("packed", [True, False])
def test_combined_forward_and_backward_return_what_upstreams_do(packed: bool) -> None:
    given = {name: tensor.detach() for name, tensor in make(batch=1).items()}
    seq_idx = torch.tensor([[0] * 3 + [1] * 10 + [4] * 8]) if packed else None
    options = {
        "initial_states": torch.randn(1, 4, 3, 5, dtype=torch.float64),
        "seq_idx": seq_idx,
        "dt_softplus": True,
        "dt_limit": (0.1, 1.0),
    }
    cu_seqlens = torch.tensor([0, 3, 13, 21]) if packed else None
    out, ungated, step, sums, states, final, *varlen = ssd_pieces._mamba_chunk_scan_combined_fwd(
        **given, chunk_size=8, cu_seqlens=cu_seqlens, **options
    )
    assert step.shape == sums.shape == (1, 4, 3, 8)
    assert states.shape == (1, 3, 4, 3, 5)
    leaves = {name: tensor.requires_grad_() for name, tensor in given.items()}
    options["initial_states"].requires_grad_()
    wanted, *wanted_states = mamba_chunk_scan_combined(
        **leaves,
        chunk_size=64,
        **options,
        cu_seqlens=cu_seqlens,
        return_final_states=True,
        return_varlen_states=packed,
    )
    torch.testing.assert_close(out, wanted.detach())
    torch.testing.assert_close([final, *varlen], [state.detach() for state in wanted_states])
    torch.testing.assert_close(ungated * F.silu(given["z"]), wanted)

    dout, dfinal = torch.randn_like(out), torch.randn_like(final)
    order = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")
    gradients = torch.autograd.grad(
        [wanted, wanted_states[0]], [*(leaves[name] for name in order), options["initial_states"]], [dout, dfinal]
    )
    dx = torch.empty(1, 21, 8, 3, dtype=torch.float64)[:, :, ::2]
    *found, again = ssd_pieces._mamba_chunk_scan_combined_bwd(
        dout, out=ungated, chunk_size=8, **leaves, **options, dfinal_states=dfinal, dx=dx, recompute_output=True
    )
    assert found[0] is dx
    torch.testing.assert_close(tuple(found), gradients)
    torch.testing.assert_close(again, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_are_upstreams(dtype: torch.dtype) -> None:
    given = make(dtype=dtype)
    sums, step = ssd_pieces._chunk_cumsum_fwd(given["dt"], given["A"], 8, given["dt_bias"], dt_softplus=True)
    assert sums.dtype == step.dtype == torch.float32
    alone = ssd_pieces.chunk_state(given["B"], given["x"], step, sums)
    assert alone.dtype == torch.float32
    assert ssd_pieces.chunk_state(given["B"], given["x"], step, sums, states_in_fp32=False).dtype == dtype
    assert ssd_pieces.chunk_state_ref(given["B"], given["x"], step, sums).dtype == dtype
    states, final = ssd_pieces._state_passing_fwd(alone.flatten(-2), sums[..., -1], out_dtype=dtype)
    assert (states.dtype, final.dtype) == (dtype, torch.float32)
    assert ssd_pieces._bmm_chunk_fwd(given["C"], given["B"], 8).dtype == dtype
    out, _ = ssd_pieces._chunk_scan_fwd(
        ssd_pieces._bmm_chunk_fwd(given["C"], given["B"], 8, output_dtype=torch.float32),
        given["x"],
        step,
        sums,
        given["C"],
        states.view(alone.shape),
        given["D"],
    )
    assert out.dtype == dtype


def test_states_of_packed_sequences_are_those_of_separate_ones() -> None:
    given = {name: tensor.detach() for name, tensor in make(batch=1, seqlen=40).items()}
    lengths, chunk_size = [3, 20, 0, 1, 16], 8
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    seq_idx = torch.cat([torch.full((1, n), i) for i, n in enumerate(lengths)], dim=1)
    sums, step = ssd_pieces._chunk_cumsum_fwd(given["dt"], given["A"], chunk_size, dt_softplus=True)
    alone = ssd_pieces._chunk_state_fwd(given["B"], given["x"], step, sums, seq_idx=seq_idx)
    states, _ = ssd_pieces._state_passing_fwd(alone.flatten(-2), sums[..., -1], seq_idx=seq_idx, chunk_size=chunk_size)
    found = ssd_pieces.chunk_state_varlen(
        given["B"][0], given["x"][0], step[0], sums[0], bounds, states[0].view(alone.shape[1:])
    )
    for i, (start, end) in enumerate(zip(bounds[:-1], bounds[1:])):
        x, dt, B, C = (given[name][:, start:end] for name in ("x", "dt", "B", "C"))
        _, final = mamba_chunk_scan_combined(x, dt, given["A"], B, C, 8, dt_softplus=True, return_final_states=True)
        torch.testing.assert_close(found[i], final[0])


@pytest.mark.parametrize("groups", [True, False])
def test_products_within_chunks_and_their_gradients(groups: bool) -> None:
    shape = (2, 10, 3, 5) if groups else (2, 10, 5)
    a, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    seq_idx = torch.tensor([[0] * 5 + [1] * 5, [2] * 10])
    found = ssd_pieces._bmm_chunk_fwd(a, b, 4, seq_idx=seq_idx)
    assert found.shape == ((2, 3, 3, 4, 4) if groups else (2, 3, 4, 4))
    last = found[0, 1, 0] if groups else found[0, 1]  # tokens 4..7, of which 4 belongs to the first sequence
    assert last[0, 1:].eq(0).all()
    assert last[1:, 0].eq(0).all()
    picked = (a[0, 5, 0] @ b[0, 6, 0]) if groups else a[0, 5] @ b[0, 6]
    torch.testing.assert_close(last[1, 2], picked)

    plain = ssd_pieces._bmm_chunk_fwd(a, b, 4)
    dout, residual = torch.randn_like(plain), torch.randn_like(a)
    da, db = torch.autograd.grad(plain, (a, b), dout)
    with torch.no_grad():
        torch.testing.assert_close(ssd_pieces._bmm_chunk_bwd(a, dout), db)
        torch.testing.assert_close(ssd_pieces._bmm_chunk_bwd(b, dout.transpose(-1, -2), residual), da + residual)


def test_backward_of_state_passing_is_the_gradient_of_its_forward() -> None:
    states, initial = torch.randn(2, 3, 4, 6, dtype=torch.float64), torch.randn(2, 4, 6, dtype=torch.float64)
    decay = -torch.rand(2, 4, 3, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (states, decay, initial)]
    seq_idx = torch.tensor([[0] * 11, [0] * 4 + [1] * 7])
    out, final = ssd_pieces._state_passing_fwd(*leaves, seq_idx=seq_idx, chunk_size=4)
    dout, dfinal = torch.randn_like(out), torch.randn_like(final)
    wanted = torch.autograd.grad([out, final], leaves, [dout, dfinal])
    found = ssd_pieces._state_passing_bwd(
        out.detach(), decay.detach(), dout, dfinal, seq_idx, has_initial_states=True, chunk_size=4
    )
    torch.testing.assert_close(found, wanted)


def test_backward_of_chunk_cumsum_is_the_gradient_of_its_forward() -> None:
    given = make()
    leaves = [given[name] for name in ("dt", "A", "dt_bias")]
    sums, step = ssd_pieces._chunk_cumsum_fwd(leaves[0], leaves[1], 8, leaves[2], True, (0.1, 0.9))
    dsums, dstep = torch.randn_like(sums), torch.randn_like(step)
    wanted = torch.autograd.grad([sums, step], leaves, [dsums, dstep])
    ddA = dsums.flip(-1).cumsum(-1).flip(-1)
    found = ssd_pieces._chunk_cumsum_bwd(ddA, dstep, *leaves, dt_softplus=True, dt_limit=(0.1, 0.9))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dt_limit", [(0.0, INFINITY), (0.1, 0.9)])
def test_selective_scan_computes_the_same_and_takes_steps_per_channel(dt_limit: tuple[float, float]) -> None:
    given = make()
    wanted = mamba_chunk_scan_combined(**given, chunk_size=8, dt_softplus=True, dt_limit=dt_limit)
    torch.testing.assert_close(ssd_pieces.ssd_selective_scan(**given, dt_softplus=True, dt_limit=dt_limit), wanted)
    wide = {
        "dt": given["dt"].unsqueeze(-1).expand(-1, -1, -1, 3),
        "A": given["A"].repeat_interleave(3)[:, None].expand(-1, 5),
        "dt_bias": given["dt_bias"][:, None].expand(-1, 3),
    }
    torch.testing.assert_close(
        ssd_pieces.ssd_selective_scan(**(given | wide), dt_softplus=True, dt_limit=dt_limit), wanted
    )


def test_selective_scan_bwd_returns_the_gradients_of_step_and_decay() -> None:
    given = make(seqlen=16)
    step = F.softplus(given["dt"].detach()).unflatten(1, (2, 8)).permute(0, 3, 1, 2).requires_grad_()
    out = mamba_chunk_scan_combined(
        given["x"],
        step.permute(0, 2, 3, 1).flatten(1, 2),
        given["A"],
        given["B"],
        given["C"],
        8,
        given["D"],
        given["z"],
    )
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(out, (step, given["A"]), dout)
    found = ssd_pieces.selective_scan_bwd(dout, given["x"], step, *(given[name] for name in ("A", "B", "C", "D", "z")))
    torch.testing.assert_close(found, wanted)


def test_convolution_and_scan_in_one_are_the_two_in_turn() -> None:
    given = make()
    xBC = torch.randn(2, 21, 12 + 2 * 10, dtype=torch.float64)
    weight, bias = torch.randn(32, 4, dtype=torch.float64), torch.randn(32, dtype=torch.float64)
    found = ssd_pieces.mamba_conv1d_scan_ref(
        xBC,
        weight,
        bias,
        given["dt"],
        given["A"],
        8,
        given["D"],
        given["z"].flatten(2),
        given["dt_bias"],
        True,
        ngroups=2,
    )
    padded = F.pad(xBC.transpose(1, 2), (3, 0))
    conv = F.silu(F.conv1d(padded, weight[:, None], bias, groups=32)).transpose(1, 2)
    x, B, C = conv.split([12, 10, 10], dim=-1)
    wanted = mamba_chunk_scan_combined(
        x.unflatten(-1, (4, 3)), given["dt"], given["A"], B.unflatten(-1, (2, 5)), C.unflatten(-1, (2, 5)), 8,
        given["D"], given["z"], given["dt_bias"], dt_softplus=True,
    )  # fmt: skip
    torch.testing.assert_close(found, wanted.flatten(2))
