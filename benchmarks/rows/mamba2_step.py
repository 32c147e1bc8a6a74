"""Rows of a decoding step of a Mamba-2 block: projections, convolution, state with heads, gated norm; eager and as a graph."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from anymamba.measure.bench.blocks import mamba2_step, mamba2_step_arguments
from anymamba.measure.cases import Draw
from anymamba.ops import causal_conv1d_update, selective_state_update
from anymamba.ops.layernorm_gated import rmsnorm_fn
from benchmarks.measure import Candidate, Row, measure, sets_for

WIDTH = 1024


def rows(upstream: Any, *, quick: bool = False) -> Iterator[Row]:
    """Yield measured rows; `upstream` is its module mamba_ssm.ops.triton.selective_state_update, or None."""
    steps = {"anymamba": mamba2_step(causal_conv1d_update, selective_state_update, rmsnorm_fn)}
    if upstream:
        norms = importlib.import_module(f"{upstream.__package__}.layernorm_gated")
        convolutions = importlib.import_module("causal_conv1d")
        steps["upstream"] = mamba2_step(
            convolutions.causal_conv1d_update, upstream.selective_state_update, norms.rmsnorm_fn
        )
    for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float32):
        for batch in (1, 16, 256):
            yield _row(steps, dtype, batch)


def _row(steps: dict[str, Callable[..., Any]], dtype: torch.dtype, batch: int) -> Row:
    arguments = mamba2_step_arguments(Draw(dtype, torch.device("cuda")), batch, 0, WIDTH)
    weights = sum(value.numel() * value.element_size() for value in arguments.values())
    moved = weights + sum(arguments[name].numel() * dtype.itemsize for name in ("conv_state", "ssm_state"))
    sets = [arguments | {name: arguments[name].clone() for name in ("conv_state", "ssm_state")}]
    sets += [{name: value.clone() for name, value in arguments.items()} for _ in range(sets_for(moved) - 1)]

    def bound(step: Callable[..., Any]) -> Callable[[int], Any]:
        def call(i: int) -> Any:
            with torch.no_grad():
                return step(**sets[i])

        return call

    row = Row("Mamba2 step", f"B{batch} M{WIDTH} N128", str(dtype)[6:], "step", moved)
    return measure(row, [Candidate(name, bound(step)) for name, step in steps.items()], len(sets))
