"""Every kernel once, small, under compute-sanitizer (mem-, race-, init- and synccheck): `python benchmarks/sanitize.py`.

`--bare` only runs the calls; `--only WORD ...` leaves out the families (FAMILIES) whose name has none of the words, `--tools
TOOL ...` the other tools. Each call's result is compared with the reference too. PyTorch's caching allocator is switched off,
so that every tensor is an allocation of its own and an access past its end is seen.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402

from anymamba.backends import use_backend  # noqa: E402
from oracle import OUTPUT_BOUND, assert_matches_reference, relative_error, upcast  # noqa: E402

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def convolution() -> int:
    """Run the convolutions; return how many calls were compared."""
    from anymamba.ops import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states

    count = 0
    for batch, dim, seqlen in ((2, 8, 64), (3, 5, 37), (1, 132, 300)):
        for layout in (0, 1):
            for packed in (False, True):
                x = draw(batch, dim, seqlen) if layout == 0 else draw(batch, seqlen, dim).transpose(1, 2)
                seq_idx = torch.arange(seqlen, device="cuda").div(17, rounding_mode="floor").int().expand(batch, -1)
                arguments = {
                    "x": leaf(x), "weight": leaf(draw(dim, 4)), "bias": leaf(draw(dim)),
                    "seq_idx": seq_idx.contiguous() if packed else None,
                    "initial_states": leaf(draw(batch, dim, 3)) if packed else None,
                    "return_final_states": packed, "activation": "silu",
                }  # fmt: skip
                assert_matches_reference(causal_conv1d_fn, arguments, backend="cuda")
                count += 1
    state, x = draw(3, 40, 4), draw(3, 40)
    causal_conv1d_update(x, state, draw(40, 4), draw(40), "silu")
    causal_conv1d_update(x, state, draw(40, 4), draw(40), "silu", torch.tensor([0, 3, 9], device="cuda"))
    causal_conv1d_varlen_states(draw(20, 33), torch.tensor([0, 3, 20], dtype=torch.int32, device="cuda"), 5)
    return count


def step() -> int:
    """Run decoding steps; 96 and 7 states are no power of two."""
    from anymamba.ops import selective_state_update

    shapes: tuple[tuple[tuple[int, ...], int], ...] = (
        ((2, 40), 16),
        ((2, 4, 24), 128),
        ((3, 2, 5), 7),
        ((3, 2, 9), 96),
    )
    for shape, dstate in shapes:
        for dtype in (torch.bfloat16, torch.float32):
            x = draw(*shape, dtype=dtype)
            matrix = draw(shape[0], 1, dstate, dtype=dtype) if len(shape) == 3 else draw(shape[0], dstate, dtype=dtype)
            A = -draw(*shape[1:], dstate, dtype=torch.float32).exp()
            state = draw(*shape, dstate, dtype=dtype)
            exact = upcast(state).clone()
            out = selective_state_update(state, x, x, A, matrix, matrix, None, x, None, True)
            with use_backend("reference"):
                wanted = selective_state_update(
                    exact, upcast(x), upcast(x), upcast(A), upcast(matrix), upcast(matrix), None, upcast(x), None, True
                )
            assert relative_error(out, wanted) < OUTPUT_BOUND[dtype]
            assert relative_error(state, exact) < OUTPUT_BOUND[dtype]
    return 2 * len(shapes)


def scan() -> int:
    """Run selective scans forward and backward."""
    from anymamba.ops import selective_scan_fn

    for batch, dim, seqlen, dstate in ((2, 8, 100, 16), (1, 20, 700, 16)):
        arguments = {
            "u": leaf(draw(batch, dim, seqlen)), "delta": leaf(draw(batch, dim, seqlen)),
            "A": leaf(-draw(dim, dstate, dtype=torch.float32).exp()), "B": leaf(draw(batch, 1, dstate, seqlen)),
            "C": leaf(draw(batch, 1, dstate, seqlen)), "D": leaf(draw(dim, dtype=torch.float32)),
            "z": leaf(draw(batch, dim, seqlen)), "delta_bias": leaf(draw(dim, dtype=torch.float32)), "delta_softplus": True,
        }  # fmt: skip
        assert_matches_reference(selective_scan_fn, arguments, backend="cuda", dtype=torch.bfloat16)
    return 2


def norms() -> int:
    """Run norms and gates forward and backward: one warp a row and several, aligned and not, all options."""
    from anymamba.ops import layer_norm, swiglu
    from anymamba.ops.layernorm_gated import layernorm_fn

    count = 0
    for rows, dim in ((9, 64), (5, 7), (3, 1032), (700, 2048)):
        for second in (False, True):
            x, weight = draw(rows, dim), draw(dim, dtype=torch.float32)
            arguments: dict[str, Any] = {
                "x": leaf(x),
                "weight": leaf(weight),
                "bias": None,
                "residual": leaf(x.float()),
            }
            if second:
                arguments |= {
                    "bias": leaf(weight), "x1": leaf(x), "weight1": leaf(weight), "bias1": leaf(weight),
                    "dropout_p": 0.3,
                }  # fmt: skip
            arguments |= {"prenorm": True, "is_rms_norm": not second}

            with mock.patch.object(layer_norm, "_keep", same_masks):
                assert_matches_reference(layer_norm.layer_norm_fn, arguments, backend="cuda")
            gated = {
                "x": leaf(torch.cat([x, x], 1)), "weight": leaf(torch.cat([weight, weight])),
                "bias": leaf(torch.cat([weight, weight])) if second else None, "z": leaf(draw(rows, 2 * dim)),
                "group_size": dim, "norm_before_gate": second, "is_rms_norm": not second,
            }  # fmt: skip
            assert_matches_reference(layernorm_fn, gated, backend="cuda")
            count += 2
        assert_matches_reference(swiglu, {"xy": leaf(draw(rows, 2 * dim))}, backend="cuda")
        count += 1
    return count


def same_masks(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Draw dropout's masks the same on every device: the reference runs on the CPU."""
    return (torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) >= dropout_p).to(x.device)


