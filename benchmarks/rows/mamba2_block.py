"""Rows of the whole Mamba-2 block: input projection, `mamba_split_conv1d_scan_combined` with norm and output projection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from anymamba.measure.bench.blocks import mamba2_arguments, mamba2_block
from anymamba.measure.cases import Draw
from anymamba.ops import mamba_split_conv1d_scan_combined
from benchmarks import measure as measuring
from benchmarks.measure import Candidate, Row

MODEL = 1024
SHAPES = [(32, 256), (8, 2048), (4, 8192), (1, 65536)]


def rows(upstream: Any, *, quick: bool = False) -> Iterator[Row]:
    """Yield measured rows; `upstream` is its module mamba_ssm.ops.triton.ssd_combined, or None."""
    for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float32):
        for batch, seqlen in SHAPES:
            yield from _block(upstream, dtype, batch, seqlen)


def _block(upstream: Any, dtype: torch.dtype, batch: int, seqlen: int) -> Iterator[Row]:
    given = mamba2_arguments(Draw(dtype, torch.device("cuda")), 1, 1, MODEL)
    given["hidden"] = torch.randn(batch, seqlen, MODEL, device="cuda", dtype=dtype).requires_grad_()
    leaves = [value for value in given.values() if value.requires_grad]
    gradient = torch.randn(batch, seqlen, MODEL, device="cuda", dtype=dtype)
    functions = {"anymamba": mamba_split_conv1d_scan_combined}
    if upstream:
        functions["upstream"] = upstream.mamba_split_conv1d_scan_combined

    def forward(function: Any) -> Any:
        def call(i: int) -> Any:
            with torch.no_grad():
                return mamba2_block(function)(**given)

        return call

    def both(function: Any) -> Any:
        def call(i: int) -> Any:
            return torch.autograd.grad(mamba2_block(function)(**given), leaves, gradient)

        return call

    for direction, make in (("fwd", forward), ("fwd+bwd", both)):
        if direction not in measuring.DIRECTIONS:
            continue
        row = Row("Mamba2 block", f"B{batch} M{MODEL} L{seqlen} N128", str(dtype)[6:], direction)
        yield measuring.measure(row, [Candidate(name, make(f)) for name, f in functions.items()], 1, graph=False)
