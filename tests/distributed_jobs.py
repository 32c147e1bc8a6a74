"""What the ranks of the tests in tests/distributed do: functions that a spawned process can import by name."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from anymamba import ops
from anymamba.backends import use_backend
from anymamba.distributed import context_parallel, count_traffic, parallelize
from anymamba.errors import AnymambaError, RankLostError
from rank_pool import start_group

__all__ = [
    "TIME",
    "call",
    "checkpoint_and_leave",
    "compile_whole",
    "convolve_and_lose_a_rank",
    "mismatched",
    "run_operator",
    "scan_sharded_heads",
    "sliced",
]

TIME = {
    "causal_conv1d_fn": {"x": 2, "seq_idx": 1},
    "selective_scan_fn": {"u": 2, "delta": 2, "z": 2, "B": -1, "C": -1},
    "mamba_chunk_scan_combined": {"x": 1, "dt": 1, "B": 1, "C": 1, "z": 1, "seq_idx": 1},
}
"""The dimension of time of the arguments that have one."""


def sliced(name: str, argument: str, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return the part of an argument that covers these columns; the whole if it has no time."""
    dim = TIME[name].get(argument)
    if dim is None or (name == "selective_scan_fn" and argument in "BC" and tensor.dim() == 2):
        return tensor
    # complex scans interleave real and imaginary parts of B and C
    each = 2 if name == "selective_scan_fn" and argument in "BC" and tensor.shape[-1] == 2 * _length(tensor) else 1
    return tensor.narrow(dim, each * start, each * (stop - start))


_lengths: dict[int, int] = {}


def _length(tensor: torch.Tensor) -> int:
    return _lengths.get(0, tensor.shape[-1])


