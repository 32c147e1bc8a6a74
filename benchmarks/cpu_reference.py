"""How much faster than the reference loop is each backend? Medians of interleaved rounds on this machine.

    python benchmarks/cpu_reference.py
    python benchmarks/cpu_reference.py --upstream ~/mamba --upstream ~/causal-conv1d --only scan

The reference loop is the formula as upstream writes it in PyTorch (its `_ref` functions), differentiated by autograd:
upstream's own text where an installed package or a checkout (--upstream) has it, else ours. Every backend that runs here is
measured against it, forward alone and forward with backward. A ratio above 1 is faster than the loop.

No test: times are for people to read.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from anymamba import __version__, backends
from anymamba.errors import AnymambaError

SCHEMA = "anymamba-cpu-reference/1"
PASSES = ("forward", "forward + backward")
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """An operator at a size: ours, and the loop it is compared with; all take the same arguments by name."""

    name: str
    size: str
    arguments: Callable[[], Arguments]
    ours: Callable[..., Any]
    loop: Callable[..., Any]
    upstream: tuple[str, str] | None = None  # (file inside a checkout, function)
    differentiable: bool = True
    loop_trains: bool = True  # False: autograd through our own loop would take minutes


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Return normal numbers that require grad."""
    return (torch.randn(*shape) * scale).requires_grad_()


def decay(*shape: int) -> torch.Tensor:
    """Return negative rates as a trained model has them."""
    return (-torch.rand(*shape) * 4 - 0.5).requires_grad_()


def scan_subjects() -> Iterator[Subject]:
    """Mamba-1: training and prefill."""
    from anymamba.backends.reference.selective_scan import selective_scan_forward
    from anymamba.ops.selective_scan import selective_scan_fn

    def loop(**a: Any) -> torch.Tensor:
        return selective_scan_forward(
            a["u"], a["delta"], a["A"], a["B"][:, None], a["C"][:, None], a["D"], a["z"], a["delta_bias"], True, None,
            False,
        )[0]  # fmt: skip

    # Autograd through 2048 steps of the loop takes minutes: forward only. A few steps: a short prompt, or tokens one by one.
    sizes = [(1, 256, 256, 16), (1, 1536, 2048, 16), *((1, 1536, length, 16) for length in (1, 2, 4, 7, 16))]
    for batch, dim, length, state in sizes:

        def arguments(batch: int = batch, dim: int = dim, length: int = length, state: int = state) -> Arguments:
            return {
                "u": normal(batch, dim, length),
                "delta": normal(batch, dim, length, scale=0.5),
                "A": decay(dim, state),
                "B": normal(batch, state, length),
                "C": normal(batch, state, length),
                "D": normal(dim),
                "z": normal(batch, dim, length),
                "delta_bias": normal(dim),
                "delta_softplus": True,
            }

        size = f"({batch}, {dim}, {length}, {state})"
        upstream = ("mamba_ssm/ops/selective_scan_interface.py", "selective_scan_ref")
        yield Subject("selective_scan", size, arguments, selective_scan_fn, loop, upstream, length < 2048)


def convolution_subjects() -> Iterator[Subject]:
    """The depthwise convolution and its decoding step."""
    from anymamba.backends.reference import causal_conv1d as reference
    from anymamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update

    def plain(**a: Any) -> torch.Tensor:
        # As upstream's reference: PyTorch's grouped convolution
        x, weight = a["x"], a["weight"]
        width = weight.shape[1]
        out = F.conv1d(x, weight.unsqueeze(1), a["bias"], padding=width - 1, groups=weight.shape[0])
        return F.silu(out[..., : x.shape[-1]])

    def arguments() -> Arguments:
        return {"x": normal(1, 1536, 2048), "weight": normal(1536, 4), "bias": normal(1536), "activation": "silu"}

    upstream = "causal_conv1d/causal_conv1d_interface.py"
    yield Subject(
        "causal_conv1d", "(1, 1536, 2048), width 4", arguments, causal_conv1d_fn, plain, (upstream, "causal_conv1d_ref")
    )

    def step() -> Arguments:
        shapes = {"x": (1, 1536), "conv_state": (1, 1536, 4), "weight": (1536, 4), "bias": (1536,)}
        return {name: torch.randn(*shape) for name, shape in shapes.items()} | {"activation": "silu"}

    def step_loop(**a: Any) -> torch.Tensor:
        return reference.causal_conv1d_update(
            a["x"][..., None], a["conv_state"], a["weight"], a["bias"], True, None, None
        )

    yield Subject(
        "causal_conv1d_update", "(1, 1536), width 4", step, causal_conv1d_update, step_loop,
        (upstream, "causal_conv1d_update_ref"), differentiable=False,
    )  # fmt: skip


