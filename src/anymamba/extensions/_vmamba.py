"""What VMamba's extension modules share: the scan without gate, with the arguments that its kernels added.

They come from one family (`kernels/selective_scan` of the project, and copies of it in many others, such as Mamba-YOLO).
`nrows`, the rows that one block of the compiled kernels works on, changes no result: every value is taken.
"""

from __future__ import annotations

import torch

from anymamba.errors import OptionError, ShapeError
from anymamba.extensions import selective_scan_cuda

__all__ = ["backward", "forward"]


def forward(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    nrows: int,
    out_float: bool = False,
) -> list[torch.Tensor]:
    """Return [out, x] as `selective_scan_cuda.fwd` without z does; `out_float`: out in fp32, not rounded to u's dtype.

    delta and delta_bias may have fewer channels than u, if their number divides u's: neighbouring channels share them.
    """
    _check_rows(nrows)
    delta, delta_bias, _ = _for_every_channel(u, delta, delta_bias)
    if out_float:
        u = u.to(torch.promote_types(u.dtype, torch.float32))
    return selective_scan_cuda.fwd(u, delta, A, B, C, D, None, delta_bias, delta_softplus)


def backward(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    dout: torch.Tensor,
    x: torch.Tensor | None,
    delta_softplus: bool,
    nrows: int,
) -> list[torch.Tensor | None]:
    """Return [du, ddelta, dA, dB, dC, dD, ddelta_bias], each in its input's dtype and shape; dout in fp32 or u's dtype."""
    _check_rows(nrows)
    wide_delta, wide_bias, shared = _for_every_channel(u, delta, delta_bias)
    gradients = selective_scan_cuda.bwd(
        u, wide_delta, A, B, C, D, None, wide_bias, dout, x, None, None, delta_softplus, False
    )
    if shared == 1:
        return gradients
    ddelta, ddelta_bias = gradients[1], gradients[6]
    if ddelta is not None:
        gradients[1] = ddelta.unflatten(1, (-1, shared)).sum(2)
    if ddelta_bias is not None:
        gradients[6] = ddelta_bias.unflatten(0, (-1, shared)).sum(1)
    return gradients


def _for_every_channel(
    u: torch.Tensor, delta: torch.Tensor, delta_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Give each channel of u its own delta; return them and how many channels of u shared one."""
    if u.dim() != 3 or delta.dim() != 3 or delta.shape[1] == u.shape[1]:
        return delta, delta_bias, 1  # the scan checks the rest
    dim, own = u.shape[1], delta.shape[1]
    if own == 0 or dim % own:
        raise ShapeError(f"delta has {own} channels, but their number must divide u's: {dim}.")
    if delta_bias is not None and delta_bias.shape != (own,):
        raise ShapeError(
            f"delta_bias has shape {tuple(delta_bias.shape)}, but must have one value a channel of delta: ({own},)."
        )
    shared = dim // own
    wide_bias = None if delta_bias is None else delta_bias.repeat_interleave(shared, 0)
    return delta.repeat_interleave(shared, 1), wide_bias, shared


def _check_rows(nrows: int) -> None:
    if nrows < 1:
        raise OptionError(f"nrows is {nrows}, but must be at least 1.")
