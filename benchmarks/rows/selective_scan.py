"""Rows of the selective scan as upstream's Mamba block calls it: z, D, delta_bias, softplus, D 2048, N 16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from anymamba.ops import selective_scan_fn
from benchmarks.measure import Candidate, Row, measure, sets_for

DIM, DSTATE = 2048, 16
SHAPES = [(32, 256), (8, 2048), (4, 8192), (1, 65536)]


def rows(upstream: Any, *, quick: bool = False) -> Iterator[Row]:
    """Yield measured rows; `upstream` is its module mamba_ssm.ops.selective_scan_interface, or None."""
    for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float16, torch.float32):
        for batch, seqlen in SHAPES:
            yield from _scan(upstream, dtype, batch, seqlen)


def _scan(upstream: Any, dtype: torch.dtype, batch: int, seqlen: int) -> Iterator[Row]:
    one = batch * DIM * seqlen * dtype.itemsize
    sets = min(sets_for(4 * one), 4)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_()

    drawn = [
        (draw(batch, DIM, seqlen), draw(batch, DIM, seqlen), draw(batch, DIM, seqlen), draw(batch, DIM, seqlen),
         draw(batch, 1, DSTATE, seqlen), draw(batch, 1, DSTATE, seqlen))
        for _ in range(sets)
    ]  # fmt: skip
    A = -torch.arange(1, DSTATE + 1, device="cuda", dtype=torch.float32).repeat(DIM, 1)
    D = torch.ones(DIM, device="cuda")
    bias = torch.empty(DIM, device="cuda").uniform_(-6.9, -2.2)  # softplus of it: 0.001 to 0.1, as the block starts
    functions = {"anymamba": selective_scan_fn} | ({"upstream": upstream.selective_scan_fn} if upstream else {})

    def forward(function: Any) -> Any:
        def call(i: int) -> Any:
            u, delta, z, _, B, C = drawn[i]
            with torch.no_grad():
                return function(u, delta, A, B, C, D, z, bias, True)

        return call

    def both(function: Any) -> Any:
        leaves = [(leaf(u), leaf(delta), leaf(z), leaf(B), leaf(C)) for u, delta, z, _, B, C in drawn]
        vectors = leaf(A), leaf(D), leaf(bias)

        def call(i: int) -> Any:
            u, delta, z, B, C = leaves[i]
            out = function(u, delta, vectors[0], B, C, vectors[1], z, vectors[2], True)
            return torch.autograd.grad(out, (*leaves[i], *vectors), drawn[i][3])

        return call

    shape, name = f"B{batch} D{DIM} L{seqlen} N{DSTATE}", str(dtype)[6:]
    row = Row("selective_scan_fn", shape, name, "fwd", 4 * one)
    yield measure(row, [Candidate(name, forward(f)) for name, f in functions.items()], sets)
    row = Row("selective_scan_fn", shape, name, "fwd+bwd", 11 * one)
    yield measure(row, [Candidate(name, both(f)) for name, f in functions.items()], sets, graph=False)
