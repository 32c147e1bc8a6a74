"""What training meets and NaN reports are about: strong decay, huge steps, rows of padding, nothing at all.

Every backend, in every dtype that a model trains in: an output or gradient that the formula keeps finite (float64, and within
the dtype's range) is finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from anymamba.backends import use_backend
from anymamba.measure.accuracy import reference_results
from anymamba.measure.cases import Draw
from anymamba.ops import (
    causal_conv1d_fn,
    layer_norm_fn,
    layernorm_fn,
    mamba_chunk_scan_combined,
    mamba_inner_fn,
    mamba_split_conv1d_scan_combined,
    selective_scan_fn,
    selective_state_update,
    swiglu,
)
from oracle import CPU_BACKENDS, outputs_and_gradients

BACKENDS = [*CPU_BACKENDS, pytest.param("cuda", marks=pytest.mark.gpu)]
BATCH, DIM, STATES, LENGTH, HEADS, HEADDIM = 2, 16, 8, 70, 4, 8

Arguments = dict[str, Any]


def scan(draw: Draw, length: int = LENGTH) -> Arguments:
    return {
        "u": draw.normal(BATCH, DIM, length),
        "delta": draw.normal(BATCH, DIM, length),
        "A": draw.uniform(DIM, STATES, low=-8.0, high=-0.5, dtype=draw.wide),
        "B": draw.normal(BATCH, STATES, length),
        "C": draw.normal(BATCH, STATES, length),
        "D": draw.normal(DIM, dtype=draw.wide),
        "z": draw.normal(BATCH, DIM, length),
        "delta_bias": draw.normal(DIM, dtype=draw.wide),
        "delta_softplus": True,
        "return_last_state": True,
    }


def ssd(draw: Draw, length: int = LENGTH) -> Arguments:
    return {
        "x": draw.normal(BATCH, length, HEADS, HEADDIM),
        "dt": draw.normal(BATCH, length, HEADS),
        "A": draw.uniform(HEADS, low=-8.0, high=-0.5, dtype=draw.wide),
        "B": draw.normal(BATCH, length, 1, STATES),
        "C": draw.normal(BATCH, length, 1, STATES),
        "chunk_size": 32,
        "D": draw.normal(HEADS, dtype=draw.wide),
        "dt_bias": draw.normal(HEADS, dtype=draw.wide),
        "dt_softplus": True,
        "return_final_states": True,
    }


def inner(draw: Draw, length: int = LENGTH) -> Arguments:
    rank = 2
    return {
        "xz": draw.normal(BATCH, 2 * DIM, length),
        "conv1d_weight": draw.normal(DIM, 1, 4, scale=0.5),
        "conv1d_bias": draw.normal(DIM),
        "x_proj_weight": draw.normal(rank + 2 * STATES, DIM, scale=0.25),
        "delta_proj_weight": draw.normal(DIM, rank),
        "out_proj_weight": draw.normal(8, DIM, scale=0.25),
        "out_proj_bias": None,
        "A": draw.uniform(DIM, STATES, low=-8.0, high=-0.5, dtype=draw.wide),
        "D": draw.normal(DIM, dtype=draw.wide),
        "delta_bias": draw.normal(DIM, dtype=draw.wide),
    }


def split(draw: Draw, length: int = LENGTH) -> Arguments:
    inside, conv = HEADS * HEADDIM, HEADS * HEADDIM + 2 * STATES
    return {
        "zxbcdt": draw.normal(BATCH, length, inside + conv + HEADS),
        "conv1d_weight": draw.normal(conv, 4, scale=0.5),
        "conv1d_bias": draw.normal(conv),
        "dt_bias": draw.normal(HEADS, dtype=draw.wide),
        "A": draw.uniform(HEADS, low=-8.0, high=-0.5, dtype=draw.wide),
        "D": draw.normal(HEADS, dtype=draw.wide),
        "chunk_size": 32,
        "headdim": HEADDIM,
        "rmsnorm_weight": draw.normal(inside),
        "norm_before_gate": False,
    }


def norm(draw: Draw) -> Arguments:
    return {"x": draw.normal(6, 64), "weight": draw.normal(64), "bias": draw.normal(64)}


def step(draw: Draw) -> Arguments:
    return {
        "state": draw.normal(BATCH, DIM, STATES, grad=False, dtype=draw.wide),
        "x": draw.normal(BATCH, DIM, grad=False),
        "dt": draw.normal(BATCH, DIM, grad=False),
        "A": draw.uniform(DIM, STATES, low=-8.0, high=-0.5, grad=False, dtype=draw.wide),
        "B": draw.normal(BATCH, STATES, grad=False),
        "C": draw.normal(BATCH, STATES, grad=False),
        "D": draw.normal(DIM, grad=False, dtype=draw.wide),
        "dt_bias": draw.normal(DIM, grad=False, dtype=draw.wide),
        "dt_softplus": True,
    }


def change(name: str, how: Callable[[torch.Tensor], None]) -> Callable[[Arguments], Arguments]:
    def apply(arguments: Arguments) -> Arguments:
        with torch.no_grad():
            how(arguments[name])
        return arguments

    return apply


def pad(*names: str, axis: int) -> Callable[[Arguments], Arguments]:
    """A whole row of the batch, and the beginning of the other, are zeros, as masked padding is."""

    def apply(arguments: Arguments) -> Arguments:
        with torch.no_grad():
            for name in names:
                arguments[name][0] = 0
                arguments[name][1].narrow(axis, 0, min(5, arguments[name].shape[axis + 1])).zero_()
        return arguments

    return apply


def unsoftened(name: str, softplus: str, value: float) -> Callable[[Arguments], Arguments]:
    def apply(arguments: Arguments) -> Arguments:
        with torch.no_grad():
            arguments[name].fill_(value)
        return arguments | {softplus: False, f"{name}_bias": None}

    return apply


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Arguments], Callable[[Arguments], Arguments]]] = {
    "scan, strong decay": (selective_scan_fn, scan, change("A", lambda A: A.mul_(1e5))),
    "scan, no decay": (selective_scan_fn, scan, change("A", torch.Tensor.zero_)),
    "scan, large steps": (selective_scan_fn, scan, change("delta", lambda delta: delta.mul_(300))),
    "scan, large steps as they are": (selective_scan_fn, scan, unsoftened("delta", "delta_softplus", 200.0)),
    "scan, steps of nothing": (selective_scan_fn, scan, unsoftened("delta", "delta_softplus", 0.0)),
    "scan, large gates": (selective_scan_fn, scan, change("z", lambda z: z.mul_(1000))),
    "scan, padding": (selective_scan_fn, scan, pad("u", "delta", "B", "C", "z", axis=-1)),
    "scan, zero length": (selective_scan_fn, lambda draw: scan(draw, 0), lambda arguments: arguments),
    "ssd, strong decay": (mamba_chunk_scan_combined, ssd, change("A", lambda A: A.mul_(1e5))),
    "ssd, no decay": (mamba_chunk_scan_combined, ssd, change("A", torch.Tensor.zero_)),
    "ssd, large steps": (mamba_chunk_scan_combined, ssd, change("dt", lambda dt: dt.mul_(300))),
    "ssd, large steps as they are": (mamba_chunk_scan_combined, ssd, unsoftened("dt", "dt_softplus", 200.0)),
    "ssd, steps of nothing": (mamba_chunk_scan_combined, ssd, unsoftened("dt", "dt_softplus", 0.0)),
    "ssd, padding": (mamba_chunk_scan_combined, ssd, pad("x", "dt", "B", "C", axis=0)),
    "ssd, zero length": (mamba_chunk_scan_combined, lambda draw: ssd(draw, 0), lambda arguments: arguments),
    "Mamba block, strong decay": (mamba_inner_fn, inner, change("A", lambda A: A.mul_(1e5))),
    "Mamba block, padding": (mamba_inner_fn, inner, pad("xz", axis=-1)),
    "Mamba-2 block, strong decay": (mamba_split_conv1d_scan_combined, split, change("A", lambda A: A.mul_(1e5))),
    "Mamba-2 block, padding": (mamba_split_conv1d_scan_combined, split, pad("zxbcdt", axis=0)),
    "convolution, large inputs": (
        causal_conv1d_fn,
        lambda draw: {"x": draw.normal(2, 8, 40, scale=1000), "weight": draw.normal(8, 4), "activation": "silu"},
        lambda arguments: arguments,
    ),
    "convolution, padding": (
        causal_conv1d_fn,
        lambda draw: {"x": draw.normal(2, 8, 40), "weight": draw.normal(8, 4), "bias": draw.normal(8)},
        pad("x", axis=-1),
    ),
    "norm, rows of zeros": (layer_norm_fn, norm, change("x", lambda x: x[:3].zero_())),
    "norm, rows of one value": (layer_norm_fn, norm, change("x", lambda x: x.fill_(3.0))),
    "gated norm, large gates and rows of zeros": (
        layernorm_fn,
        lambda draw: norm(draw) | {"z": draw.normal(6, 64, scale=1000), "group_size": 32},
        change("x", lambda x: x[:3].zero_()),
    ),
    "SwiGLU, large gates": (
        swiglu,
        lambda draw: {"xy": draw.normal(4, 32)},
        change("xy", lambda xy: xy[..., :16].mul_(1000)),
    ),
    "decoding step, strong decay": (selective_state_update, step, change("A", lambda A: A.mul_(1e5))),
    "decoding step, large steps": (selective_state_update, step, change("dt", lambda dt: dt.mul_(300))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_what_the_formula_keeps_finite_is_finite(name: str, backend: str, dtype: torch.dtype) -> None:
    function, make, distort = CASES[name]
    device = torch.device("cuda" if backend == "cuda" else "cpu")
    arguments = distort(make(Draw(dtype, device)))
    changed = ("state",) if function is selective_state_update else ()
    wanted = reference_results(function, arguments, 0, changed)
    with use_backend(backend):
        seen = outputs_and_gradients(function, arguments, 0, changed)
    assert seen.keys() == wanted.keys()
    for what, value in seen.items():
        within = wanted[what].abs().to(device) < torch.finfo(value.dtype).max / 4
        assert bool((value.isfinite() | ~within).all()), what