def call(
    name: str, tensors: dict[str, torch.Tensor], options: dict[str, Any], weights: list[torch.Tensor | None]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Call an operator and differentiate the sum of its results times `weights` (None: not differentiated)."""
    leaves = {
        key: tensor.clone().requires_grad_(tensor.is_floating_point() or tensor.is_complex())
        for key, tensor in tensors.items()
    }
    results = getattr(ops, name)(**leaves, **options)
    results = list(results) if isinstance(results, tuple) else [results]
    loss = torch.zeros((), dtype=torch.float64)
    for result, weight in zip(results, weights):
        if weight is not None:
            product = (result * weight.conj()).sum() if result.is_complex() else (result * weight).sum()
            loss = loss + (product.real if product.is_complex() else product)
    loss.backward()
    return [result.detach() for result in results], {
        key: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for key, leaf in leaves.items()
        if leaf.requires_grad
    }


def run_operator(
    group: Any,
    name: str,
    tensors: dict[str, torch.Tensor],
    options: dict[str, Any],
    weights: list[torch.Tensor | None],
    lengths: list[int],
    check: str = "always",
) -> Any:
    """Run an operator on this rank's part; weights: of the output (whole), the last rank's state, the varlen states."""
    rank = torch.distributed.get_rank(group)
    start = sum(lengths[:rank])
    stop = start + lengths[rank]
    _lengths[0] = sum(lengths)
    parts = {key: sliced(name, key, tensor, start, stop) for key, tensor in tensors.items()}
    time = 1 if name == "mamba_chunk_scan_combined" else 2
    of_out = None if weights[0] is None else weights[0].narrow(time, start, stop - start)
    last = rank == len(lengths) - 1
    mine = [of_out, *(weights[1:2] if last else [None] * len(weights[1:2])), *weights[2:]]
    # the torch backend: whichever computes makes no difference here, and this one compiles nothing
    with count_traffic() as traffic, context_parallel(group, check=check), use_backend("torch"):
        results, gradients = call(name, parts, options, mine)
    return results, gradients, (traffic.sent, traffic.received)


def mismatched(group: Any, name: str, calls: list[dict[str, torch.Tensor]], options: dict[str, Any]) -> str:
    """Call an operator with this rank's own arguments; return the error's kind and text."""
    try:
        with context_parallel(group):
            getattr(ops, name)(**calls[torch.distributed.get_rank(group)], **options)
    except AnymambaError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def convolve_and_lose_a_rank(rank: int, size: int, file: Path, timeout: float, how: str, when: str, pipe: Any) -> None:
    """Run convolutions forward and backward; rank 1 disappears at one of them. Send how it ended, and after how long."""
    pipe.send("ready")
    pipe.recv()
    start_group(rank, size, file, timeout)
    dist = torch.distributed
    started = time.monotonic()
    try:
        for step in range(3):
            x = torch.randn(1, 4, 8, requires_grad=True)
            gone = rank == 1 and step == 1
            with context_parallel(check="entry" if when == "handshake" else "never"), use_backend("torch"):
                if gone and when != "backward":
                    _disappear(how)
                out = ops.causal_conv1d_fn(x, torch.ones(4, 3))
                state = -torch.rand(4, 2)
                out = ops.selective_scan_fn(out, torch.rand(1, 4, 8), state, torch.rand(4, 2), torch.rand(4, 2))
            if gone:
                _disappear(how)
            out.sum().backward()
    except RankLostError as error:
        pipe.send((str(error), time.monotonic() - started))
        os._exit(0)  # leaving a broken group politely can wait for the dead
    pipe.send(("no error", time.monotonic() - started))
    dist.barrier()


def _disappear(how: str) -> None:
    if how == "killed":
        os._exit(1)
    time.sleep(600)


class Layers(torch.nn.Module):
    """All three operators, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.filter = torch.nn.Parameter(torch.randn(4, 4))
        self.A = torch.nn.Parameter(-torch.rand(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = ops.causal_conv1d_fn(x, self.filter, activation="silu")
        y = ops.selective_scan_fn(y, torch.sigmoid(x), -torch.ones(4, 2), torch.ones(4, 2), torch.ones(4, 2))
        h = y.transpose(1, 2).unflatten(-1, (2, 2))
        return ops.mamba_chunk_scan_combined(h, h[..., 0].sigmoid(), self.A, h[:, :, :1], h[:, :, :1], 4)


def compile_whole(group: Any, entered: str) -> tuple[list[str], float, float]:
    """Compile the layers, the context entered inside or outside; return what the graph calls and how results differ."""
    from torch._dynamo.backends.debugging import aot_eager

    torch._dynamo.reset()
    model, plain = Layers(), Layers()
    if entered == "parallelize":
        parallelize(model, group)
    seen: list[str] = []

    def keep(graph: Any, inputs: Any) -> Any:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        seen.extend(name.split(".")[1] for name in names if "anymamba" in name)
        return aot_eager(graph, inputs)

    compiled = torch.compile(model, backend=keep, fullgraph=True)
    x = torch.randn(1, 4, 8)
    with use_backend("torch"):
        with context_parallel(group):
            wanted = plain(x)
        wanted.sum().backward()
        if entered == "context":
            with context_parallel(group):
                found = compiled(x)
        else:
            found = compiled(x)
        found.sum().backward()
    gradients = [(a.grad - b.grad).abs().max() for a, b in zip(model.parameters(), plain.parameters())]
    return seen, float((found - wanted).abs().max()), float(max(gradients))


def checkpoint_and_leave(group: Any, stay: bool) -> str:
    """Checkpoint a forward in a context; run the backward inside it, or outside."""
    from torch.utils.checkpoint import checkpoint

    model = Layers()
    try:
        with use_backend("torch"), context_parallel(group):
            loss = checkpoint(model, torch.randn(1, 4, 8), use_reentrant=False).sum()
            if stay:
                loss.backward()
        if not stay:
            loss.backward()
    except RuntimeError as error:
        return type(error).__name__
    return "no error"


def scan_sharded_heads(group: Any) -> dict[str, float]:
    """Run the SSD scan on DTensors whose heads are sharded, through PyTorch's own `local_map`; return relative errors."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.experimental import local_map

    mesh = DeviceMesh.from_group(group, "cpu")
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (2, 9, 4, 3), "dt": (2, 9, 4), "A": (4,), "B": (2, 9, 1, 5), "C": (2, 9, 1, 5)}
    whole = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    whole["A"] = -whole["A"].abs()
    for tensor in whole.values():
        tensor.requires_grad_()
    heads = {"x": [Shard(2)], "dt": [Shard(2)], "A": [Shard(0)], "B": [Replicate()], "C": [Replicate()]}
    parts = {
        name: distribute_tensor(tensor.detach(), mesh, heads[name]).requires_grad_() for name, tensor in whole.items()
    }

    def scan(*arguments: torch.Tensor) -> torch.Tensor:
        return ops.mamba_chunk_scan_combined(*arguments, 8, dt_softplus=True)

    with use_backend("torch"):
        wanted = scan(*whole.values())
        wanted.square().sum().backward()
        sharded = local_map(
            scan,
            out_placements=[Shard(2)],
            in_placements=tuple(heads.values()),
            # every rank's heads read B and C: their gradients are to be added up
            in_grad_placements=([Shard(2)], [Shard(2)], [Shard(0)], [Partial()], [Partial()]),
            device_mesh=mesh,
        )
        found = sharded(*parts.values())
        found.square().sum().full_tensor().backward()
    pairs = {name: (parts[name].grad.full_tensor(), tensor.grad) for name, tensor in whole.items()}
    pairs["out"] = (found.detach().full_tensor(), wanted.detach())
    return {name: float((got - right).abs().max() / right.abs().max()) for name, (got, right) in pairs.items()}