def update_subjects() -> Iterator[Subject]:
    """One decoding step of Mamba-1 and Mamba-2."""
    from anymamba.ops.selective_state_update import selective_state_update, selective_state_update_ref

    def mamba1() -> Arguments:
        shapes = {
            "state": (1, 1536, 16), "x": (1, 1536), "dt": (1, 1536), "A": (1536, 16), "B": (1, 16), "C": (1, 16),
            "D": (1536,), "z": (1, 1536), "dt_bias": (1536,),
        }  # fmt: skip
        drawn = {name: torch.randn(*shape) for name, shape in shapes.items()}
        return drawn | {"A": decay(1536, 16).detach(), "dt_softplus": True}

    def mamba2() -> Arguments:
        heads, dim, state = 24, 64, 128
        per_head = {"dt": torch.randn(1, heads, 1), "A": decay(heads, 1, 1).detach(), "dt_bias": torch.randn(heads, 1)}
        return {
            "state": torch.randn(1, heads, dim, state),
            "x": torch.randn(1, heads, dim),
            "dt": per_head["dt"].expand(1, heads, dim),
            "A": per_head["A"].expand(heads, dim, state),
            "B": torch.randn(1, 1, state),
            "C": torch.randn(1, 1, state),
            "D": torch.randn(heads, 1).expand(heads, dim),
            "dt_bias": per_head["dt_bias"].expand(heads, dim),
            "dt_softplus": True,
        }

    upstream = ("mamba_ssm/ops/triton/selective_state_update.py", "selective_state_update_ref")
    for size, arguments in (("(1, 1536, 16)", mamba1), ("(1, 24, 64, 128)", mamba2)):
        yield Subject(
            "selective_state_update", size, arguments, selective_state_update, selective_state_update_ref, upstream,
            differentiable=False,
        )  # fmt: skip


def ssd_subjects() -> Iterator[Subject]:
    """Mamba-2."""
    from anymamba.backends.reference.ssd import ssd_forward
    from anymamba.ops.ssd import mamba_chunk_scan_combined

    def loop(**a: Any) -> torch.Tensor:
        return ssd_forward(
            a["x"], a["dt"], a["A"], a["B"], a["C"], a["D"], a["z"], a["dt_bias"], None, None, None, True, 0.0,
            math.inf, False,
        )[0]  # fmt: skip

    upstream = ("mamba_ssm/ops/triton/ssd_combined.py", "ssd_chunk_scan_combined_ref")
    # Autograd through our loop keeps a (heads, headdim, dstate) state a step: only at the smaller size
    for length, heads, loop_trains in ((1024, 24, False), (256, 8, True)):

        def arguments(length: int = length, heads: int = heads) -> Arguments:
            return {
                "x": normal(1, length, heads, 64),
                "dt": normal(1, length, heads, scale=0.5),
                "A": decay(heads),
                "B": normal(1, length, 1, 128),
                "C": normal(1, length, 1, 128),
                "chunk_size": 256,
                "D": normal(heads),
                "z": normal(1, length, heads, 64),
                "dt_bias": normal(heads),
                "dt_softplus": True,
            }

        size = f"(1, {length}, {heads}, 64, 128)"
        yield Subject("ssd", size, arguments, mamba_chunk_scan_combined, loop, upstream, True, loop_trains)


def norm_subjects() -> Iterator[Subject]:
    """Norms and SwiGLU at 1024 rows of 2048."""
    from anymamba.ops import layer_norm, layernorm_gated
    from anymamba.ops.swiglu import swiglu

    def block() -> Arguments:
        rows = {"x": normal(1024, 2048), "residual": normal(1024, 2048)}
        return {**rows, "weight": normal(2048), "bias": normal(2048), "prenorm": True}

    def gated() -> Arguments:
        return {"x": normal(1024, 2048), "weight": normal(2048), "bias": None, "z": normal(1024, 2048)}

    size, folder = "(1024, 2048)", "mamba_ssm/ops/triton/"
    for name in ("rms_norm", "layer_norm"):
        yield Subject(
            f"{name} + residual", size, block, getattr(layer_norm, f"{name}_fn"), getattr(layer_norm, f"{name}_ref"),
            (f"{folder}layer_norm.py", f"{name}_ref"),
        )  # fmt: skip
    yield Subject(
        "rmsnorm gated", size, gated, layernorm_gated.rmsnorm_fn, layernorm_gated.rms_norm_ref,
        (f"{folder}layernorm_gated.py", "rms_norm_ref"),
    )  # fmt: skip

    def gated_mlp(xy: torch.Tensor) -> torch.Tensor:
        x, y = xy.chunk(2, dim=-1)
        return F.silu(x) * y

    yield Subject("swiglu", "(1024, 2 * 2048)", lambda: {"xy": normal(1024, 4096)}, swiglu, gated_mlp)


