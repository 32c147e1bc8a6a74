"""Rows of Mamba-2's scan as upstream's block calls it: headdim 64, 128 states, one group, bias, softplus and D; chunk 256.

First the first calls of a process, with an empty kernel cache and a warm one, each in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from anymamba.ops import mamba_chunk_scan_combined
from benchmarks import measure as measuring
from benchmarks.measure import Candidate, Row, sets_for

HEADDIM, DSTATE, CHUNK = 64, 128, 256
SHAPES = [(32, 256, 32), (8, 2048, 32), (4, 8192, 32), (1, 65536, 32)]
LONG = [(1, 1 << power, 128) for power in (10, 12, 14, 16, 18)]
FIRST = """
import time
import torch
from anymamba.ops import mamba_chunk_scan_combined
def draw(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
x, dt, B, C = draw(2, 512, 8, 64), draw(2, 512, 8), draw(2, 512, 1, 128), draw(2, 512, 1, 128)
A = -torch.rand(8, device="cuda")
if {trains}:
    x.requires_grad_()
torch.cuda.synchronize()
started = time.perf_counter()
out = mamba_chunk_scan_combined(x, dt, A, B, C, 256, dt_softplus=True)
if {trains}:
    out.sum().backward()
torch.cuda.synchronize()
print((time.perf_counter() - started) * 1e3)
"""


def rows(upstream: Any, *, quick: bool = False) -> Iterator[Row]:
    """Yield measured rows; `upstream` is its module mamba_ssm.ops.triton.ssd_combined, or None."""
    yield from _first_calls()
    for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float32):
        for batch, seqlen, heads in SHAPES:
            yield from _scan(upstream, dtype, batch, seqlen, heads)
    for batch, seqlen, heads in LONG:
        yield from _scan(upstream, torch.bfloat16, batch, seqlen, heads, directions=("fwd",))


def _first_calls() -> Iterator[Row]:
    for direction in measuring.DIRECTIONS:
        code = FIRST.format(trains=direction != "fwd")
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("empty cache", "warm cache"):
                environment = dict(os.environ, ANYMAMBA_CACHE_DIR=folder, PYTHONPATH=os.pathsep.join(sys.path))
                answer = subprocess.run(
                    [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
                )
                row = Row("mamba_chunk_scan_combined", f"first call, {kind}", "bfloat16", direction)
                row.eager = {"anymamba": [float(answer.stdout)]}
                yield row


def _draw(dtype: torch.dtype, batch: int, seqlen: int, heads: int) -> list[torch.Tensor]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    x, dt = draw(batch, seqlen, heads, HEADDIM), draw(batch, seqlen, heads)
    B, C = draw(batch, seqlen, 1, DSTATE), draw(batch, seqlen, 1, DSTATE)
    A = -torch.empty(heads, device="cuda").uniform_(1, 16)
    D = torch.ones(heads, device="cuda")
    bias = torch.empty(heads, device="cuda").uniform_(-6.9, -2.2)  # softplus of it: 0.001 to 0.1, as the block starts
    return [x, dt, A, B, C, D, bias]


def _call(
    function: Any, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor,
    bias: torch.Tensor,
) -> Any:  # fmt: skip
    return function(x, dt, A, B, C, CHUNK, D=D, dt_bias=bias, dt_softplus=True)


def _scan(
    upstream: Any, dtype: torch.dtype, batch: int, seqlen: int, heads: int, directions: tuple[str, ...] = ("fwd", "fwd+bwd")
) -> Iterator[Row]:  # fmt: skip
    one = batch * seqlen * heads * HEADDIM * dtype.itemsize
    small = 2 * batch * seqlen * DSTATE * dtype.itemsize + batch * seqlen * heads * dtype.itemsize
    sets = min(sets_for(2 * one), 4)
    drawn = [_draw(dtype, batch, seqlen, heads) for _ in range(sets)]
    functions = {"anymamba": mamba_chunk_scan_combined}
    if upstream:
        functions["upstream"] = upstream.mamba_chunk_scan_combined

    def forward(function: Any) -> Any:
        def call(i: int) -> Any:
            with torch.no_grad():
                return _call(function, *drawn[i])

        return call

    def both(function: Any) -> Any:
        leaves = [[tensor.detach().requires_grad_() for tensor in tensors] for tensors in drawn]

        def call(i: int) -> Any:
            return torch.autograd.grad(_call(function, *leaves[i]), leaves[i], drawn[i][0])

        return call

    shape, name = f"B{batch} H{heads} P{HEADDIM} N{DSTATE} L{seqlen}", str(dtype)[6:]
    for direction in (d for d in directions if d in measuring.DIRECTIONS):
        make, floor = (forward, 2 * one + small) if direction == "fwd" else (both, 5 * one + 3 * small)
        row = Row("mamba_chunk_scan_combined", shape, name, direction, floor)
        candidates = [Candidate(name, make(f)) for name, f in functions.items()]
        yield measuring.measure(row, candidates, sets, graph=True)
