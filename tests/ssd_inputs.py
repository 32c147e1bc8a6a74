"""Arguments for tests of the state-space dual scan's CUDA kernels, on the card or emulated."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

__all__ = ["inputs", "packed", "scans"]

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def inputs(
    device: str,
    dtype: torch.dtype = F32,
    batch: int = 1,
    seqlen: int = 70,
    heads: int = 2,
    headdim: int = 16,
    groups: int = 1,
    dstate: int = 16,
    layout: str = "slice",
    full: bool = True,
    initial: bool = True,
    sequences: bool = False,
    decay: float = 1.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Return arguments of mamba_chunk_scan_combined; `full`: z, D a column, bias and softplus; else D a head and limits."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    def sequence(*shape: int) -> torch.Tensor:
        if layout == "slice":  # of a wider projection, as Mamba2 makes its inputs
            return tensor(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]
        return tensor(shape[0], shape[2], shape[3], shape[1]).permute(0, 3, 1, 2)

    return {
        "x": sequence(batch, seqlen, heads, headdim),
        "dt": tensor(batch, seqlen, heads),
        "A": -decay * (0.1 + tensor(heads, dtype=F32).abs()),
        "B": sequence(batch, seqlen, groups, dstate),
        "C": sequence(batch, seqlen, groups, dstate),
        "chunk_size": 256,
        "D": tensor(heads, headdim, dtype=F32) if full else tensor(heads),
        "z": sequence(batch, seqlen, heads, headdim) if full else None,
        "dt_bias": tensor(heads, dtype=F32) if full else None,
        "dt_softplus": full,
        "dt_limit": (0.0, float("inf")) if full else (0.01, 0.7),
        "initial_states": tensor(batch, heads, headdim, dstate, dtype=F32) if initial else None,
        "seq_idx": (torch.rand(batch, seqlen, generator=generator) > 0.95).int().cumsum(1).to(device) if sequences else None,
        "return_final_states": True,
    }  # fmt: skip


def packed(arguments: dict[str, Any], lengths: list[int]) -> dict[str, Any]:
    """Return the arguments with sequences of these lengths, and their states wanted."""
    device, total = arguments["x"].device, sum(lengths)
    seq_idx = torch.cat([torch.full((1, n), i) for i, n in enumerate(lengths)], 1)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    cut = {n: arguments[n][:, :total] for n in ("x", "dt", "B", "C", "z") if arguments[n] is not None}
    return {
        **arguments, **cut, "seq_idx": seq_idx.to(device), "cu_seqlens": ends.to(device), "return_varlen_states": True,
    }  # fmt: skip


@st.composite
def scans(draw: st.DrawFn, device: str) -> dict[str, Any]:
    """Draw arguments: any layout, any options. On the CPU such as need few kernels: g++ takes two seconds for each."""
    groups = draw(st.sampled_from([1, 2]))
    if device == "cpu":
        dtype, full, headdim, dstate = draw(st.sampled_from([(F32, True, 13, 16), (BF16, False, 16, 16)]))
        heads, seqlen, sequences = groups, draw(st.integers(0, 140)), dtype == F32
        layout = "slice"
    else:
        dtype, full, sequences = draw(st.sampled_from([F32, F16, BF16])), draw(st.booleans()), draw(st.booleans())
        headdim = draw(st.sampled_from([16, 24, 32, 64, 80, 96, 128, 256, 13]))
        dstate = draw(st.sampled_from([16, 20, 32, 64, 100, 128, 256]))
        heads, seqlen = groups * draw(st.integers(1, 3)), draw(st.integers(0, 500))
        layout = draw(st.sampled_from(["slice", "time last"]))
    arguments = inputs(
        device, dtype, draw(st.integers(1, 2)), seqlen, heads, headdim, groups, dstate, layout, full, draw(st.booleans()),
        sequences, draw(st.sampled_from([0.1, 1.0, 20.0])), draw(st.integers(0, 2**31)),
    )  # fmt: skip
    if sequences and seqlen and draw(st.booleans()):
        one = {n: v[:1] if isinstance(v, torch.Tensor) and v.dim() == 4 else v for n, v in arguments.items()}
        cuts = sorted({0, seqlen, *draw(st.lists(st.integers(0, seqlen), max_size=4))})
        arguments = packed({**one, "dt": arguments["dt"][:1]}, [b - a for a, b in zip(cuts, cuts[1:])])
    return arguments
