"""What one launch costs the caller, beside Triton and cuda.core: `python benchmarks/launch.py`. Microseconds, host time.

The same work for all: 7 pointers and 4 integers (ours also 21 strides in its struct), one small block, nothing waited for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import get_ident

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402


def per_call(call: Callable[[], object], calls: int = 500, rounds: int = 40) -> float:
    """Return the best round's microseconds a call; a round fits the launch queue, so the card's time does not count."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - started) / calls)
    torch.cuda.synchronize()
    return best * 1e6


def ours() -> dict[str, float]:
    from anymamba.backends.cuda import causal_conv1d as backend
    from anymamba.ops import causal_conv1d_fn, causal_conv1d_update

    x, state = torch.randn(1, 64, 1, device="cuda"), torch.zeros(1, 64, 4, device="cuda")
    weight, bias, out = (
        torch.randn(64, 4, device="cuda"),
        torch.randn(64, device="cuda"),
        torch.empty(1, 64, 1, device="cuda"),
    )
    key = backend._key
    plan = backend._update_plan(key(x), key(state), key(weight), key(bias), None, None, out.stride(), True, 0)
    pointers = (x.data_ptr(), state.data_ptr(), weight.data_ptr(), bias.data_ptr(), 0, 0, out.data_ptr())
    plan(*pointers)
    kernel, parameters = plan.kernel, bytes(plan._slots[get_ident()][0])
    row = x[..., 0]
    leaf, w = torch.randn(1, 64, 8, device="cuda", requires_grad=True), weight.clone().requires_grad_()
    return {
        "Plan (pointers packed, launched)": per_call(lambda: plan(*pointers)),
        "Kernel.launch (packed parameters)": per_call(lambda: kernel.launch(plan.grid, plan.block, 0, parameters)),
        "backend causal_conv1d_update": per_call(
            lambda: backend.causal_conv1d_update(x, state, weight, bias, True, None, None)
        ),
        "anymamba.ops.causal_conv1d_update": per_call(lambda: causal_conv1d_update(row, state, weight, bias, "silu")),
        "anymamba.ops.causal_conv1d_fn, no grad": per_call(lambda: causal_conv1d_fn(leaf.detach(), weight, bias)),
        "anymamba.ops.causal_conv1d_fn, forward under autograd": per_call(lambda: causal_conv1d_fn(leaf, w, bias)),
        "torch.add(out=)": per_call(lambda: torch.add(out, out, out=out)),
        "torch.empty_like": per_call(lambda: torch.empty_like(out)),
    }


def triton() -> dict[str, float]:
    import triton as t
    import triton.language as tl

    @t.jit
    def scale(a, b, c, d, e, f, out, n, m, k, o, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(a + i, mask=i < n) + m, mask=i < n)

    tensors = [torch.randn(64, device="cuda") for _ in range(7)]
    return {"Triton": per_call(lambda: scale[(1,)](*tensors, 64, 1, 2, 3, BLOCK=64))}


def cuda_core() -> dict[str, float]:
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

    device = Device(0)
    device.set_current()
    code = """extern "C" __global__ void scale(const float* a, const float* b, const float* c, const float* d, const float* e,
        const float* f, float* out, int n, int m, int k, int o) {
        if (threadIdx.x < n) out[threadIdx.x] = a[threadIdx.x] + m;
    }"""
    options = ProgramOptions(arch=f"sm_{device.arch}")
    kernel = Program(code, code_type="c++", options=options).compile("cubin").get_kernel("scale")
    stream, config = device.create_stream(), LaunchConfig(grid=1, block=64)
    tensors = [torch.randn(64, device="cuda") for _ in range(7)]
    import ctypes

    integers = [ctypes.c_int(v) for v in (64, 1, 2, 3)]
    return {"cuda.core": per_call(lambda: launch(stream, config, kernel, *[t.data_ptr() for t in tensors], *integers))}


if __name__ == "__main__":
    for family in (ours, triton, cuda_core):
        try:
            for name, value in family().items():
                print(f"{value:8.2f} us  {name}", flush=True)
        except Exception as error:
            print(f"    --       {family.__name__}: {type(error).__name__}: {error}", flush=True)
