"""What the ranks of tests/distributed/test_dtensors.py do: the operators on sharded DTensors beside whole tensors."""

from __future__ import annotations

from typing import Any

import torch

from anymamba import ops
from anymamba.backends import use_backend
from anymamba.ops.layer_norm import layer_norm_fn
from anymamba.ops.layernorm_gated import rmsnorm_fn
from anymamba.ops.swiglu import swiglu

__all__ = ["CASES", "compile_heads", "run_case", "shard_unevenly"]

# name: function, {argument: (shape, the dimension that is sharded or None for whole)}, options, the output's placement
CASES: dict[str, tuple[Any, dict[str, tuple[tuple[int, ...], int | None]], dict[str, Any], int]] = {
    "convolution over channels": (
        ops.causal_conv1d_fn,
        {"x": ((2, 4, 9), 1), "weight": ((4, 3), 0), "bias": ((4,), 0), "initial_states": ((2, 4, 2), 1)},
        {"activation": "silu"},
        1,
    ),
    "convolution over the batch": (
        ops.causal_conv1d_fn,
        {"x": ((2, 4, 9), 0), "weight": ((4, 3), None), "bias": ((4,), None)},
        {"activation": "silu"},
        0,
    ),
    "scan over channels": (
        ops.selective_scan_fn,
        {
            "u": ((2, 4, 9), 1),
            "delta": ((2, 4, 9), 1),
            "A": ((4, 3), 0),
            "B": ((2, 3, 9), None),
            "C": ((2, 3, 9), None),
            "D": ((4,), 0),
            "z": ((2, 4, 9), 1),
            "delta_bias": ((4,), 0),
        },
        {"delta_softplus": True},
        1,
    ),
    "scan over channels and their groups": (
        ops.selective_scan_fn,
        {
            "u": ((2, 4, 9), 1),
            "delta": ((2, 4, 9), 1),
            "A": ((4, 3), 0),
            "B": ((2, 2, 3, 9), 1),
            "C": ((2, 2, 3, 9), 1),
        },
        {"delta_softplus": True},
        1,
    ),
    "scan over the batch": (
        ops.selective_scan_fn,
        {"u": ((2, 4, 9), 0), "delta": ((2, 4, 9), 0), "A": ((4, 3), None), "B": ((4, 3), None), "C": ((2, 3, 9), 0)},
        {"delta_softplus": True},
        0,
    ),
    "SSD over heads": (
        ops.mamba_chunk_scan_combined,
        {
            "x": ((2, 9, 4, 3), 2),
            "dt": ((2, 9, 4), 2),
            "A": ((4,), 0),
            "B": ((2, 9, 1, 5), None),
            "C": ((2, 9, 1, 5), None),
            "D": ((4,), 0),
            "z": ((2, 9, 4, 3), 2),
            "dt_bias": ((4,), 0),
            "initial_states": ((2, 4, 3, 5), 1),
        },
        {"chunk_size": 8, "dt_softplus": True},
        2,
    ),
    "SSD over heads and their groups": (
        ops.mamba_chunk_scan_combined,
        {"x": ((2, 9, 4, 3), 2), "dt": ((2, 9, 4), 2), "A": ((4,), 0), "B": ((2, 9, 2, 5), 2), "C": ((2, 9, 2, 5), 2)},
        {"chunk_size": 8, "dt_softplus": True},
        2,
    ),
    "SSD over the batch": (
        ops.mamba_chunk_scan_combined,
        {
            "x": ((2, 9, 4, 3), 0),
            "dt": ((2, 9, 4), 0),
            "A": ((4,), None),
            "B": ((2, 9, 1, 5), 0),
            "C": ((2, 9, 1, 5), 0),
        },
        {"chunk_size": 8, "dt_softplus": True},
        0,
    ),
    "norm over rows": (
        layer_norm_fn,
        {"x": ((4, 6), 0), "weight": ((6,), None), "bias": ((6,), None), "residual": ((4, 6), 0)},
        {},
        0,
    ),
    "gated norm over rows": (
        rmsnorm_fn,
        {"x": ((4, 6), 0), "weight": ((6,), None), "bias": ((6,), None), "z": ((4, 6), 0)},
        {},
        0,
    ),
    "gated norm over groups of columns": (
        rmsnorm_fn,
        {"x": ((4, 6), 1), "weight": ((6,), 0), "bias": ((6,), 0), "z": ((4, 6), 1)},
        {"group_size": 3},
        1,
    ),
    "SwiGLU over rows": (swiglu, {"xy": ((4, 6), 0)}, {}, 0),
}