FAMILIES: dict[str, Callable[[], Iterator[Subject]]] = {
    "scan": scan_subjects,
    "conv": convolution_subjects,
    "update": update_subjects,
    "ssd": ssd_subjects,
    "norm": norm_subjects,
}


def upstream_function(file: str, name: str, checkouts: list[Path]) -> Callable[..., Any] | None:
    """Return upstream's own reference function from a checkout or an installed package, without importing the package.

    Its module would import compiled extensions and Triton; the function itself needs PyTorch, einops and other `_ref`
    functions only, which are looked for in the modules beside it.
    """
    package = file.split("/", 1)[0]
    spec = importlib.util.find_spec(package)
    roots = [*checkouts, *(Path(folder).parent for folder in (spec.submodule_search_locations or () if spec else ()))]
    for root in roots:
        path = root / file
        if not path.is_file():
            continue
        texts = [path, *sorted(path.parent.glob("ssd_*.py"))] if "ssd_" in path.name else [path]
        functions: dict[str, ast.FunctionDef] = {}
        for text in texts:
            for node in ast.parse(text.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef) and node.name.endswith("_ref"):
                    functions.setdefault(node.name, node)
        if name in functions:
            import einops

            space: dict[str, Any] = {
                "torch": torch, "F": F, "math": math, "rearrange": einops.rearrange, "repeat": einops.repeat,
            }  # fmt: skip
            module = ast.Module(body=list(functions.values()), type_ignores=[])
            exec(compile(module, str(path), "exec"), space)
            return space[name]
    return None


def once(function: Callable[..., Any], arguments: Arguments, backward: bool) -> None:
    """Run forward, or forward and backward."""
    if not backward:
        with torch.no_grad():
            function(**arguments)
        return
    found = function(**arguments)
    outputs = [out for out in (found if isinstance(found, tuple) else (found,)) if isinstance(out, torch.Tensor)]
    leaves = getattr(found, "leaves", None) or [
        value for value in arguments.values() if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    torch.autograd.grad(outputs, leaves, [torch.ones_like(out) for out in outputs], allow_unused=True)


def medians(
    runs: dict[str, Callable[[], None]], rounds: int, seconds: float
) -> tuple[dict[str, float], dict[str, str], dict[str, int]]:
    """Return the median milliseconds of each run, why the others failed, and how often each ran.

    Rounds are interleaved (a, b, c, a, b, c, ...): what disturbs the machine disturbs all alike. A slow one sits rounds out
    once it has had its share of the time, but runs at least once beside its warm-up.
    """
    failed: dict[str, str] = {}
    times: dict[str, list[float]] = {}
    for name, run in runs.items():  # warm up; a refusal or an error takes this one out
        try:
            run()
        except AnymambaError as error:
            failed[name] = error.why or error.what
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
        else:
            times[name] = []
    spent = dict.fromkeys(times, 0.0)
    share = seconds / max(len(times), 1)
    for _ in range(rounds):
        due = [name for name in times if spent[name] < share or not times[name]]
        if not due:
            break
        for name in due:
            before = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - before)
            spent[name] += times[name][-1]
    counts = {name: len(seen) for name, seen in times.items()}
    return {name: 1000 * statistics.median(seen) for name, seen in times.items()}, failed, counts


