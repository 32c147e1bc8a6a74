"""One small call of every public operator: does it run here, forward and backward, and who computed it?

Only used inside the probe process. Values are `anymamba verify`'s matter; here a result must be finite and of the right
shape. A new operator is one more function in CALLS.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

__all__ = ["CALLS", "devices", "run"]

_BATCH, _DIM, _LENGTH, _STATE, _HEADS, _HEADDIM = 2, 16, 24, 8, 2, 8


class _Inputs:
    """Makes tensors on a device, half of them asking for gradients."""

    def __init__(self, torch: Any, device: str) -> None:
        self.torch = torch
        self.device = device
        self.generator = torch.Generator().manual_seed(0)
        self.leaves: list[Any] = []

    def __call__(self, *shape: int, grad: bool = True) -> Any:
        values = self.torch.randn(*shape, generator=self.generator).to(self.device)
        if grad:
            self.leaves.append(values.requires_grad_())
        return values

    def positive(self, *shape: int) -> Any:
        return self(*shape, grad=False).abs() * 0.1 + 0.05


def _causal_conv1d_fn(ops: Any, new: _Inputs) -> Any:
    return ops.causal_conv1d_fn(new(_BATCH, _DIM, _LENGTH), new(_DIM, 4), new(_DIM), activation="silu")


def _causal_conv1d_update(ops: Any, new: _Inputs) -> Any:
    state = new(_BATCH, _DIM, 3, grad=False)
    return ops.causal_conv1d_update(
        new(_BATCH, _DIM, grad=False), state, new(_DIM, 4, grad=False), new(_DIM, grad=False), "silu"
    )


def _selective_scan_fn(ops: Any, new: _Inputs) -> Any:
    return ops.selective_scan_fn(
        new(_BATCH, _DIM, _LENGTH),
        new.positive(_BATCH, _DIM, _LENGTH),
        -new.positive(_DIM, _STATE),
        new(_BATCH, _STATE, _LENGTH),
        new(_BATCH, _STATE, _LENGTH),
        D=new(_DIM),
        z=new(_BATCH, _DIM, _LENGTH),
        delta_softplus=True,
    )


def _selective_state_update(ops: Any, new: _Inputs) -> Any:
    return ops.selective_state_update(
        new(_BATCH, _DIM, _STATE, grad=False),
        new(_BATCH, _DIM, grad=False),
        new.positive(_BATCH, _DIM),
        -new.positive(_DIM, _STATE),
        new(_BATCH, _STATE, grad=False),
        new(_BATCH, _STATE, grad=False),
        D=new(_DIM, grad=False),
    )


def _mamba_chunk_scan_combined(ops: Any, new: _Inputs) -> Any:
    return ops.mamba_chunk_scan_combined(
        new(_BATCH, _LENGTH, _HEADS, _HEADDIM),
        new.positive(_BATCH, _LENGTH, _HEADS),
        -new.positive(_HEADS),
        new(_BATCH, _LENGTH, 1, _STATE),
        new(_BATCH, _LENGTH, 1, _STATE),
        16,
        D=new(_HEADS),
    )


def _rms_norm_fn(ops: Any, new: _Inputs) -> Any:
    return ops.rms_norm_fn(new(_BATCH, _LENGTH, _DIM), new(_DIM), None)


def _layer_norm_fn(ops: Any, new: _Inputs) -> Any:
    return ops.layer_norm_fn(new(_BATCH, _LENGTH, _DIM), new(_DIM), new(_DIM))


def _rmsnorm_fn(ops: Any, new: _Inputs) -> Any:
    return ops.rmsnorm_fn(new(_BATCH, _LENGTH, _DIM), new(_DIM), None, z=new(_BATCH, _LENGTH, _DIM))


CALLS: dict[str, Callable[[Any, _Inputs], Any]] = {
    "causal_conv1d_fn": _causal_conv1d_fn,
    "causal_conv1d_update": _causal_conv1d_update,
    "selective_scan_fn": _selective_scan_fn,
    "selective_state_update": _selective_state_update,
    "mamba_chunk_scan_combined": _mamba_chunk_scan_combined,
    "layer_norm_fn": _layer_norm_fn,
    "rms_norm_fn": _rms_norm_fn,
    "rmsnorm_fn": _rmsnorm_fn,
}


def devices(torch: Any) -> list[str]:
    """Return the devices to try: the best first, then the CPU."""
    found = []
    if torch.cuda.is_available():
        found.append("cuda")
    if getattr(torch.backends, "mps", None) and torch.backends.mps.is_available():
        found.append("mps")
    if getattr(torch, "xpu", None) and torch.xpu.is_available():
        found.append("xpu")
    return [*found, "cpu"]


def run(torch: Any, name: str, device: str, *, backend: str | None = None) -> dict[str, Any]:
    """Call one operator forward and backward, on `backend` or the one chosen; return the fields of an `OperatorRun`."""
    start = time.perf_counter()
    answer: dict[str, Any] = {"operator": name, "device": device, "ok": False}
    try:
        from anymamba import backends, ops

        if not hasattr(ops, name):
            return {**answer, "ok": None, "problem": "this version of anymamba does not have it yet"}
        known = set(backends._chosen)
        new = _Inputs(torch, device)
        with contextlib.nullcontext() if backend is None else backends.use_backend(backend):
            out = CALLS[name](ops, new)
            out = out[0] if isinstance(out, tuple) else out
            if new.leaves:
                out.float().square().sum().backward()
        results = [out, *(leaf.grad for leaf in new.leaves)]
        finite = all(result is not None and bool(torch.isfinite(result).all()) for result in results)
        answer["ok"] = finite
        answer["problem"] = "" if finite else "the result or a gradient is missing or not finite"
        answer["backend"] = _backend(backends, known, name)
    except Exception as failure:
        if backend is not None and type(failure).__name__ == "BackendRefusedError":
            answer["ok"] = None  # another backend may do it; the second round asks
        answer["problem"] = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
    answer["seconds"] = round(time.perf_counter() - start, 3)
    return answer


def _backend(backends: Any, known: set[Any], name: str) -> str:
    """Return which backends the registry chose during the call, in its own memory of choices."""
    chosen = {key: module for key, module in backends._chosen.items() if key not in known}
    used = {module.__name__.removeprefix(backends.__name__ + ".").split(".")[0] for module in chosen.values()}
    return ", ".join(sorted(used))
