"""Rows of the causal convolution: both layouts, forward and backward, and the decoding step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from anymamba.ops import causal_conv1d_fn, causal_conv1d_update
from benchmarks.measure import Candidate, Row, measure, sets_for

DIM, WIDTH = 2048, 4
SHAPES = [(32, 256), (8, 2048), (4, 8192)]


def rows(upstream: Any, *, quick: bool = False) -> Iterator[Row]:
    """Yield measured rows; `upstream` is its package causal_conv1d, or None."""
    for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float16, torch.float32):
        for batch, seqlen in SHAPES:
            for layout in ("rows", "channels"):
                yield from _convolution(upstream, dtype, batch, seqlen, layout)
        for batch in (1, 256):
            yield _update(upstream, dtype, batch)


def _convolution(upstream: Any, dtype: torch.dtype, batch: int, seqlen: int, layout: str) -> Iterator[Row]:
    one = batch * DIM * seqlen * dtype.itemsize
    sets = sets_for(2 * one)

    def draw() -> torch.Tensor:
        if layout == "rows":
            return torch.randn(batch, DIM, seqlen, device="cuda", dtype=dtype)
        return torch.randn(batch, seqlen, DIM, device="cuda", dtype=dtype).transpose(1, 2)

    xs, gradients = [draw() for _ in range(sets)], [draw() for _ in range(sets)]
    weight, bias = torch.randn(DIM, WIDTH, device="cuda", dtype=dtype), torch.randn(DIM, device="cuda", dtype=dtype)
    functions = {"anymamba": causal_conv1d_fn} | ({"upstream": upstream.causal_conv1d_fn} if upstream else {})

    def forward(function: Any) -> Any:
        return lambda i: function(xs[i], weight, bias, activation="silu")

    def both(function: Any) -> Any:
        leaves = [x.detach().requires_grad_() for x in xs]
        w, b = weight.detach().requires_grad_(), bias.detach().requires_grad_()
        return lambda i: torch.autograd.grad(
            function(leaves[i], w, b, activation="silu"), (leaves[i], w, b), gradients[i]
        )

    shape = f"B{batch} D{DIM} L{seqlen} {layout}"
    for direction, make, floor in (("fwd", forward, 2 * one), ("fwd+bwd", both, 5 * one)):
        row = Row("causal_conv1d_fn", shape, str(dtype)[6:], direction, floor)
        # Autograd inside a capture needs care that upstream's wrappers do not take: backward is measured eagerly.
        yield measure(row, [Candidate(name, make(f)) for name, f in functions.items()], sets, graph=direction == "fwd")
    if upstream:
        yield _backward_alone(xs, gradients, weight, bias, shape, dtype, 3 * one, sets)


def _backward_alone(
    xs: list[torch.Tensor], gradients: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor, shape: str,
    dtype: torch.dtype, floor: float, sets: int,
) -> Row:  # fmt: skip
    """Measure the two backward functions themselves: without autograd, so that they can be captured."""
    import causal_conv1d_cuda

    from anymamba.backends.cuda.causal_conv1d import causal_conv1d_backward

    def ours(i: int) -> Any:
        return causal_conv1d_backward(xs[i], weight, bias, gradients[i], None, None, None, True)

    def theirs(i: int) -> Any:
        return causal_conv1d_cuda.causal_conv1d_bwd(
            xs[i], weight, bias, gradients[i], None, None, None, None, False, True
        )

    row = Row("causal_conv1d_bwd", shape, str(dtype)[6:], "bwd", floor)
    return measure(row, [Candidate("anymamba", ours), Candidate("upstream", theirs)], sets)


def _update(upstream: Any, dtype: torch.dtype, batch: int) -> Row:
    one = batch * DIM * dtype.itemsize
    sets = sets_for(one * (2 + 2 * WIDTH))
    xs = [torch.randn(batch, DIM, device="cuda", dtype=dtype) for _ in range(sets)]
    states = [torch.randn(batch, DIM, WIDTH, device="cuda", dtype=dtype) for _ in range(sets)]
    weight, bias = torch.randn(DIM, WIDTH, device="cuda", dtype=dtype), torch.randn(DIM, device="cuda", dtype=dtype)
    functions = {"anymamba": causal_conv1d_update}
    if upstream:
        functions["upstream"] = upstream.causal_conv1d_update

    def step(function: Any) -> Any:
        return lambda i: function(xs[i], states[i], weight, bias, "silu")

    row = Row("causal_conv1d_update", f"B{batch} D{DIM}", str(dtype)[6:], "step", one * (2 + 2 * WIDTH))
    return measure(row, [Candidate(name, step(f)) for name, f in functions.items()], sets)
