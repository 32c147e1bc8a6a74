"""Every kernel once, small, under compute-sanitizer (mem-, race-, init- and synccheck): `python benchmarks/sanitize.py`.

`python benchmarks/sanitize.py --bare` only runs the calls. Each call's result is compared with the reference too. PyTorch's
caching allocator is switched off, so that every tensor is an allocation of its own and an access past its end is seen.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def bare() -> None:
    """Run the kernels and compare."""
    import torch

    from anymamba.ops import (
        causal_conv1d_fn,
        causal_conv1d_update,
        causal_conv1d_varlen_states,
        selective_scan_fn,
        selective_state_update,
    )
    from oracle import assert_matches_reference

    torch.manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64).to("cuda", dtype)

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_()

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
    for shape, dstate in (((2, 40), 16), ((2, 4, 24), 128), ((3, 2, 5), 7)):
        x = draw(*shape)
        matrix = draw(shape[0], 1, dstate) if len(shape) == 3 else draw(shape[0], dstate)
        A = -draw(*shape[1:], dstate, dtype=torch.float32).exp()
        selective_state_update(draw(*shape, dstate), x, x, A, matrix, matrix, None, x, None, True)
        count += 1
    for batch, dim, seqlen, dstate in ((2, 8, 100, 16), (1, 20, 700, 16)):
        u = draw(batch, dim, seqlen)
        matrix = draw(batch, 1, dstate, seqlen)
        arguments = {
            "u": leaf(u), "delta": leaf(draw(batch, dim, seqlen)), "A": leaf(-draw(dim, dstate, dtype=torch.float32).exp()),
            "B": leaf(matrix), "C": leaf(draw(batch, 1, dstate, seqlen)), "D": leaf(draw(dim, dtype=torch.float32)),
            "z": leaf(draw(batch, dim, seqlen)), "delta_bias": leaf(draw(dim, dtype=torch.float32)), "delta_softplus": True,
        }  # fmt: skip
        assert_matches_reference(selective_scan_fn, arguments, backend="cuda", dtype=torch.bfloat16)
        count += 1
    torch.cuda.synchronize()
    print(f"{count} calls match the reference")


def main() -> int:
    if "--bare" in sys.argv:
        bare()
        return 0
    environment = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    failed = 0
    for tool in TOOLS:
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "100000"]
        if tool != "initcheck":
            # Only our kernels are looked at. Not for initcheck: what kernels that are not looked at write counts as unwritten.
            command += ["--kernel-name", "kns=causal_conv1d", "--kernel-name", "kns=selective_"]
        result = subprocess.run(
            [*command, sys.executable, __file__, "--bare"], env=environment, capture_output=True, text=True, check=False
        )
        lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
        ours = [line for line in lines if re.search(r"\bat (causal_conv1d|selective_)", line)]
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
