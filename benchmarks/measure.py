"""How the GPU benchmarks measure: rotated inputs, device events, rounds that alternate between ours and theirs.

`time_rounds` gives, for each candidate, the median of every round; a win counts if our slowest round beats their fastest.
Two ways: eager (what a caller waits for; launch overhead included) and graph (a CUDA graph of many calls: the kernels alone).
"""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROUNDS = 5
CALLS = 12
DIRECTIONS = ("fwd", "fwd+bwd")  # what of them families measure that can leave one out
CACHE_BYTES = 200 * 2**20  # several times the L2 of any card: what is read was not read a moment ago


@dataclass
class Candidate:
    """One implementation: `call(i)` runs it on input set number i."""

    name: str
    call: Callable[[int], Any]


@dataclass
class Row:
    """One line of the results; times in milliseconds."""

    operator: str
    shape: str
    dtype: str
    direction: str
    floor_bytes: float = 0.0
    eager: dict[str, list[float]] = field(default_factory=dict)
    graph: dict[str, list[float]] = field(default_factory=dict)
    peak_mb: dict[str, float] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    note: str = ""


def sets_for(byte_count: float) -> int:
    """Return how many input sets of this size to rotate among."""
    return int(min(24, max(2, -(-CACHE_BYTES // max(byte_count, 1)))))


def measure(row: Row, candidates: Sequence[Candidate], sets: int, *, graph: bool = True) -> Row:
    """Fill in the row's times and peak memory."""
    for candidate in candidates:
        for i in range(sets + 2):
            candidate.call(i % sets)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = candidate.call(0)
        torch.cuda.synchronize()
        row.peak_mb[candidate.name] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 2)
        del kept
    row.eager = time_rounds(candidates, lambda candidate: _eager(candidate, sets))
    if graph:
        graphs = {candidate.name: _captured(candidate, sets) for candidate in candidates}
        row.graph = time_rounds(candidates, lambda candidate: _replayed(*graphs[candidate.name]))
    return row


def time_rounds(candidates: Sequence[Candidate], run: Callable[[Candidate], float]) -> dict[str, list[float]]:
    """Return each candidate's times, one a round, rounds interleaved."""
    times: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for _ in range(ROUNDS):
        for candidate in candidates:
            times[candidate.name].append(round(run(candidate), 5))
    return times


def _eager(candidate: Candidate, sets: int) -> float:
    spans = []
    for i in range(CALLS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        candidate.call(i % sets)
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in spans)


def _captured(candidate: Candidate, sets: int) -> tuple[torch.cuda.CUDAGraph, int]:
    graph, calls = torch.cuda.CUDAGraph(), max(sets, 8)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        candidate.call(0)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for i in range(calls):
            candidate.call(i % sets)
    return graph, calls


def _replayed(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(3):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / (3 * calls)


def copy_bandwidth() -> float:
    """Return what a large device-to-device copy moves, bytes read and written, in bytes a second."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    candidate = Candidate("copy", lambda _: target.copy_(source))
    candidate.call(0)
    best = min(_eager(candidate, 1) for _ in range(3))
    return 2 * source.numel() * 4 / (best * 1e-3)


def machine() -> dict[str, Any]:
    """Return what the numbers depend on."""
    properties = torch.cuda.get_device_properties(0)
    facts: dict[str, Any] = {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.platform(),
        "date": time.strftime("%Y-%m-%d"),
    }
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, check=True, timeout=20,
        )  # fmt: skip
        facts["driver"] = answer.stdout.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        facts["driver"] = "unknown"
    for package in ("triton", "causal_conv1d", "mamba_ssm"):
        try:
            facts[package] = __import__(package).__version__
        except Exception:
            facts[package] = None
    return facts


def save(path: Path, rows: Sequence[Row], extra: dict[str, Any]) -> None:
    """Write everything as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine(), **extra, "rows": [asdict(row) for row in rows]}
    with path.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.write("\n")


def table(rows: Sequence[Row], bandwidth: float) -> str:
    """Return the rows as text, a line each: our time, theirs, the ratio, the share of the floor."""
    lines = [f"{'operator':26} {'shape':22} {'dtype':9} {'dir':8} {'eager':>9} {'theirs':>9} {'ratio':>6}"
             f" {'graph':>9} {'theirs':>9} {'ratio':>6} {'floor':>6} {'win':>4} {'mem':>5}"]  # fmt: skip
    for row in rows:
        cells = [f"{row.operator:26} {row.shape:22} {row.dtype:9} {row.direction:8}"]
        win = ""
        for times in (row.eager, row.graph):
            ours, theirs = times.get("anymamba"), times.get("upstream")
            cells.append(f"{median(ours):9.4f}" if ours else " " * 9)
            cells.append(f"{median(theirs):9.4f}" if theirs else " " * 9)
            cells.append(f"{median(ours) / median(theirs):6.2f}" if ours and theirs else " " * 6)
            if ours and theirs:
                win += "+" if max(ours) < min(theirs) else "-" if min(ours) > max(theirs) else "="
        best = row.graph.get("anymamba") or row.eager.get("anymamba")
        floor = row.floor_bytes / bandwidth * 1e3
        cells.append(f"{floor / median(best):6.2f}" if best and floor else " " * 6)
        memory = row.peak_mb
        ratio = f"{memory['anymamba'] / memory['upstream']:5.2f}" if memory.get("upstream") else ""
        lines.append(" ".join([*cells, f"{win:>4}", f"{ratio:>5}", row.note]))
    return "\n".join(lines)
