"""Mamba-2 on a card, put together: the pieces that callers import alone, the inside of a block, the decoding step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from anymamba.ops import (
    causal_conv1d_update,
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
    selective_state_update,
    ssd_pieces,
)
from anymamba.ops.layernorm_gated import rmsnorm_fn
from oracle import assert_matches_reference, outputs_and_gradients, relative_error, upcast

pytestmark = pytest.mark.gpu
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def drawn(dtype: torch.dtype, seed: int = 0) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to("cuda", dtype)

    return tensor


def scan_arguments(dtype: torch.dtype, batch: int = 2, seqlen: int = 150, heads: int = 4) -> dict[str, torch.Tensor]:
    tensor = drawn(dtype)
    given = {
        "x": tensor(batch, seqlen, heads, 64),
        "dt": tensor(batch, seqlen, heads),
        "A": -0.1 - tensor(heads, dtype=F32).abs(),
        "B": tensor(batch, seqlen, 2, 128),
        "C": tensor(batch, seqlen, 2, 128),
        "D": tensor(heads, dtype=F32),
        "z": tensor(batch, seqlen, heads, 64),
        "dt_bias": tensor(heads, dtype=F32),
    }
    return {name: value.requires_grad_() for name, value in given.items()}


def together(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, dt_bias: Any, chunk_size: int) -> torch.Tensor:
    """The scan made of the public pieces."""
    sums, step = ssd_pieces._chunk_cumsum_fwd(dt, A, chunk_size, dt_bias, dt_softplus=True)
    alone = ssd_pieces.chunk_state(B, x, step, sums)
    states, _ = ssd_pieces.state_passing(alone.flatten(-2), sums[..., -1])
    padding = (0, 0, 0, 0, 0, -x.shape[1] % chunk_size)
    rows = [F.pad(tensor, padding) for tensor in (B, C, x)]
    out = ssd_pieces.chunk_scan(*rows, step, sums, states.view(alone.shape), D, F.pad(z, padding))
    return out[:, : x.shape[1]]


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_the_pieces_of_the_chunked_scan_together_are_the_scan(dtype: torch.dtype) -> None:
    arguments = scan_arguments(dtype) | {"chunk_size": 64}
    exact = {k: upcast(v).detach().requires_grad_() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    seen = outputs_and_gradients(together, arguments, 0)
    wanted = outputs_and_gradients(lambda **kw: mamba_chunk_scan_combined(**kw, dt_softplus=True), exact, 0)
    bound = {F32: 2e-3, F16: 1e-2, BF16: 5e-2}[dtype]  # tf32 may be allowed; half-precision results between are rounded
    for name, value in wanted.items():
        assert relative_error(seen[name], value) < bound, name


@pytest.mark.parametrize("packed", [False, True])
def test_upstreams_private_pair_of_the_whole_scan_runs(packed: bool) -> None:
    arguments = {name: value.detach() for name, value in scan_arguments(BF16, batch=1).items()}
    cu_seqlens = torch.tensor([0, 40, 41, 150], dtype=torch.int32, device="cuda") if packed else None
    seq_idx = torch.tensor([[0] * 40 + [1] + [2] * 109], dtype=torch.int32, device="cuda") if packed else None
    out, ungated, _, _, _, final, *varlen = ssd_pieces._mamba_chunk_scan_combined_fwd(
        **arguments, chunk_size=64, seq_idx=seq_idx, cu_seqlens=cu_seqlens, dt_softplus=True
    )
    exact = {name: upcast(value) for name, value in arguments.items()}
    wanted, *states = mamba_chunk_scan_combined(
        **exact, chunk_size=64, seq_idx=upcast(seq_idx), cu_seqlens=upcast(cu_seqlens), dt_softplus=True,
        return_final_states=True, return_varlen_states=packed,
    )  # fmt: skip
    for seen, value in zip([out, final, *varlen], [wanted, *states]):
        assert relative_error(seen, value) < 5e-2
    found = ssd_pieces._mamba_chunk_scan_combined_bwd(
        out, out=ungated, chunk_size=64, **arguments, seq_idx=seq_idx, dt_softplus=True
    )
    assert all(gradient is None or gradient.isfinite().all() for gradient in found)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_inside_of_a_block_matches_the_reference_forward_and_backward(dtype: torch.dtype, before: bool) -> None:
    tensor, heads, groups = drawn(dtype), 4, 2
    dim = heads * 64
    conv = dim + 2 * groups * 128
    given = {
        "zxbcdt": tensor(2, 150, dim + conv + heads), "conv1d_weight": tensor(conv, 4, dtype=F32),
        "conv1d_bias": tensor(conv, dtype=F32), "dt_bias": tensor(heads, dtype=F32),
        "A": -0.1 - tensor(heads, dtype=F32).abs(), "D": tensor(heads, dtype=F32),
        "rmsnorm_weight": tensor(dim, dtype=F32), "outproj_weight": tensor(96, dim),
    }  # fmt: skip
    arguments: dict[str, Any] = {name: value.requires_grad_() for name, value in given.items()}
    arguments |= {"chunk_size": 64, "headdim": 64, "ngroups": groups, "norm_before_gate": before}
    bound = {F32: 2e-3, BF16: 1.5e-1}[dtype]

    assert_matches_reference(
        mamba_split_conv1d_scan_combined,
        arguments,
        backend="torch",
        dtype=dtype,
        output_bound=bound,
        gradient_bound=bound,
    )
    seen = outputs_and_gradients(mamba_split_conv1d_scan_combined, arguments, 0)
    exact = {k: upcast(v).detach().requires_grad_() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    wanted = outputs_and_gradients(mamba_split_conv1d_scan_combined, exact, 0)
    for name, value in wanted.items():
        assert relative_error(seen[name], value) < bound, name


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_decoding_step_in_a_graph_gives_what_eager_gives(dtype: torch.dtype) -> None:
    tensor, batch, heads, dstate = drawn(dtype), 3, 8, 128
    dim = heads * 64
    xBC, z, dt = tensor(batch, dim + 2 * dstate), tensor(batch, dim), tensor(batch, heads)
    weight, bias = tensor(dim + 2 * dstate, 4), tensor(dim + 2 * dstate)
    A, D, dt_bias, scale = (tensor(*s, dtype=F32) for s in ((heads,), (heads,), (heads,), (dim,)))
    conv_state, state = tensor(batch, dim + 2 * dstate, 4), tensor(batch, heads, 64, dstate)

    def step(conv_state: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        x, B, C = causal_conv1d_update(xBC, conv_state, weight, bias, "silu").split([dim, dstate, dstate], dim=-1)
        wide = [t[..., None].expand(*t.shape, 64) for t in (dt, D, dt_bias)]
        rates = -A.exp()[:, None, None].expand(heads, 64, dstate)
        y = selective_state_update(
            state, x.unflatten(-1, (heads, 64)), wide[0], rates, B[:, None], C[:, None], wide[1], None, wide[2], True
        )
        return rmsnorm_fn(y.flatten(1), scale, None, z, 1e-5, None, False)

    kept = conv_state.clone(), state.clone()
    eager = [step(*kept) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(conv_state, state)
    for wanted in eager:
        graph.replay()
        assert torch.equal(out, wanted)
    assert torch.equal(conv_state, kept[0])
    assert torch.equal(state, kept[1])
