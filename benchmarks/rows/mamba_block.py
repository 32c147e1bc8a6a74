"""Rows of the whole Mamba-1 block: input projection, `mamba_inner_fn`, output projection; d_model 1024, expand 2, N 16.

What is around `mamba_inner_fn` is done as upstream's module does it, the same for both sides; weights are drawn as it does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from anymamba.measure.bench.blocks import mamba_block
from anymamba.ops import mamba_inner_fn
from benchmarks.measure import Candidate, Row, measure

MODEL, DIM, DSTATE, RANK, WIDTH = 1024, 2048, 16, 64, 4
SHAPES = [(32, 256), (8, 2048), (4, 8192), (1, 65536)]


def rows(upstream: Any, *, quick: bool = False) -> Iterator[Row]:
    """Yield measured rows; `upstream` is its module mamba_ssm.ops.selective_scan_interface, or None."""
    for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float32):
        for batch, seqlen in SHAPES:
            yield from _block(upstream, dtype, batch, seqlen)


def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the block's weights; A, D and delta's bias stay fp32 as in upstream's module."""

    def linear(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, device="cuda").uniform_(-1, 1).div_(math.sqrt(columns)).to(dtype)

    drawn = {
        "in_proj": linear(2 * DIM, MODEL),
        "conv_weight": linear(DIM, WIDTH).unsqueeze(1),
        "conv_bias": torch.zeros(DIM, device="cuda", dtype=dtype),
        "x_proj": linear(RANK + 2 * DSTATE, DIM),
        "delta_proj": linear(DIM, RANK),
        "out_proj": linear(MODEL, DIM),
        "A_log": torch.arange(1, DSTATE + 1, device="cuda", dtype=torch.float32).log().repeat(DIM, 1),
        "D": torch.ones(DIM, device="cuda"),
        "delta_bias": torch.empty(DIM, device="cuda").uniform_(-6.9, -2.2),
    }
    return {name: tensor.requires_grad_() for name, tensor in drawn.items()}


def block(inner: Any, hidden: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    """Run the block on (batch, seqlen, MODEL)."""
    return mamba_block(inner)(hidden, **w)


def _block(upstream: Any, dtype: torch.dtype, batch: int, seqlen: int) -> Iterator[Row]:
    sets = 2
    hidden = [torch.randn(batch, seqlen, MODEL, device="cuda", dtype=dtype).requires_grad_() for _ in range(sets)]
    gradient = torch.randn(batch, seqlen, MODEL, device="cuda", dtype=dtype)
    w = weights(dtype)
    functions = {"anymamba": mamba_inner_fn} | ({"upstream": upstream.mamba_inner_fn} if upstream else {})

    def forward(function: Any) -> Any:
        def call(i: int) -> Any:
            with torch.no_grad():
                return block(function, hidden[i], w)

        return call

    def both(function: Any) -> Any:
        def call(i: int) -> Any:
            return torch.autograd.grad(block(function, hidden[i], w), (hidden[i], *w.values()), gradient)

        return call

    for direction, make in (("fwd", forward), ("fwd+bwd", both)):
        row = Row("Mamba block", f"B{batch} M{MODEL} L{seqlen} N{DSTATE}", str(dtype)[6:], direction)
        yield measure(row, [Candidate(name, make(f)) for name, f in functions.items()], sets, graph=False)
