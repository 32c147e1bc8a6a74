"""One command for the numbers on a CPU: beside upstream's own loops, mamba.py and transformers' PyTorch path, in one process.

    python benchmarks/cpu.py --upstream ~/mamba --upstream ~/causal-conv1d
    python benchmarks/cpu.py --peers ~/venv/bin/python --only scan --output scan.json

Runs in an environment that holds the peers: one that it makes itself (cpu_environment.py), or the Python that is named with
--peers (which needs PyTorch, numba and what else anymamba needs, too). Rows: those of cpu_reference.py, one decoding step of a
layer, whole Mamba and Mamba2 blocks beside the time of their projections alone; forward, and training (forward and backward);
peak memory (of PyTorch's allocator, in one call); all threads beside one; the first call of a process, with nothing compiled
yet and with what was compiled before. Prints tables and writes JSON, which summarise.py reads. About five minutes.

No test: times are for people to read.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from anymamba import __version__  # noqa: E402
from anymamba.machine.system import processor_name  # noqa: E402
from anymamba.measure.bench import blocks  # noqa: E402
from anymamba.measure.bench.memory import peak_bytes  # noqa: E402
from anymamba.measure.cases import Draw  # noqa: E402
from benchmarks import cpu_peers  # noqa: E402
from benchmarks.cpu_environment import python_with_peers  # noqa: E402
from benchmarks.cpu_reference import (  # noqa: E402
    FAMILIES,
    Subject,
    accepted,
    candidates,
    measure,
    medians,
    once,
    show,
    upstream_function,
)

SCHEMA = "anymamba-cpu/1"
WIDTH, LENGTH = 768, 1024
SLOW = 4.0  # seconds: what takes longer is not run once more for its memory

# What issue 7 of the project asks of two cores, in milliseconds.
TARGETS = {
    ("selective_scan", "(1, 1536, 2048, 16)", "forward"): 45,
    ("selective_scan", "(1, 256, 256, 16)", "forward + backward"): 8,
    ("causal_conv1d", "(1, 1536, 2048), width 4", "forward"): 9,
    ("ssd", "(1, 1024, 24, 64, 128)", "forward"): 30,
    ("ssd", "(1, 1024, 24, 64, 128)", "forward + backward"): 100,
    ("decoding step", "d_model 768", "forward"): 0.15,
}
# Measured on one thread and on all; by the passes that are.
SCALED = {
    ("selective_scan", "(1, 1536, 2048, 16)"),
    ("selective_scan", "(1, 256, 256, 16)"),
    ("causal_conv1d", "(1, 1536, 2048), width 4"),
    ("ssd", "(1, 1024, 24, 64, 128)"),
    ("Mamba block", f"(1, {LENGTH}, {WIDTH})"),
    ("Mamba2 block", f"(1, {LENGTH}, {WIDTH})"),
}

# Not measured, and why.
HOPELESS = {
    ("Mamba block", "forward + backward"): {
        "transformers": f"minutes: autograd through {LENGTH} steps, each with a gradient of the whole sequence"
    }
}

FIRST_CALLS = {
    "selective_scan, forward": "f(*s, torch.randn(64))",
    "selective_scan, training": "f(*s, torch.randn(64)).sum().backward()",
    "causal_conv1d, training": "c(s[0], torch.randn(64, 4), torch.randn(64), activation='silu').sum().backward()",
    "decoding step": "cu(torch.randn(1, 64), torch.zeros(1, 64, 4), torch.randn(64, 4), torch.randn(64), 'silu'); "
    "su(torch.zeros(1, 64, 16), *torch.randn(2, 1, 64), -torch.rand(64, 16), *torch.randn(2, 1, 16), torch.randn(64))",
}
FIRST_CALL = """
import time, torch
from anymamba.ops import selective_scan_fn as f, causal_conv1d_fn as c, causal_conv1d_update as cu
from anymamba.ops import selective_state_update as su
s = [torch.randn(1, 64, 32, requires_grad=True), torch.rand(1, 64, 32), -torch.rand(64, 16), *torch.randn(2, 1, 16, 32)]
torch.randn(64, 64) @ torch.randn(64, 64)
start = time.perf_counter()
{call}
print(time.perf_counter() - start)
"""


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", metavar="PYTHON", type=Path, help="a Python that has the peers (else one is made)")
    parser.add_argument(
        "--upstream", metavar="DIR", type=Path, action="append", default=[], help="an upstream checkout"
    )
    parser.add_argument("--only", choices=[*FAMILIES, "step", "block", "first"], action="append", help="only this")
    parser.add_argument("--rounds", type=int, default=30, help="at most this many rounds a row (default 30)")
    parser.add_argument("--seconds", type=float, default=3.0, help="about this long a row (default 3)")
    parser.add_argument("--threads", type=int, help="PyTorch's threads (default: its own choice)")
    parser.add_argument("--output", metavar="FILE", type=Path, default=ROOT / "benchmarks" / "results" / "cpu.json")
    parser.add_argument("--here", action="store_true", help="run in this Python, with the peers that it has")
    options = parser.parse_args()
    if not options.here:
        python = options.peers or python_with_peers()
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.run(
            [str(python), str(Path(__file__).resolve()), "--here", *sys.argv[1:]],
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
            check=False,
        ).returncode
    if options.threads:
        torch.set_num_threads(options.threads)
    started, busy = time.perf_counter(), load()
    if busy is not None and busy > 0.5:
        print(
            f"The machine is busy (load {busy:.1f} before the start): times on several threads say little.",
            file=sys.stderr,
        )
    rows: list[dict[str, Any]] = []
    scaling: list[dict[str, Any]] = []
    peers = cpu_peers.operators()
    wanted = options.only or [*FAMILIES, "step", "block", "first"]
    for subject, others in subjects(wanted, peers, options.upstream):
        print(f"{subject.name} {subject.size} ...", file=sys.stderr, flush=True)
        found = list(measure(subject, options.upstream, options.rounds, options.seconds, others, HOPELESS))
        for row in found:
            row["peak_mb"] = memory(subject, row, options.upstream, others)
            target = TARGETS.get((row["operator"], row["size"], row["pass"]))
            if target is not None:
                row["target_ms"] = target
        rows += found
        if (subject.name, subject.size) in SCALED:
            scaling += threads(subject, found)
    first = first_calls() if "first" in wanted else []
    about = {
        "schema": SCHEMA,
        "anymamba": __version__,
        "torch": torch.__version__,
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
        "load_before": busy,
        "peers": cpu_peers.versions(),
        "rows": rows,
        "scaling": scaling,
        "first_call": first,
    }
    print(
        f"anymamba {__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads, {processor_name()}; float32"
    )
    print("median ms, and times faster than upstream's loop (or ours)")
    show(rows)
    for row in rows:
        if "target_ms" in row and "cpu" in row["milliseconds"]:
            value = row["milliseconds"]["cpu"]
            kept = "kept" if value <= row["target_ms"] else "MISSED"
            print(
                f"target {row['target_ms']} ms {kept}: {row['operator']} {row['size']}, {row['pass']}: {value:.2f} ms"
            )
    for entry in scaling:
        print(
            f"1 -> {entry['threads']} threads: {entry['ratio']:.2f}x  {entry['operator']} {entry['size']}, {entry['pass']}"
        )
    for entry in first:
        print(f"first call: {entry['cold_s']:.2f} s, later processes {entry['warm_s']:.2f} s  {entry['operator']}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8", newline="\n")
    print(f"written: {options.output} ({time.perf_counter() - started:.0f} s)")
    return 0


def load() -> float | None:
    """Return how many processes wanted a core on average during the last minute, None where the system does not say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def subjects(
    wanted: list[str], peers: dict[str, dict[str, Callable[..., Any]]], checkouts: list[Path]
) -> Iterator[tuple[Subject, dict[str, Callable[..., Any]]]]:
    """Yield what is measured, with what it is measured beside."""
    for family in wanted:
        if family in FAMILIES:
            for subject in FAMILIES[family]():
                yield subject, peers.get(subject.name, {})
        elif family == "step":
            yield step_subject(checkouts), peers_step(peers)
        elif family == "block":
            yield from block_subjects(checkouts)


