"""Rows of the norms and gates: RMS norm with a residual as before a mixer, the gated RMS norm of Mamba-2, SwiGLU.

The private pairs are timed, which ours and upstream's share by name: a backward alone can then be replayed as a graph.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from anymamba.ops import layer_norm, layernorm_gated, swiglu
from benchmarks import measure as measuring
from benchmarks.measure import Candidate, Row, measure, sets_for

SHAPES = [(32 * 256, 2048), (8 * 2048, 2048), (4 * 8192, 2048), (8 * 2048, 1024), (8 * 2048, 4096)]
EPS = 1e-5


def rows(upstream: Any, *, quick: bool = False) -> Iterator[Row]:
    """Yield measured rows; `upstream` is its module mamba_ssm.ops.triton.layer_norm, or None."""
    for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float32):
        for count, dim in SHAPES:
            yield from _rows(
                "rms_norm_fn, residual in fp32", layer_norm, upstream, "layer_norm", _residual, dtype, count, dim
            )
            yield from _rows(
                "rmsnorm_fn, gated", layernorm_gated, upstream, "layernorm_gated", _gated, dtype, count, dim
            )
            yield from _rows("swiglu", swiglu_module(), upstream, "k_activations", _swiglu, dtype, count, dim)
        for batch in (1, 256):
            yield _step(
                "rms_norm_fn, residual in fp32", layer_norm, upstream, "layer_norm", _residual_step, dtype, batch
            )
            yield _step("rmsnorm_fn, gated", layernorm_gated, upstream, "layernorm_gated", _gated_step, dtype, batch)


def swiglu_module() -> Any:
    """Return the module: the package exports the function under the same name."""
    return importlib.import_module(swiglu.__module__)


def _rows(
    operator: str, ours: Any, upstream: Any, theirs: str, make: Any, dtype: torch.dtype, count: int, dim: int
) -> Iterator[Row]:
    modules = {"anymamba": ours}
    if upstream:
        modules["upstream"] = importlib.import_module(f"{upstream.__package__}.{theirs}")
    sets = min(sets_for(4 * count * dim * dtype.itemsize), 4)
    forward, backward, forward_bytes, backward_bytes = make(dtype, count, dim, sets)
    for direction, call, moved in (("fwd", forward, forward_bytes), ("bwd", backward, backward_bytes)):
        if direction == "fwd" or len(measuring.DIRECTIONS) > 1:
            candidates = [Candidate(name, _bound(call, module)) for name, module in modules.items()]
            row = Row(operator, f"{count} x {dim}", str(dtype)[6:], direction, moved * count * dim)
            yield measure(row, candidates, sets)


def _step(operator: str, ours: Any, upstream: Any, theirs: str, make: Any, dtype: torch.dtype, batch: int) -> Row:
    """Measure the public function without gradients, as a decoding step calls it."""
    modules = {"anymamba": ours}
    if upstream:
        modules["upstream"] = importlib.import_module(f"{upstream.__package__}.{theirs}")
    dim, sets = 2048, 4
    row = Row(operator, f"{batch} x {dim}", str(dtype)[6:], "step")
    return measure(
        row, [Candidate(name, make(module, dtype, batch, dim, sets)) for name, module in modules.items()], sets
    )


def _residual_step(module: Any, dtype: torch.dtype, batch: int, dim: int, sets: int) -> Callable[[int], Any]:
    x, total = _draw(sets, batch, dim, dtype=dtype), _draw(sets, batch, dim, dtype=torch.float32)
    weight = torch.ones(dim, device="cuda")

    def call(i: int) -> Any:
        with torch.no_grad():
            return module.rms_norm_fn(x[i], weight, None, total[i], eps=EPS, prenorm=True, residual_in_fp32=True)

    return call


def _gated_step(module: Any, dtype: torch.dtype, batch: int, dim: int, sets: int) -> Callable[[int], Any]:
    x, z = _draw(sets, batch, dim, dtype=dtype), _draw(sets, batch, dim, dtype=dtype)
    weight = torch.ones(dim, device="cuda")

    def call(i: int) -> Any:
        with torch.no_grad():
            return module.rmsnorm_fn(x[i], weight, None, z[i], EPS, None, False)

    return call


def _bound(call: Callable[[Any, int], Any], module: Any) -> Callable[[int], Any]:
    return lambda i: call(module, i)


def _draw(sets: int, *shape: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(*shape, device="cuda", dtype=dtype) for _ in range(sets)]


def _residual(dtype: torch.dtype, count: int, dim: int, sets: int) -> tuple[Any, Any, float, float]:
    x, dout = (_draw(sets, count, dim, dtype=dtype) for _ in range(2))
    total, dtotal = (_draw(sets, count, dim, dtype=torch.float32) for _ in range(2))
    weight = torch.ones(dim, device="cuda")
    rstd = [1 / (v.square().mean(1) + EPS).sqrt() for v in total]

    def forward(module: Any, i: int) -> Any:
        return module._layer_norm_fwd(x[i], weight, None, EPS, residual=total[i], is_rms_norm=True)

    def backward(module: Any, i: int) -> Any:
        return module._layer_norm_bwd(
            dout[i], total[i], weight, None, EPS, None, rstd[i], dresidual=dtotal[i], has_residual=True,
            is_rms_norm=True, x_dtype=dtype,
        )  # fmt: skip

    # In: x and the residual; out: the norm and the sum. Back: dout, the sum, its gradient; dx, and apart if in two dtypes.
    return forward, backward, 2 * dtype.itemsize + 8, 2 * dtype.itemsize + 8 + (4 if dtype.itemsize < 4 else 0)


def _gated(dtype: torch.dtype, count: int, dim: int, sets: int) -> tuple[Any, Any, float, float]:
    x, z, dout = (_draw(sets, count, dim, dtype=dtype) for _ in range(3))
    weight = torch.ones(dim, device="cuda")
    options = {"z": None, "norm_before_gate": False, "is_rms_norm": True}
    rstd = [layernorm_gated._layer_norm_fwd(x[i], weight, None, EPS, **{**options, "z": z[i]})[2] for i in range(sets)]

    def forward(module: Any, i: int) -> Any:
        return module._layer_norm_fwd(x[i], weight, None, EPS, **{**options, "z": z[i]})

    def backward(module: Any, i: int) -> Any:
        return module._layer_norm_bwd(dout[i], x[i], weight, None, EPS, None, rstd[i], **{**options, "z": z[i]})

    return forward, backward, 3 * dtype.itemsize, 5 * dtype.itemsize


def _swiglu(dtype: torch.dtype, count: int, dim: int, sets: int) -> tuple[Any, Any, float, float]:
    xy, dout = _draw(sets, count, 2 * dim, dtype=dtype), _draw(sets, count, dim, dtype=dtype)

    def forward(module: Any, i: int) -> Any:
        return module._swiglu_fwd(xy[i])

    def backward(module: Any, i: int) -> Any:
        return module._swiglu_bwd(xy[i], dout[i])

    return forward, backward, 3 * dtype.itemsize, 5 * dtype.itemsize