def dual_scan() -> int:
    """Run the state-space dual scan forward and backward: split heads, uneven ends, changing sequences, odd strides."""
    from anymamba.ops import mamba_chunk_scan_combined

    count = 0
    for dtype, heads, groups, headdim, dstate in (
        (torch.bfloat16, 4, 1, 64, 128), (torch.float32, 2, 2, 13, 20), (torch.float16, 2, 1, 32, 64),
    ):  # fmt: skip
        arguments = {
            "x": leaf(draw(2, 150, heads, headdim, dtype=dtype)), "dt": leaf(draw(2, 150, heads, dtype=dtype)),
            "A": leaf(-draw(heads, dtype=torch.float32).abs()), "B": leaf(draw(2, 150, groups, dstate, dtype=dtype)),
            "C": leaf(draw(2, 150, groups, dstate, dtype=dtype)), "chunk_size": 256,
            "D": leaf(draw(heads, dtype=torch.float32)),
            "dt_bias": leaf(draw(heads, dtype=torch.float32)), "dt_softplus": True,
            "initial_states": leaf(draw(2, heads, headdim, dstate, dtype=torch.float32)),
            "seq_idx": torch.arange(150, device="cuda").div(70, rounding_mode="floor").int().expand(2, -1)
            if dtype == torch.float32 else None, "return_final_states": True,
        }  # fmt: skip
        bound = None if dtype == torch.float32 else 0.06  # of A's gradient: see the tests of the backward kernels
        assert_matches_reference(mamba_chunk_scan_combined, arguments, backend="cuda", gradient_bound=bound)
        count += 1
    return count


FAMILIES: dict[str, tuple[Callable[[], int], str]] = {
    "convolution": (convolution, "causal_conv1d"),
    "step": (step, "selective_state"),
    "scan": (scan, "selective_scan"),
    "ssd": (dual_scan, "ssd_"),
    "norms": (norms, "layer_norm layernorm_gated norm_sum_parts swiglu"),
}
"""Of each family: what runs it, and what the names of its kernels begin with."""


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).to("cuda", dtype)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def bare(families: Sequence[str]) -> None:
    """Run the kernels and compare."""
    torch.manual_seed(0)
    count = sum(FAMILIES[family][0]() for family in families)
    torch.cuda.synchronize()
    print(f"{count} calls match the reference")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=TOOLS)
    options = parser.parse_args()
    families = [name for name in FAMILIES if not options.only or any(word in name for word in options.only)]
    if options.bare:
        bare(families)
        return 0
    environment = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    kernels = [kernel for family in families for kernel in FAMILIES[family][1].split()]
    failed = 0
    for tool in options.tools:
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "100000"]
        if tool != "initcheck":
            # Only our kernels are looked at. Not for initcheck: what kernels that are not looked at write counts as unwritten.
            command += [part for kernel in kernels for part in ("--kernel-name", f"kns={kernel}")]
        result = subprocess.run(
            [*command, sys.executable, __file__, "--bare", "--only", *families],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
        ours = [line for line in lines if re.search(rf"\bat ({'|'.join(kernels)})", line)]
        bad = (
            bool(ours) or (tool != "initcheck" and result.returncode != 0) or not any("match" in line for line in lines)
        )
        print(f"{tool}: {'FAILED' if bad else 'clean'}; {len(ours)} reports of our kernels; {lines[-1]}", flush=True)
        if bad:
            print("\n".join(ours[:20] or lines[:40]), flush=True)
        failed += bad
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