def step_subject(checkouts: list[Path]) -> Subject:
    """One token of a Mamba layer: the convolution's step and the state's, without the projections around them."""
    from anymamba.ops import causal_conv1d_update, selective_state_update

    def arguments() -> dict[str, Any]:
        (update,) = (subject for subject in FAMILIES["conv"]() if subject.name == "causal_conv1d_update")
        state = next(FAMILIES["update"]())
        return {"convolution": update.arguments(), "state": state.arguments()}

    def ours(convolution: dict[str, Any], state: dict[str, Any]) -> Any:
        causal_conv1d_update(**convolution)
        return selective_state_update(**state)

    folder = "mamba_ssm/ops/triton/selective_state_update.py"
    convolve = upstream_function("causal_conv1d/causal_conv1d_interface.py", "causal_conv1d_update_ref", checkouts)
    update = upstream_function(folder, "selective_state_update_ref", checkouts)

    def loop(convolution: dict[str, Any], state: dict[str, Any]) -> Any:
        if convolve is None or update is None:
            raise NotImplementedError("no checkout of upstream was given")
        convolve(**accepted(convolve, convolution))
        return update(**accepted(update, state))

    return Subject("decoding step", f"d_model {WIDTH}", arguments, ours, loop, differentiable=False)


def peers_step(peers: dict[str, dict[str, Callable[..., Any]]]) -> dict[str, Callable[..., Any]]:
    """Return each peer's decoding step, made of its two."""

    def both(name: str, convolution: dict[str, Any], state: dict[str, Any]) -> Any:
        peers["causal_conv1d_update"][name](**convolution)
        return peers["selective_state_update"][name](**state)

    names = peers.get("causal_conv1d_update", {}).keys() & peers.get("selective_state_update", {}).keys()
    return {name: functools.partial(both, name) for name in names}


