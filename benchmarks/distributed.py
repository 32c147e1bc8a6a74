"""What a sharded sequence costs: bytes between ranks counted exactly beside the formula, memory a rank, time as a ratio.

    python benchmarks/distributed.py
    python benchmarks/distributed.py --ranks 1 2 --length 16384 --weak

Every rank is a process with one thread on this machine's CPU, gloo between them. Bytes and memory are the same on any device;
times are not, and with more ranks than cores they say nothing, so they are left out there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from anymamba import ops
from anymamba.distributed import context_parallel, count_traffic
from anymamba.distributed.states import GATHER_UP_TO
from anymamba.measure.bench.memory import peak_bytes

BATCH, WIDTH, FLOAT = 1, 4, 4
DIM, DSTATE = 256, 16  # Mamba-1
HEADS, HEADDIM, GROUPS, DSTATE2 = 4, 64, 1, 64  # Mamba-2
ROUNDS = 5


def states_bytes(elements: int, rank: int, size: int, *, backward: bool) -> tuple[int, int]:
    """Return the bytes that one rank sends and receives to combine parts of this many numbers."""
    place = size - 1 - rank if backward else rank
    if size == 1:
        return 0, 0
    if size <= GATHER_UP_TO:
        return (size - 1) * elements * FLOAT, (size - 1) * elements * FLOAT
    sent, received = int(place + 1 < size), int(place > 0)
    distance = 1
    while distance < size - 1:
        sent += int(place >= 1 and place + distance < size)
        received += int(place - distance >= 1)
        distance *= 2
    return sent * elements * FLOAT, received * elements * FLOAT


def columns_bytes(rank: int, size: int, *, backward: bool) -> tuple[int, int]:
    """Return the bytes that one rank sends and receives of the convolution's columns."""
    one = BATCH * DIM * (WIDTH - 1) * FLOAT
    to_next, to_previous = one * (rank + 1 < size), one * (rank > 0)
    return (to_previous, to_next) if backward else (to_next, to_previous)


ELEMENTS = {
    "selective_scan_fn": BATCH * DIM * (DSTATE + 1),
    "mamba_chunk_scan_combined": BATCH * HEADS * (HEADDIM * DSTATE2 + 1),
}


def formula(name: str, rank: int, size: int, *, backward: bool) -> tuple[int, int]:
    """Return what docs/distributed.md says that a rank sends and receives."""
    if name == "causal_conv1d_fn":
        return columns_bytes(rank, size, backward=backward)
    return states_bytes(ELEMENTS[name], rank, size, backward=backward)


def inputs(name: str, length: int) -> Callable[[], torch.Tensor]:
    """Return the operator's forward on new random tensors of this length."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    if name == "causal_conv1d_fn":
        x, weight = draw(BATCH, DIM, length), draw(DIM, WIDTH)
        return lambda: ops.causal_conv1d_fn(x, weight, activation="silu")
    if name == "selective_scan_fn":
        u, delta, z = (draw(BATCH, DIM, length) for _ in range(3))
        A = (-torch.rand(DIM, DSTATE)).requires_grad_()
        B, C = draw(BATCH, DSTATE, length), draw(BATCH, DSTATE, length)
        return lambda: ops.selective_scan_fn(u, delta, A, B, C, z=z, delta_softplus=True)
    x, z = draw(BATCH, length, HEADS, HEADDIM), draw(BATCH, length, HEADS, HEADDIM)
    dt, A = draw(BATCH, length, HEADS), (-torch.rand(HEADS)).requires_grad_()
    B, C = draw(BATCH, length, GROUPS, DSTATE2), draw(BATCH, length, GROUPS, DSTATE2)
    return lambda: ops.mamba_chunk_scan_combined(x, dt, A, B, C, 64, z=z, dt_softplus=True)


NAMES = ("causal_conv1d_fn", "selective_scan_fn", "mamba_chunk_scan_combined")


def rank_main(rank: int, size: int, file: str, length: int, timed: bool) -> None:
    """Measure as one of the ranks; write the answers beside the file where they meet."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=Path(file).as_uri(), rank=rank, world_size=size)
    answers: dict[str, Any] = {}
    with context_parallel(check="never"):
        for name in NAMES:
            forward = inputs(name, length // size)
            forward().sum().backward()  # compiled and allocated once
            with count_traffic() as ahead:
                out = forward()
            with count_traffic() as back:
                out.sum().backward()
            del out
            answers[name] = {
                "forward": (ahead.sent, ahead.received),
                "backward": (back.sent, back.received),
                "peak": peak_bytes(lambda forward=forward: forward().sum().backward(), torch.device("cpu")),
                "seconds": seconds(lambda forward=forward: forward().sum().backward()) if timed else None,
            }
    Path(f"{file}-{rank}.json").write_text(json.dumps(answers), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def seconds(call: Callable[[], None]) -> float:
    """Return the median time from a common start to this rank's end, the slowest rank's."""
    taken = []
    for _ in range(ROUNDS):
        dist.barrier()
        started = time.perf_counter()
        call()
        slowest = torch.tensor(time.perf_counter() - started)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        taken.append(float(slowest))
    return statistics.median(taken)


def measure(size: int, length: int, *, timed: bool) -> list[dict[str, Any]]:
    """Start the ranks and return what each measured."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "meeting")
        torch.multiprocessing.spawn(rank_main, args=(size, file, length, timed), nprocs=size)
        return [json.loads(Path(f"{file}-{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]


def main() -> int:
    """Print the tables; return 1 if a counted byte differs from the formula."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--length", type=int, default=4096, help="of the whole sequence (default: %(default)s)")
    parser.add_argument("--weak", action="store_true", help="the length is each rank's, and the whole grows with them")
    parser.add_argument("--no-times", action="store_true")
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    kind = "length of each rank's part" if options.weak else "whole length"
    print(f"batch {BATCH}, {kind} {options.length}, float32; dim {DIM}, dstate {DSTATE}, width {WIDTH};")
    print(f"Mamba-2: {HEADS} heads of {HEADDIM}, dstate {DSTATE2}. {cores} cores, one thread a rank.\n")
    print(
        "| operator | ranks | sent a rank, forward | sent a rank, backward | formula | peak a rank | time / one rank |"
    )
    print("|---|---|---|---|---|---|---|")
    wrong = 0
    whole: dict[str, float] = {}
    for size in options.ranks:
        timed = not options.no_times and size <= cores
        ranks = measure(size, options.length * (size if options.weak else 1), timed=timed)
        for name in NAMES:
            agree = all(
                tuple(found[name][key]) == formula(name, rank, size, backward=key == "backward")
                for rank, found in enumerate(ranks)
                for key in ("forward", "backward")
            )
            wrong += not agree
            ahead, back = (max(found[name][key][0] for found in ranks) for key in ("forward", "backward"))
            peak = max(found[name]["peak"] or 0 for found in ranks)
            ratio = "-"
            if timed:
                taken = ranks[0][name]["seconds"]
                whole.setdefault(name, taken if size == 1 else math.nan)
                ratio = f"{taken / whole[name]:.2f}"
            print(
                f"| {name} | {size} | {ahead:,} | {back:,} | {'exactly' if agree else 'DIFFERS'} | {peak / 2**20:.1f} MiB "
                f"| {ratio} |",
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
