"""Which dimensions of the operators' tensors may be sharded as DTensors, told to PyTorch.

Every operator is written like an einsum: a letter for each dimension of each tensor. Sharding a letter (batch, channels,
heads, rows) shards every tensor that has it; the others are whole on each rank, and the gradient of such a one is the sum over
the ranks (`Partial`). Where heads or channels share B and C by groups, the groups are sharded with them if the ranks divide
them; a single group stays whole. Time is never sharded here: that is what `context_parallel` is for.

PyTorch asks for the rules when an operator meets a DTensor. They are registered when that happens first, eagerly or while
tracing; from torch 2.6 on, which has `register_sharding`. Decoding steps write into their states in place and have no rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import anymamba.ops  # noqa: F401  defines the operators

__all__ = ["RULES", "Rule", "register"]

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """The dimensions of an operator's tensors.

    Attributes
    ----------
    inputs : mapping of str to tuple of str
        Per tensor argument its letters; of several, those that are as many as the tensor has dimensions.
    outputs : tuple of str
        Per result its letters, or ``"=NAME"``: the gradient of that argument, absent where the argument is.
    shardable : str
        The letters that may be sharded.
    absent : callable
        Given the arguments, the places of results that are empty placeholders (beside gradients of absent arguments).
    together : callable
        Given the arguments, a letter and the number of ranks: the letters to be sharded with it, itself among them;
        empty where it must not be sharded.
    """

    inputs: Mapping[str, tuple[str, ...]]
    outputs: tuple[str, ...]
    shardable: str
    absent: Callable[[Arguments], set[int]] = lambda arguments: set()
    together: Callable[[Arguments, str, int], str] = lambda arguments, letter, ranks: letter


def _grouped(groups: int, size: int, ranks: int, letter: str) -> str:
    """Return what is sharded with heads or channels: their groups too, unless it is one."""
    if groups == 1:
        return letter
    return f"{letter}g" if groups % ranks == 0 and size % groups == 0 else ""


def _scan(arguments: Arguments, letter: str, ranks: int) -> str:
    if letter == "b":
        return letter
    groups = {arguments[name].shape[1] for name in "BC" if arguments[name].ndim == 4} or {1}
    return _grouped(groups.pop(), arguments["u"].shape[1], ranks, letter)


def _ssd(arguments: Arguments, letter: str, ranks: int) -> str:
    if letter == "b":
        return "" if arguments["cu_seqlens"] is not None else letter
    return _grouped(arguments["B"].shape[2], arguments["x"].shape[2], ranks, letter)


def _gated_norm(arguments: Arguments, letter: str, ranks: int) -> str:
    # statistics are (groups, rows) in one dimension: contiguous pieces of it are rows of one group, or whole groups
    groups = arguments["x"].shape[1] // arguments["group_size"]
    if letter == "r":
        return "rs" if groups == 1 else ""
    return "cs" if groups > 1 and groups % ranks == 0 else ""


_CONVOLUTION = {"x": ("bdl",), "weight": ("dw",), "bias": ("d",), "seq_idx": ("bl",), "initial_states": ("bdk",)}
_SCAN = {
    "u": ("bdl",), "delta": ("bdl",), "A": ("dn",), "B": ("dn", "bgnl"), "C": ("dn", "bgnl"), "D": ("d",), "z": ("bdl",),
    "delta_bias": ("d",), "initial_state": ("bdn",),
}  # fmt: skip
_SSD = {
    "x": ("blhp",), "dt": ("blh",), "A": ("h",), "B": ("blgn",), "C": ("blgn",), "D": ("h", "hp"), "z": ("blhp",),
    "dt_bias": ("h",), "initial_states": ("bhpn",), "seq_idx": ("bl",), "cu_seqlens": ("q",),
}  # fmt: skip
_NORM = {
    "weight": ("c",), "bias": ("c",), "weight1": ("c",), "bias1": ("c",), "rowscale": ("r",), "keep": ("rc",),
    "keep1": ("rc",),
}  # fmt: skip
_GATED_NORM = {"x": ("rc",), "weight": ("c",), "bias": ("c",), "z": ("rc",)}

RULES: Mapping[str, Rule] = {
    "causal_conv1d": Rule(
        _CONVOLUTION, ("bdl", "bdk"), "bd", lambda arguments: set() if arguments["return_final_states"] else {1}
    ),
    "causal_conv1d_backward": Rule(
        {**_CONVOLUTION, "dout": ("bdl",), "dfinal_states": ("bdk",)},
        ("=x", "=weight", "=bias", "=initial_states"),
        "bd",
    ),
    "selective_scan": Rule(
        _SCAN, ("bdl", "bdn", "bdtn"), "bd", lambda arguments: set() if arguments["save"] else {2}, _scan
    ),
    "selective_scan_backward": Rule(
        {**_SCAN, "checkpoints": ("bdtn",), "dout": ("bdl",), "dlast_state": ("bdn",)},
        tuple(f"={name}" for name in _SCAN),
        "bd",
        together=_scan,
    ),
    "ssd": Rule(
        _SSD,
        ("blhp", "bhpn", "shpn"),
        "bh",
        lambda arguments: (
            (set() if arguments["return_final_states"] else {1})
            | (set() if arguments["cu_seqlens"] is not None else {2})
        ),
        _ssd,
    ),
    "ssd_backward": Rule(
        {**_SSD, "dout": ("blhp",), "dfinal_states": ("bhpn",), "dvarlen_states": ("shpn",)},
        tuple(f"={name}" for name in _SSD if name not in ("seq_idx", "cu_seqlens")),
        "bh",
        together=_ssd,
    ),
    "layer_norm": Rule(
        {**_NORM, "x": ("rc",), "residual": ("rc",), "x1": ("rc",)},
        ("rc", "rc", "rc", "r", "r"),
        "r",
        lambda arguments: {
            place
            for place, there in (
                (1, arguments["weight1"] is not None),
                (2, arguments["residual_dtype"] is not None),
                (3, not arguments["is_rms_norm"]),
            )
            if not there
        },
    ),
    "layer_norm_backward": Rule(
        {
            **_NORM,
            "dout": ("rc",),
            "v": ("rc",),
            "dout1": ("rc",),
            "dresidual_out": ("rc",),
            "mean": ("r",),
            "rstd": ("r",),
        },
        ("rc", "=weight", "=bias", "rc", "rc", "=weight1", "=bias1", "rc"),
        "r",
        lambda arguments: {
            place
            for place, there in (
                (3, arguments["has_residual"]),
                (4, arguments["has_x1"]),
                (7, arguments["recompute_out"]),
            )
            if not there
        },
    ),
    "layernorm_gated": Rule(
        _GATED_NORM, ("rc", "s", "s"), "rc", lambda arguments: {1} if arguments["is_rms_norm"] else set(), _gated_norm
    ),
    "layernorm_gated_backward": Rule(
        {**_GATED_NORM, "dout": ("rc",), "mean": ("s",), "rstd": ("s",)},
        ("=x", "=weight", "=bias", "=z", "rc"),
        "rc",
        lambda arguments: set() if arguments["recompute_out"] else {4},
        _gated_norm,
    ),
    "swiglu": Rule({"xy": ("rc",)}, ("rc",), "r"),
    "swiglu_backward": Rule(
        {"xy": ("rc",), "dout": ("rc",)},
        ("=xy", "rc"),
        "r",
        lambda arguments: set() if arguments["recompute_out"] else {1},
    ),
}
"""The rule of each operator ``torch.ops.anymamba.NAME``."""


def shardings(operator: str, *positional: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return the placements, on one dimension of a mesh, that an operator's results and arguments may have.

    Parameters
    ----------
    operator : str
        A key of `RULES`.
    *positional
        What the operator is called with; for a tensor anything with `shape`, `ndim` and `mesh`.

    Returns
    -------
    list of (list of Placement, list of Placement or None)
        Results and arguments, in order; None for an argument that is no tensor.
    """
    from torch.distributed.tensor import Replicate, Shard

    rule = RULES[operator]
    names = [argument.name for argument in getattr(torch.ops.anymamba, operator).default._schema.arguments]
    arguments = dict(zip(names, positional))
    letters = {name: _letters(rule, name, argument) for name, argument in arguments.items()}
    absent = rule.absent(arguments) | {
        place for place, output in enumerate(rule.outputs) if output.startswith("=") and letters[output[1:]] is None
    }
    ranks = next(argument.mesh.size() for name, argument in arguments.items() if letters[name] is not None)
    found: list[tuple[list[Any], list[Any]]] = [
        ([Replicate()] * len(rule.outputs), [None if one is None else Replicate() for one in letters.values()])
    ]
    for letter in rule.shardable:
        sharded = rule.together(arguments, letter, ranks)
        if sharded:
            outputs = [
                Replicate() if place in absent else _placed(_output(output, letters), sharded)
                for place, output in enumerate(rule.outputs)
            ]
            inputs = [
                None if one is None else Shard(_first(one, sharded)) if _first(one, sharded) >= 0 else Replicate()
                for one in letters.values()
            ]
            found.append((outputs, inputs))
    return found


def _letters(rule: Rule, name: str, argument: Any) -> str | None:
    """Return the letters of a tensor argument ("" of a placeholder), None of anything else."""
    if name not in rule.inputs or argument is None:
        return None
    if tuple(argument.shape) == (0,):
        return ""
    return next(letters for letters in rule.inputs[name] if len(letters) == argument.ndim)


def _output(output: str, letters: Mapping[str, str | None]) -> str:
    return letters[output[1:]] or "" if output.startswith("=") else output


def _first(letters: str, sharded: str) -> int:
    return next((place for place, letter in enumerate(letters) if letter in sharded), -1)


def _placed(letters: str, sharded: str) -> Any:
    from torch.distributed.tensor import Partial, Shard

    place = _first(letters, sharded)
    return Shard(place) if place >= 0 else Partial()


@functools.cache
def register() -> bool:
    """Tell PyTorch the rules, once; return whether this PyTorch takes any."""
    try:
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:  # before torch 2.6, or without distributed
        return False
    for operator in RULES:
        register_sharding(getattr(torch.ops.anymamba, operator).default)(functools.partial(shardings, operator))
    return True