def block_subjects(checkouts: list[Path]) -> Iterator[tuple[Subject, dict[str, Callable[..., Any]]]]:
    """Whole blocks: ours on plain weights, the peers' modules, and the projections (of the same sizes) alone."""
    from anymamba.ops import mamba_inner_fn
    from anymamba.ops.mamba_split_conv1d_scan import mamba_split_conv1d_scan_combined

    size, dim = f"(1, {LENGTH}, {WIDTH})", 2 * WIDTH
    rank, heads = -(-WIDTH // 16), dim // blocks.HEADDIM
    kinds: tuple[Any, ...] = (
        (
            "Mamba block",
            blocks.mamba_arguments,
            blocks.mamba_block(mamba_inner_fn),
            blocks.mamba_block(upstream_inner(checkouts)),
            [(WIDTH, 2 * dim), (dim, rank + 2 * blocks.DSTATE), (rank, dim), (dim, WIDTH)],
        ),
        (
            "Mamba2 block",
            blocks.mamba2_arguments,
            blocks.mamba2_block(mamba_split_conv1d_scan_combined),
            None,
            [(WIDTH, 2 * dim + 2 * blocks.DSTATE2 + heads), (dim, WIDTH)],
        ),
    )
    modules = cpu_peers.blocks(WIDTH)
    for name, draw, ours, loop, matrices in kinds:
        others: dict[str, Callable[..., Any]] = {"projections alone": projections(matrices)}
        others |= {peer: with_module(module.train()) for peer, module in modules[name].items()}
        arguments = functools.partial(draw, Draw(torch.float32, torch.device("cpu")), 1, LENGTH, WIDTH)
        yield Subject(name, size, arguments, ours, loop or missing, loop_trains=False), others


def missing(**_: Any) -> None:
    """Stand where there is no loop."""
    raise NotImplementedError("upstream has no block of this kind without its kernels")


def projections(sizes: list[tuple[int, int]]) -> Callable[..., torch.Tensor]:
    """Return a function that does a block's matrix products (in, out) and nothing between them."""
    inputs = [torch.randn(LENGTH, columns, requires_grad=True) for columns, _ in sizes]
    weights = [(torch.randn(rows, columns) / math.sqrt(columns)).requires_grad_() for columns, rows in sizes]

    def run(**_: Any) -> Any:
        outputs = tuple(F.linear(x, weight) for x, weight in zip(inputs, weights))
        return Trained(outputs, [*inputs, *weights]) if torch.is_grad_enabled() else outputs

    return run


class Trained(tuple[Any, ...]):
    """Outputs with the leaves that they are to be differentiated by, where those are no arguments."""

    leaves: list[torch.Tensor]

    def __new__(cls, outputs: tuple[Any, ...], leaves: list[torch.Tensor]) -> Trained:
        made = super().__new__(cls, outputs)
        made.leaves = leaves
        return made


def with_module(module: torch.nn.Module) -> Callable[..., Any]:
    """Return a function of our arguments that runs a peer's module on our input."""

    def run(hidden: torch.Tensor, **_: Any) -> Any:
        out = module(hidden)
        return Trained((out,), [hidden, *module.parameters()]) if torch.is_grad_enabled() else out

    return run


def upstream_inner(checkouts: list[Path]) -> Callable[..., torch.Tensor]:
    """Return what upstream's block does without its kernels, from its own reference functions."""
    convolve = upstream_function("causal_conv1d/causal_conv1d_interface.py", "causal_conv1d_ref", checkouts)
    scan = upstream_function("mamba_ssm/ops/selective_scan_interface.py", "selective_scan_ref", checkouts)

    def inner(
        xz: torch.Tensor, conv_weight: torch.Tensor, conv_bias: torch.Tensor, x_proj: torch.Tensor,
        delta_proj: torch.Tensor, out_proj: torch.Tensor, _out_bias: None, A: torch.Tensor, _B: None, _C: None,
        D: torch.Tensor, delta_bias: torch.Tensor, delta_softplus: bool,
    ) -> torch.Tensor:  # fmt: skip
        if convolve is None or scan is None:
            raise NotImplementedError("no checkout of upstream was given")
        x, z = xz.chunk(2, dim=1)
        x = convolve(x, conv_weight.squeeze(1), conv_bias, activation="silu")
        delta, B, C = F.linear(x.transpose(1, 2), x_proj).split([delta_proj.shape[1], A.shape[1], A.shape[1]], dim=-1)
        delta = F.linear(delta, delta_proj).transpose(1, 2)
        y = scan(x, delta, A, B.transpose(1, 2), C.transpose(1, 2), D, z, delta_bias, delta_softplus)
        return F.linear(y.transpose(1, 2), out_proj)

    return inner


def memory(
    subject: Subject, row: dict[str, Any], checkouts: list[Path], others: dict[str, Callable[..., Any]]
) -> dict[str, float]:
    """Return the peak MB of one call of each candidate that is not too slow to run once more."""
    torch.manual_seed(0)
    runs = candidates(subject, subject.arguments(), "backward" in row["pass"], checkouts, others)
    found = {}
    for name, milliseconds in row["milliseconds"].items():
        peak = peak_bytes(runs[name], torch.device("cpu")) if milliseconds < 1000 * SLOW else None
        if peak is not None:
            found[name] = round(peak / 2**20, 2)
    return found


def threads(subject: Subject, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield how much faster our backend is on all threads than on one, for each pass that was measured."""
    many = torch.get_num_threads()
    arguments = subject.arguments()
    for row in rows:
        backward = "backward" in row["pass"]

        def run(count: int, backward: bool = backward) -> None:
            torch.set_num_threads(count)
            once(subject.ours, arguments, backward)

        found, _, _ = medians({"one": lambda r=run: r(1), "all": lambda r=run: r(many)}, 30, 1.5)
        torch.set_num_threads(many)
        yield {
            "operator": row["operator"], "size": row["size"], "pass": row["pass"], "threads": many,
            "one_ms": round(found["one"], 3), "all_ms": round(found["all"], 3),
            "ratio": round(found["one"] / found["all"], 3),
        }  # fmt: skip


def first_calls() -> list[dict[str, Any]]:
    """Return the seconds of the first call in a process, with an empty cache of compiled kernels and with a full one."""
    rows = []
    for name, call in FIRST_CALLS.items():
        print(f"first call: {name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
            seconds = []
            for _ in range(2):
                done = subprocess.run(
                    [sys.executable, "-c", FIRST_CALL.format(call=call)],
                    env={**os.environ, "ANYMAMBA_CACHE_DIR": cache}, check=True, capture_output=True, text=True,
                )  # fmt: skip
                seconds.append(round(float(done.stdout), 3))
        rows.append({"operator": name, "cold_s": seconds[0], "warm_s": seconds[1]})
    return rows


if __name__ == "__main__":
    sys.exit(main())
