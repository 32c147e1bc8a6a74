"""Rows of the decoding step: Mamba-1 (one head, 16 states) and Mamba-2 (heads of 64, 128 states)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from anymamba.ops import selective_state_update
from benchmarks.measure import Candidate, Row, measure, sets_for


def rows(upstream: Any, *, quick: bool = False) -> Iterator[Row]:
    """Yield measured rows; `upstream` is its module selective_state_update, or None."""
    functions = {"anymamba": selective_state_update}
    if upstream:
        functions["upstream"] = upstream.selective_state_update
    for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float16, torch.float32):
        for batch in (1, 16, 256):
            yield _mamba1(functions, dtype, batch)
            yield _mamba2(functions, dtype, batch)


def _mamba1(functions: dict[str, Any], dtype: torch.dtype, batch: int) -> Row:
    dim, dstate = 2048, 16
    one = 2 * batch * dim * dstate * dtype.itemsize
    sets = sets_for(one)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    states = [draw(batch, dim, dstate) for _ in range(sets)]
    x, dt, z, B, C = draw(batch, dim), draw(batch, dim), draw(batch, dim), draw(batch, dstate), draw(batch, dstate)
    A, D, bias = (
        -torch.rand(dim, dstate, device="cuda"),
        torch.randn(dim, device="cuda"),
        torch.randn(dim, device="cuda"),
    )

    def step(function: Any) -> Any:
        return lambda i: function(states[i], x, dt, A, B, C, D, z=z, dt_bias=bias, dt_softplus=True)

    row = Row("selective_state_update", f"B{batch} D{dim} N{dstate}", str(dtype)[6:], "step", one)
    return measure(row, [Candidate(name, step(f)) for name, f in functions.items()], sets)


def _mamba2(functions: dict[str, Any], dtype: torch.dtype, batch: int) -> Row:
    heads, headdim, dstate = 32, 64, 128
    one = 2 * batch * heads * headdim * dstate * dtype.itemsize
    sets = sets_for(one)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    states = [draw(batch, heads, headdim, dstate) for _ in range(sets)]
    x, z = draw(batch, heads, headdim), draw(batch, heads, headdim)
    dt = draw(batch, heads)[..., None].expand(-1, -1, headdim)
    B, C = draw(batch, 1, dstate), draw(batch, 1, dstate)
    A = -torch.rand(heads, device="cuda")[:, None, None].expand(-1, headdim, dstate)
    D, bias = (torch.randn(heads, device="cuda")[:, None].expand(-1, headdim) for _ in range(2))

    def step(function: Any) -> Any:
        return lambda i: function(states[i], x, dt, A, B, C, D, z=z, dt_bias=bias, dt_softplus=True)

    row = Row("selective_state_update", f"B{batch} H{heads} P{headdim} N{dstate}", str(dtype)[6:], "step", one)
    return measure(row, [Candidate(name, step(f)) for name, f in functions.items()], sets)
