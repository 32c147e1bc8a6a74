"""Each operator over a sharded sequence equals the whole: values, states, every gradient, wherever it is cut."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from anymamba.backends import use_backend
from distributed_jobs import TIME, call, run_operator
from rank_pool import Pool

few = settings(max_examples=8, deadline=None)


def drawn(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, generator=generator)

    return draw


def packed(lengths: list[int], total: int, batch: int) -> torch.Tensor:
    """Return the numbers of packed sequences of these lengths, cut or filled to the total."""
    index = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)])
    filled = torch.cat([index, index.new_full((max(0, total - len(index)),), len(lengths))])[:total]
    return filled.expand(batch, total).contiguous()


def compare(
    pool: Pool,
    name: str,
    tensors: dict[str, torch.Tensor],
    options: dict[str, Any],
    lengths: list[int],
    weights: list[torch.Tensor | None],
    tolerance: float = 1e-9,
) -> None:
    """Run on the ranks and whole; compare everything."""
    with use_backend("torch"):
        whole, whole_gradients = call(name, tensors, options, weights)
    ranks = pool.run(run_operator, len(lengths), name, tensors, options, weights, lengths)
    time = 1 if name == "mamba_chunk_scan_combined" else 2

    def close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * scale, msg=lambda text: f"{what}: {text}")

    close(torch.cat([results[0] for results, _, _ in ranks], dim=time), whole[0], "out")
    if len(whole) > 1:
        close(ranks[-1][0][1], whole[1], "last state")
    if len(whole) > 2:
        close(sum(results[2] for results, _, _ in ranks), whole[2], "varlen states")
    for key, wanted in whole_gradients.items():
        parts = [gradients[key] for _, gradients, _ in ranks]
        timed = key in TIME[name] and not (name == "selective_scan_fn" and tensors[key].dim() == 2)
        found = torch.cat(parts, dim=TIME[name][key]) if timed else sum(parts)
        close(found, wanted, f"gradient of {key}")


@st.composite
def cuts(draw: st.DrawFn, least: int) -> list[int]:
    size = draw(st.integers(1, 4))
    return [draw(st.integers(least, least + 9)) for _ in range(size)]


@few
@given(
    lengths=cuts(least=3), width=st.sampled_from([1, 2, 4]), packs=st.none() | st.lists(st.integers(1, 9), max_size=6),
    bias=st.booleans(), silu=st.booleans(), states=st.booleans(), initial=st.booleans(), batch=st.integers(1, 2),
    channel_last=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_convolution(
    pool: Pool, lengths: list[int], width: int, packs: list[int] | None, bias: bool, silu: bool, states: bool,
    initial: bool, batch: int, channel_last: bool, seed: int,
) -> None:  # fmt: skip
    draw, total, dim = drawn(seed), sum(lengths), 3
    x = draw(batch, total, dim).transpose(1, 2) if channel_last else draw(batch, dim, total)
    tensors = {"x": x, "weight": draw(dim, width)}
    if bias:
        tensors["bias"] = draw(dim)
    if packs is not None:
        tensors["seq_idx"] = packed([*packs, 3], total, batch)
    if initial:
        tensors["initial_states"] = draw(batch, dim, width - 1)
    options = {"activation": "silu" if silu else None, "return_final_states": states}
    weights = [draw(batch, dim, total), *([draw(batch, dim, width - 1)] if states else [])]
    compare(pool, "causal_conv1d_fn", tensors, options, lengths, weights)


@few
@given(
    lengths=cuts(least=1), variable=st.booleans(), gate=st.booleans(), skip=st.booleans(), softplus=st.booleans(),
    states=st.booleans(), initial=st.booleans(), batch=st.integers(1, 2), imaginary=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_selective_scan(
    pool: Pool, lengths: list[int], variable: bool, gate: bool, skip: bool, softplus: bool, states: bool,
    initial: bool, batch: int, imaginary: bool, seed: int,
) -> None:  # fmt: skip
    draw, total, dim, dstate = drawn(seed), sum(lengths), 4, 3
    A = -draw(dim, dstate).exp()
    state = torch.complex128 if imaginary else torch.float64
    if imaginary:
        A = torch.complex(A, draw(dim, dstate))
    columns = 2 * total if imaginary else total
    tensors = {
        "u": draw(batch, dim, total), "delta": draw(batch, dim, total) if softplus else draw(batch, dim, total).exp() * 0.2,
        "A": A, "B": draw(batch, 2, dstate, columns) if variable else draw(dim, dstate, dtype=state),
        "C": draw(batch, 2, dstate, columns),
    }  # fmt: skip
    if gate:
        tensors["z"] = draw(batch, dim, total)
    if skip:
        tensors |= {"D": draw(dim), "delta_bias": draw(dim) * 0.1}
    if initial:
        tensors["initial_state"] = draw(batch, dim, dstate, dtype=state)
    options = {"delta_softplus": softplus, "return_last_state": states}
    weights = [draw(batch, dim, total), *([draw(batch, dim, dstate, dtype=state)] if states else [])]
    compare(pool, "selective_scan_fn", tensors, options, lengths, weights)


@few
@given(
    lengths=cuts(least=1), packs=st.none() | st.lists(st.integers(1, 9), max_size=6), gate=st.booleans(),
    skip=st.booleans(), states=st.booleans(), initial=st.booleans(), varlen=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_state_space_dual_scan(
    pool: Pool, lengths: list[int], packs: list[int] | None, gate: bool, skip: bool, states: bool, initial: bool,
    varlen: bool, seed: int,
) -> None:  # fmt: skip
    draw, total, heads, headdim, groups, dstate = drawn(seed), sum(lengths), 4, 3, 2, 5
    batch = 1 if varlen else 2
    tensors = {
        "x": draw(batch, total, heads, headdim), "dt": draw(batch, total, heads), "A": -draw(heads).exp(),
        "B": draw(batch, total, groups, dstate), "C": draw(batch, total, groups, dstate),
    }  # fmt: skip
    if gate:
        tensors["z"] = draw(batch, total, heads, headdim)
    if skip:
        tensors |= {"D": draw(heads), "dt_bias": draw(heads)}
    if initial:
        tensors["initial_states"] = draw(batch, heads, headdim, dstate)
    options: dict[str, Any] = {
        "chunk_size": 8, "dt_softplus": True, "dt_limit": (0.01, 2.0), "return_final_states": states,
    }  # fmt: skip
    if packs is not None:
        tensors["seq_idx"] = packed([*packs, 3], total, batch)
    weights = [draw(batch, total, heads, headdim)]
    if states:
        weights.append(draw(batch, heads, headdim, dstate))
    if varlen:
        if packs is None:
            tensors["seq_idx"] = packed([total], total, 1)
        index = tensors["seq_idx"][0]
        counts = torch.unique_consecutive(index, return_counts=True)[1]
        # an empty sequence in the middle
        bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)[:1], counts.cumsum(0)])
        options["return_varlen_states"] = True
        tensors["cu_seqlens"] = bounds.to(torch.int32)
        if not states:
            options["return_final_states"] = True
            weights.append(draw(batch, heads, headdim, dstate))
        weights.append(draw(len(bounds) - 1, heads, headdim, dstate))
    compare(pool, "mamba_chunk_scan_combined", tensors, options, lengths, weights)


@pytest.mark.parametrize("cut", [[3, 3], [1, 5], [5, 1], [2, 2, 2], [1, 1, 1, 3]])
@pytest.mark.parametrize("boundary", range(1, 6))
def test_a_boundary_of_packed_sequences_may_fall_anywhere(pool: Pool, boundary: int, cut: list[int]) -> None:
    draw = drawn(boundary)
    tensors = {
        "x": draw(1, 6, 2, 2), "dt": draw(1, 6, 2), "A": -draw(2).exp(), "B": draw(1, 6, 1, 2), "C": draw(1, 6, 1, 2),
        "seq_idx": packed([boundary, 6 - boundary], 6, 1),
    }  # fmt: skip
    options = {"chunk_size": 8, "dt_softplus": True}
    compare(pool, "mamba_chunk_scan_combined", tensors, options, cut, [draw(1, 6, 2, 2)])


@pytest.mark.parametrize("name", ["selective_scan_fn", "mamba_chunk_scan_combined"])
def test_strong_decay_underflows_and_nothing_overflows(pool: Pool, name: str) -> None:
    draw, total = drawn(0), 24
    if name == "selective_scan_fn":
        tensors = {
            "u": draw(1, 2, total), "delta": draw(1, 2, total).exp() * 50, "A": -draw(2, 2).exp() * 40,
            "B": draw(1, 1, 2, total), "C": draw(1, 1, 2, total),
        }  # fmt: skip
        options: dict[str, Any] = {}
    else:
        tensors = {
            "x": draw(1, total, 2, 1), "dt": draw(1, total, 2).exp() * 50, "A": -draw(2).exp() * 40,
            "B": draw(1, total, 1, 2), "C": draw(1, total, 1, 2),
        }  # fmt: skip
        options = {"chunk_size": 8}
    weight = draw(1, 2, total) if name == "selective_scan_fn" else draw(1, total, 2, 1)
    single = {key: tensor.float() for key, tensor in tensors.items()}
    compare(pool, name, single, options, [8, 8, 8], [weight.float()], tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [5, 6, 7, 8])
@pytest.mark.parametrize("name", ["causal_conv1d_fn", "selective_scan_fn", "mamba_chunk_scan_combined"])
def test_more_ranks_than_one_gather_serves(eight: Pool, name: str, size: int) -> None:
    draw, lengths = drawn(size), [3 + i % 3 for i in range(size)]
    total = sum(lengths)
    options: dict[str, Any] = {}
    weight = draw(2, 4, total)
    if name == "causal_conv1d_fn":
        tensors = {"x": draw(2, 4, total), "weight": draw(4, 4), "seq_idx": packed([7, 2, 9], total, 2)}
    elif name == "selective_scan_fn":
        tensors = {
            "u": draw(2, 4, total), "delta": draw(2, 4, total).exp() * 0.1, "A": -draw(4, 3).exp(),
            "B": draw(2, 1, 3, total), "C": draw(2, 1, 3, total), "z": draw(2, 4, total),
        }  # fmt: skip
    else:
        weight = draw(2, total, 2, 3)
        tensors = {
            "x": draw(2, total, 2, 3), "dt": draw(2, total, 2), "A": -draw(2).exp(), "B": draw(2, total, 1, 3),
            "C": draw(2, total, 1, 3), "seq_idx": packed([9, 4, 10], total, 2),
        }  # fmt: skip
        options = {"chunk_size": 8, "dt_softplus": True}
    compare(eight, name, tensors, options, lengths, [weight])