def candidates(
    subject: Subject,
    arguments: Arguments,
    backward: bool,
    checkouts: list[Path],
    others: dict[str, Callable[..., Any]],
) -> dict[str, Callable[[], None]]:
    """Return what is measured for one subject: upstream's own loop (else ours), our backends, the others."""
    theirs = None if subject.upstream is None else upstream_function(*subject.upstream, checkouts)
    runs: dict[str, Callable[[], None]] = {}
    if theirs is not None:
        runs["upstream"] = lambda: once(theirs, accepted(theirs, arguments), backward)
    elif subject.loop_trains or not backward:
        runs["loop"] = lambda: once(subject.loop, arguments, backward)
    for name in backends.names():
        if name != "reference" and backends.unavailable(name) is None:
            runs[name] = functools.partial(on_backend, name, subject.ours, arguments, backward)
    for name, other in others.items():
        runs[name] = functools.partial(once, other, arguments, backward)
    return runs


def measure(
    subject: Subject,
    checkouts: list[Path],
    rounds: int,
    seconds: float,
    others: dict[str, Callable[..., Any]] | None = None,
    left_out: dict[tuple[str, str], dict[str, str]] | None = None,
) -> Iterator[dict[str, Any]]:
    """Measure one subject, forward and with backward; what is `left_out` (subject, pass) fails with that reason."""
    torch.manual_seed(0)
    arguments = subject.arguments()
    for backward in (False, True) if subject.differentiable else (False,):
        runs = candidates(subject, arguments, backward, checkouts, others or {})
        reasons = (left_out or {}).get((subject.name, PASSES[backward]), {})
        found, failed, counts = medians(
            {name: run for name, run in runs.items() if name not in reasons}, rounds, seconds
        )
        failed |= reasons
        yield {
            "operator": subject.name,
            "size": subject.size,
            "pass": PASSES[backward],
            "rounds": counts,
            "milliseconds": {name: round(value, 4) for name, value in found.items()},
            "failed": failed,
        }


def on_backend(name: str, function: Callable[..., Any], arguments: Arguments, backward: bool) -> None:
    """Run on this backend, by request."""
    with backends.use_backend(name):
        once(function, arguments, backward)


def accepted(function: Callable[..., Any], arguments: Arguments) -> Arguments:
    """Leave out the arguments that this function does not take."""
    code = function.__code__
    return {name: value for name, value in arguments.items() if name in code.co_varnames[: code.co_argcount]}


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    names = list(dict.fromkeys(name for row in rows for name in [*row["milliseconds"], *row["failed"]]))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("operator", "size", "pass", *(f"{name}, ms" for name in names)):
        table.add_column(column, justify="left" if column in {"operator", "size", "pass"} else "right")
    for row in rows:
        base_name = "upstream" if "upstream" in row["milliseconds"] else "loop"
        base = row["milliseconds"].get(base_name)
        cells = []
        for name in names:
            value = row["milliseconds"].get(name)
            if value is None:
                cells.append("failed" if name in row["failed"] else "-")
            elif name == base_name or base is None:
                cells.append(f"{value:.2f}")
            else:
                ratio = base / value
                cells.append(f"{value:.2f} [{'green' if ratio >= 1 else 'bold red'}]{ratio:5.1f}x[/]")
        table.add_row(row["operator"], row["size"], "fwd+bwd" if "+" in row["pass"] else "fwd", *cells)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(table)
    for row in rows:
        for name, reason in row["failed"].items():
            console.print(f"[red]{row['operator']}, {row['pass']}, {name}[/]: {reason}", markup=True)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--upstream", metavar="DIR", type=Path, action="append", default=[], help="an upstream checkout"
    )
    parser.add_argument(
        "--only", choices=list(FAMILIES), action="append", help="measure this family (again for another)"
    )
    parser.add_argument("--rounds", type=int, default=30, help="at most this many rounds a row (default 30)")
    parser.add_argument("--seconds", type=float, default=3.0, help="about this long a row (default 3)")
    parser.add_argument("--threads", type=int, help="PyTorch's threads (default: its own choice)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for family in options.only or FAMILIES:
        try:
            subjects = list(FAMILIES[family]())
        except ImportError as error:
            print(f"{family}: not measured, {error}", file=sys.stderr)
            continue
        for subject in subjects:
            print(f"{subject.name} {subject.size} ...", file=sys.stderr, flush=True)
            rows += measure(subject, options.upstream, options.rounds, options.seconds)
    print(
        f"anymamba {__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{platform.processor() or platform.machine()}; float32; median ms, and times faster than upstream's loop (or ours)"
    )
    show(rows)
    if options.json is not None:
        about = {"schema": SCHEMA, "torch": torch.__version__, "threads": torch.get_num_threads(), "rows": rows}
        options.json.write_text(json.dumps(about, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
