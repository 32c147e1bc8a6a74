"""SwiGLU: silu(x) * y, with x and y the two halves of one tensor's last dimension, as a gated MLP's first matrix gives it.

Names and arguments are those of mamba_ssm.ops.triton.k_activations (2.2.2 to 2.3.2).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from anymamba.backends import Operator, choose
from anymamba.errors import ShapeError
from anymamba.ops._checks import FLOATING, check_dtype
from anymamba.ops._library import (
    backward_where_forward_ran,
    below_autograd,
    define,
    differentiated,
    placeholder,
    traced,
)
from anymamba.ops._rows import as_rows, check_columns

__all__ = ["SwiGLU", "_swiglu_bwd", "_swiglu_fwd", "swiglu"]

SWIGLU = Operator("swiglu", family="swiglu", functions=("swiglu_forward", "swiglu_backward"))


class SwiGLUCall(NamedTuple):
    """What a backend may look at to accept or refuse."""

    device: torch.device
    dtype: torch.dtype


class SwiGLUBackend(Protocol):
    """What a backend's module `swiglu` provides. Inputs are already checked; any strides may come."""

    def swiglu_forward(self, xy: torch.Tensor) -> torch.Tensor:
        """Return (rows, dim) of xy (rows, 2 * dim), contiguous, in xy's dtype; computed in float32 (float64 for it)."""
        ...

    def swiglu_backward(
        self, xy: torch.Tensor, dout: torch.Tensor, recompute_out: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return dxy in the layout of ``torch.empty_like(xy)``, and the forward's output (None unless asked for)."""
        ...


def swiglu(xy: torch.Tensor) -> torch.Tensor:
    """Return ``silu(x) * y`` for ``x, y = xy.chunk(2, dim=-1)``.

    Parameters
    ----------
    xy : Tensor
        (..., 2 * dim); fp32, fp16, bf16 or fp64; any strides.

    Returns
    -------
    Tensor
        (..., dim), in xy's dtype.

    Raises
    ------
    ShapeError, DtypeError
        Before any work, naming the argument.
    """
    check_dtype("xy", xy, FLOATING)
    if check_columns("xy", xy) % 2:
        raise ShapeError(f"xy has shape {tuple(xy.shape)}, but its last dimension must be even: two halves.")
    rows = as_rows(xy)
    if traced(xy):
        out = torch.ops.anymamba.swiglu(rows)
    elif differentiated(xy):
        out = _SwiGLU.apply(rows)
    else:
        out = _forward(rows)
    result: torch.Tensor = out.reshape(*xy.shape[:-1], xy.shape[-1] // 2)
    return result


class SwiGLU:
    """Upstream's name for the autograd.Function; ``SwiGLU.apply`` is `swiglu`."""

    apply = staticmethod(swiglu)


# --- upstream's private pair; any leading dimensions


@torch.no_grad()
def _swiglu_fwd(xy: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    seen = _forward(as_rows(xy)).reshape(*xy.shape[:-1], xy.shape[-1] // 2)
    return seen if out is None else out.copy_(seen)


@torch.no_grad()
def _swiglu_bwd(
    xy: torch.Tensor,
    dout: torch.Tensor,
    dxy: torch.Tensor | None = None,
    recompute_output: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    gradient, seen = _backward(as_rows(xy), as_rows(dout), recompute_output)
    gradient = gradient.reshape(xy.shape) if dxy is None else dxy.copy_(gradient.reshape(xy.shape))
    if seen is None:
        return gradient
    seen = seen.reshape(dout.shape)
    return gradient, seen if out is None else out.copy_(seen)


@backward_where_forward_ran
class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, xy: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(xy)
        if not traced(xy):
            return _forward(xy)
        with below_autograd():
            out: torch.Tensor = torch.ops.anymamba.swiglu(xy)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> torch.Tensor:
        (xy,) = ctx.saved_tensors
        run: Any = torch.ops.anymamba.swiglu_backward if traced(xy) else _backward
        dxy: torch.Tensor = run(xy, dout, False)[0]
        return dxy


def _forward(xy: torch.Tensor) -> torch.Tensor:
    backend: SwiGLUBackend = choose(SWIGLU, SwiGLUCall(xy.device, xy.dtype))
    return backend.swiglu_forward(xy)


def _backward(xy: torch.Tensor, dout: torch.Tensor, recompute_out: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    backend: SwiGLUBackend = choose(SWIGLU, SwiGLUCall(xy.device, xy.dtype))
    return backend.swiglu_backward(xy, dout, recompute_out)


# --- torch.library


def _backward_op(xy: torch.Tensor, dout: torch.Tensor, recompute_out: bool) -> tuple[torch.Tensor, torch.Tensor]:
    dxy, out = _backward(xy, dout, recompute_out)
    return dxy, placeholder(xy) if out is None else out


def _forward_fake(xy: torch.Tensor) -> torch.Tensor:
    return xy.new_empty((xy.shape[0], xy.shape[1] // 2))


def _backward_fake(xy: torch.Tensor, dout: torch.Tensor, recompute_out: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(xy), _forward_fake(xy) if recompute_out else placeholder(xy)


define("swiglu(Tensor xy) -> Tensor", _forward, _forward_fake, autograd=_SwiGLU.apply)
define(
    "swiglu_backward(Tensor xy, Tensor dout, bool recompute_out) -> (Tensor, Tensor)",
    _backward_op,
    _backward_fake,
)
