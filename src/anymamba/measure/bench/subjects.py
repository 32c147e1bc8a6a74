"""What is measured: blocks and operators as functions of the batch, the length and the model's width, and the presets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from anymamba.errors import OptionError
from anymamba.measure.accuracy import GRADIENT_BOUND, OUTPUT_BOUND
from anymamba.measure.bench import blocks
from anymamba.measure.cases import Draw, causal_conv1d, selective_scan, selective_state_update, ssd
from anymamba.ops import mamba_inner_fn
from anymamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from anymamba.ops.layer_norm import layer_norm_fn
from anymamba.ops.layernorm_gated import layernorm_fn as gated_norm_fn
from anymamba.ops.layernorm_gated import rmsnorm_fn
from anymamba.ops.mamba_split_conv1d_scan import mamba_split_conv1d_scan_combined
from anymamba.ops.selective_scan import selective_scan_fn
from anymamba.ops.selective_state_update import selective_state_update as state_update
from anymamba.ops.ssd import mamba_chunk_scan_combined
from anymamba.ops.swiglu import swiglu

__all__ = ["BOTH", "FORWARD", "PRESETS", "STEP", "SUBJECTS", "Size", "Subject", "Work", "preset"]

FORWARD, BOTH, STEP = "forward", "forward + backward", "decoding step"


class Size(NamedTuple):
    """A batch of sequences of this length for a model of this width (d_model)."""

    batch: int
    length: int
    width: int

    def __str__(self) -> str:
        """Say it in a few characters."""
        return f"B{self.batch} L{self.length} d{self.width}" if self.length else f"B{self.batch} d{self.width}"


@dataclass(frozen=True)
class Subject:
    """Something to measure.

    Parameters
    ----------
    name : str
    ours : callable
        Called with the arguments by name.
    arguments : callable
        Makes them from a Draw and batch, length, width.
    check : Size
        The size at which an implementation is compared with the float64 reference.
    steps : bool
        A decoding step: no length, no backward.
    changed : tuple of str
        Arguments updated in place.
    flops : callable
        Multiplications and additions of the matrix products, of a Size; 0 for operators without.
    output_bounds, gradient_bounds : mapping
        How far from the truth is right, by dtype.
    """

    name: str
    ours: Callable[..., Any]
    arguments: Callable[[Draw, int, int, int], dict[str, Any]]
    check: Size
    steps: bool = False
    changed: tuple[str, ...] = ()
    flops: Callable[[Size], float] = lambda size: 0.0
    output_bounds: Mapping[torch.dtype, float] = field(default_factory=lambda: OUTPUT_BOUND)
    gradient_bounds: Mapping[torch.dtype, float] = field(default_factory=lambda: GRADIENT_BOUND)


@dataclass(frozen=True)
class Work:
    """A subject at a size in one direction: what all implementations are measured at side by side."""

    subject: Subject
    size: Size
    direction: str


# A block rounds to its dtype after each part: several roundings instead of one; in float32 its matrix products are long sums.
_BLOCK = {torch.float64: 1e-10, torch.float32: 3e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def _mamba_flops(size: Size) -> float:
    dim, rank = 2 * size.width, -(-size.width // 16)
    a_token = size.width * 2 * dim + dim * (rank + 2 * blocks.DSTATE) + rank * dim + dim * size.width
    return 2.0 * size.batch * max(size.length, 1) * a_token


def _mamba2_flops(size: Size) -> float:
    dim = 2 * size.width
    a_token = size.width * (2 * dim + 2 * blocks.DSTATE2 + dim // blocks.HEADDIM) + dim * size.width
    return 2.0 * size.batch * max(size.length, 1) * a_token


def _norm(draw: Draw, batch: int, length: int, width: int) -> dict[str, Any]:
    """As before each block of a model: the residual is added and handed on in float32."""
    return {
        "x": draw.normal(batch, length, width), "weight": draw.normal(width, dtype=draw.wide), "bias": None,
        "residual": draw.normal(batch, length, width, dtype=draw.wide), "prenorm": True, "residual_in_fp32": True,
        "is_rms_norm": True,
    }  # fmt: skip


def _gated_norm(draw: Draw, batch: int, length: int, width: int) -> dict[str, Any]:
    """As within a Mamba-2 block, over all its channels."""
    return {
        "x": draw.normal(batch, length, 2 * width), "weight": draw.normal(2 * width, dtype=draw.wide), "bias": None,
        "z": draw.normal(batch, length, 2 * width), "eps": 1e-5, "norm_before_gate": False, "is_rms_norm": True,
    }  # fmt: skip


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject(
            "Mamba block", blocks.mamba_block(mamba_inner_fn), blocks.mamba_arguments, Size(2, 37, 32),
            flops=_mamba_flops, output_bounds=_BLOCK, gradient_bounds=_BLOCK,
        ),
        Subject(
            "Mamba-2 block", blocks.mamba2_block(mamba_split_conv1d_scan_combined), blocks.mamba2_arguments,
            Size(1, 37, 256), flops=_mamba2_flops, output_bounds=_BLOCK, gradient_bounds=_BLOCK,
        ),
        Subject(
            "Mamba block step", blocks.mamba_step(causal_conv1d_update, state_update), blocks.mamba_step_arguments,
            Size(2, 0, 32), steps=True, changed=("conv_state", "ssm_state"), flops=_mamba_flops, output_bounds=_BLOCK,
        ),
        Subject(
            "Mamba-2 block step", blocks.mamba2_step(causal_conv1d_update, state_update, rmsnorm_fn),
            blocks.mamba2_step_arguments, Size(2, 0, 64), steps=True, changed=("conv_state", "ssm_state"),
            flops=_mamba2_flops, output_bounds=_BLOCK,
        ),
        Subject(
            "selective_scan", selective_scan_fn,
            lambda draw, b, l, w: selective_scan.mamba(draw, b, 2 * w, 16, l) | {"return_last_state": False},
            Size(2, 37, 8),
        ),
        Subject(
            "causal_conv1d", causal_conv1d_fn, lambda draw, b, l, w: causal_conv1d.mamba(draw, b, 2 * w, l),
            Size(2, 37, 16),
        ),
        Subject(
            "ssd", mamba_chunk_scan_combined,
            lambda draw, b, l, w: ssd.mamba2(draw, b, l, max(2 * w // 64, 1), 64, 128), Size(1, 37, 64),
        ),
        Subject(
            "selective_state_update", state_update,
            lambda draw, b, l, w: selective_state_update.mamba(draw, b, 2 * w, 16), Size(2, 0, 16), steps=True,
            changed=("state",),
        ),
        Subject(
            "causal_conv1d_update", causal_conv1d_update, lambda draw, b, l, w: causal_conv1d.step(draw, b, 2 * w),
            Size(2, 0, 16), steps=True, changed=("conv_state",),
        ),
        Subject("rms_norm with residual", layer_norm_fn, _norm, Size(2, 7, 32)),
        Subject("gated rms_norm", gated_norm_fn, _gated_norm, Size(2, 7, 32)),
        Subject("swiglu", swiglu, lambda draw, b, l, w: {"xy": draw.normal(b, l, 4 * w)}, Size(2, 7, 32)),
    )
}  # fmt: skip

_BLOCKS = ("Mamba block", "Mamba-2 block")
# name: subjects, [(batch, length on a CPU, length on a card)], directions
PRESETS: dict[str, tuple[tuple[str, ...], tuple[tuple[int, int, int], ...], tuple[str, ...]]] = {
    "guide": (("Mamba block",), ((32, 256, 256),), (FORWARD, BOTH)),
    "short": (_BLOCKS, ((8, 128, 128),), (FORWARD, BOTH)),
    "long": (_BLOCKS, ((1, 512, 2048), (1, 1024, 8192), (1, 2048, 32768)), (FORWARD, BOTH)),
    "decode": (
        ("Mamba block step", "Mamba-2 block step", "selective_state_update", "causal_conv1d_update"),
        ((1, 0, 0), (16, 0, 0)),
        (STEP,),
    ),
    "ops": (
        (
            "selective_scan",
            "causal_conv1d",
            "ssd",
            "rms_norm with residual",
            "gated rms_norm",
            "swiglu",
            "selective_state_update",
            "causal_conv1d_update",
        ),
        ((2, 256, 2048),),
        (FORWARD, BOTH, STEP),
    ),
}


def preset(
    name: str, *, card: bool, batch: int | None = None, length: int | None = None, width: int | None = None
) -> list[Work]:
    """Return the work of a preset.

    Parameters
    ----------
    name : str
        guide, short, long, decode or ops.
    card : bool
        Sizes for a GPU; otherwise those a CPU does in seconds.
    batch, length, width : int, optional
        Instead of the preset's own. The width (d_model) is 1024 on a card, else 64.

    Raises
    ------
    OptionError
        If there is no such preset or a size is not positive.
    """
    if name not in PRESETS:
        raise OptionError(f"--preset is {name!r}, but must be one of {', '.join(PRESETS)}.")
    for option, value in (("--batch", batch), ("--length", length), ("--width", width)):
        if value is not None and value < 1:
            raise OptionError(f"{option} is {value}, but must be at least 1.")
    if width is not None and width % 32:
        raise OptionError(
            f"--width is {width}, but must be a multiple of 32: a Mamba-2 head has 64 of 2 * width channels."
        )
    names, sizes, directions = PRESETS[name]
    found: dict[tuple[str, Size, str], Work] = {}
    for subject in (SUBJECTS[subject] for subject in names):
        for b, on_cpu, on_card in sizes:
            chosen = 0 if subject.steps else length or (on_card if card else on_cpu)
            size = Size(batch or b, chosen, width or (1024 if card else 64))
            for direction in directions:
                if (direction == STEP) == subject.steps:
                    found.setdefault((subject.name, size, direction), Work(subject, size, direction))
    return list(found.values())