def run_case(group: Any, name: str) -> tuple[str, int, dict[str, float]]:
    """Return the placement of an operator's output, the messages its forward sent, and the relative errors of all results."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    function, arguments, options, _ = CASES[name]
    mesh = DeviceMesh.from_group(group, "cpu")
    generator = torch.Generator().manual_seed(0)
    whole = {key: torch.randn(shape, generator=generator, dtype=torch.float64) for key, (shape, _) in arguments.items()}
    if "A" in whole:
        whole["A"] = -whole["A"].abs()
    parts = {
        key: distribute_tensor(tensor, mesh, [Replicate() if arguments[key][1] is None else Shard(arguments[key][1])])
        for key, tensor in whole.items()
    }
    for tensor in (*whole.values(), *parts.values()):
        tensor.requires_grad_()
    with use_backend("torch"):
        wanted = function(**whole, **options)
        wanted.square().sum().backward()
        messages = CommDebugMode()
        with messages:
            found = function(**parts, **options)
        found.square().sum().backward()
    pairs = {key: (parts[key].grad, tensor.grad) for key, tensor in whole.items()}
    pairs["out"] = (found.detach(), wanted.detach())
    return (
        str(found.placements[0]),
        messages.get_total_counts(),
        {
            key: float((got.full_tensor() - right).abs().max() / right.abs().max())
            for key, (got, right) in pairs.items()
        },
    )


def shard_unevenly(group: Any, groups: int) -> tuple[str, float]:
    """Run SSD on three heads, with one group or three, over ranks that do not divide them; return placement and difference."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    generator = torch.Generator().manual_seed(1)
    shapes = {"x": (1, 5, 3, 2), "dt": (1, 5, 3), "A": (3,), "B": (1, 5, groups, 4), "C": (1, 5, groups, 4)}
    whole = {key: torch.rand(shape, generator=generator, dtype=torch.float64) - 1 for key, shape in shapes.items()}
    shared = Replicate() if groups == 1 else Shard(2)
    places = {"x": Shard(2), "dt": Shard(2), "A": Shard(0), "B": shared, "C": shared}
    parts = {key: distribute_tensor(tensor, mesh, [places[key]]) for key, tensor in whole.items()}
    with use_backend("torch"):
        wanted = ops.mamba_chunk_scan_combined(**whole, chunk_size=8)
        found = ops.mamba_chunk_scan_combined(**parts, chunk_size=8)
    return str(found.placements[0]), float((found.full_tensor() - wanted).abs().max())


def compile_heads(group: Any) -> tuple[str, float, str]:
    """Compile SSD over sharded heads into one graph; return where the output lies, its difference, where A's gradient lies."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    _, arguments, options, _ = CASES["SSD over heads"]
    generator = torch.Generator().manual_seed(2)
    whole = {
        key: torch.rand(shape, generator=generator, dtype=torch.float64) - 1 for key, (shape, _) in arguments.items()
    }
    parts = {
        key: distribute_tensor(tensor, mesh, [Replicate() if arguments[key][1] is None else Shard(arguments[key][1])])
        for key, tensor in whole.items()
    }
    for tensor in parts.values():
        tensor.requires_grad_()

    def scan(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = ops.mamba_chunk_scan_combined(**tensors, **options)
        return out

    with use_backend("torch"):
        wanted = scan(whole)
        found = torch.compile(scan, backend="aot_eager", fullgraph=True)(parts)
        found.square().sum().backward()
    difference = float((found.detach().full_tensor() - wanted).abs().max())
    return str(found.placements[0]), difference, str(parts["A"].grad.placements[0])
