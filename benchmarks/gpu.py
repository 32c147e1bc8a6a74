"""One command for the numbers on a GPU: `python benchmarks/gpu.py [--upstream DIR] [--output FILE] [--only WORD ...]`.

Checks every operator against the float64 reference first, then measures its rows (`benchmarks/rows/`, one module a family
with a function `rows(upstream, quick=)`) beside upstream's own extensions, if DIR holds them built for this card, in one
process. Prints a table and writes JSON with the hardware, the versions and the date.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402

from benchmarks import measure  # noqa: E402
from benchmarks import rows as families  # noqa: E402
from benchmarks.measure import Row, copy_bandwidth, save, table  # noqa: E402

# Which of upstream's modules a family is compared with.
THEIRS = {
    "causal_conv1d": "causal_conv1d",
    "selective_scan": "mamba_ssm.ops.selective_scan_interface",
    "mamba_block": "mamba_ssm.ops.selective_scan_interface",
    "norms": "mamba_ssm.ops.triton.layer_norm",
    "ssd": "mamba_ssm.ops.triton.ssd_combined",
    "mamba2_block": "mamba_ssm.ops.triton.ssd_combined",
    "mamba2_step": "mamba_ssm.ops.triton.selective_state_update",
    "selective_state_update": "mamba_ssm.ops.triton.selective_state_update",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", type=Path, help="folder with upstream's packages built for this card")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--only", nargs="*", default=[], help="families whose name contains one of these")
    parser.add_argument("--quick", action="store_true", help="bf16 only")
    parser.add_argument("--forward", action="store_true", help="no backward, for families that can leave it out")
    options = parser.parse_args()
    if options.forward:
        measure.DIRECTIONS = ("fwd",)
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 3
    if options.upstream:
        sys.path.insert(1, str(options.upstream))
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    cold = {"first_call_s": _first_call()}
    measured: list[Row] = []
    for found in sorted(pkgutil.iter_modules(families.__path__), key=lambda module: module.name):
        if options.only and not any(word in found.name for word in options.only):
            continue
        module = importlib.import_module(f"{families.__name__}.{found.name}")
        started = time.perf_counter()
        measured += list(module.rows(_theirs(found.name) if options.upstream else None, quick=options.quick))
        print(f"# {found.name}: {time.perf_counter() - started:.1f} s", flush=True)
    print(f"# copy {bandwidth / 1e12:.3f} TB/s; first call {cold['first_call_s']:.3f} s")
    print("# win: eager and graph; + our slowest round beats their fastest, - the reverse, = neither")
    print(table(measured, bandwidth))
    if options.output:
        save(options.output, measured, {"copy_bytes_per_second": bandwidth, **cold})
    return 0


def _first_call() -> float:
    """Return how long the first convolution of this process takes: library, compile or disk cache, load, launch."""
    from anymamba.ops import causal_conv1d_fn

    x, weight = torch.randn(1, 64, 128, device="cuda"), torch.randn(64, 4, device="cuda")
    torch.cuda.synchronize()
    started = time.perf_counter()
    causal_conv1d_fn(x, weight, activation="silu")
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _theirs(family: str) -> Any:
    name = THEIRS.get(family)
    try:
        return importlib.import_module(name) if name else None
    except ImportError as error:
        print(f"# no upstream for {family}: {error}")
        return None


if __name__ == "__main__":
    sys.exit(main())
