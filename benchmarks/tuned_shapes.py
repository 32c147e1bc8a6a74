"""Calls of sizes away from those the default parameters were chosen for: `anymamba tune --record benchmarks/tuned_shapes.py`.

Few channels and a long sequence, an odd number of channels, 64 states, a wide batch of decoding steps. On a CPU smaller ones.
"""

from __future__ import annotations

import torch

from anymamba.backends import use_backend
from anymamba.measure.cases import Draw, causal_conv1d, selective_scan, selective_state_update, ssd
from anymamba.measure.tune.works import backend_for
from anymamba.ops import causal_conv1d_fn, causal_conv1d_update, mamba_chunk_scan_combined, selective_scan_fn
from anymamba.ops import selective_state_update as state_update

CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CARD else "cpu")
LONG, MIDDLE = (65536, 1000) if CARD else (2048, 100)
BATCH = 256 if CARD else 16


def main() -> None:
    """Make each call once, forward and backward."""
    draw = Draw(torch.bfloat16 if CARD else torch.float32, DEVICE)
    for batch, dim, states, length in ((1, 64, 16, LONG), (2, 1000, 64, MIDDLE)):
        _both(selective_scan_fn, selective_scan.mamba(draw, batch, dim, states, length) | {"return_last_state": False})
    _both(causal_conv1d_fn, causal_conv1d.mamba(draw, 1, 64, 4 * LONG))
    _both(mamba_chunk_scan_combined, ssd.mamba2(draw, 1, LONG // 8, 3, 64, 64), backward=False)
    _step(state_update, selective_state_update.mamba(draw, BATCH, 1000, 64))
    _step(causal_conv1d_update, causal_conv1d.step(draw, BATCH, 1000))


def _both(operator, arguments, backward: bool = True) -> None:  # type: ignore[no-untyped-def]
    if not backward:
        arguments = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    out = operator(**arguments)
    if backward:
        out.backward(torch.randn_like(out))


def _step(operator, arguments) -> None:  # type: ignore[no-untyped-def]
    with torch.no_grad():
        operator(**arguments)


if __name__ == "__main__":
    with use_backend(backend_for(DEVICE) or "torch"):
        main()
