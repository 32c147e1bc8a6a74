"""`causal_conv1d_cuda`: the extension module of causal_conv1d, every generation of its interface at once.

The interface changed four times; the number of positional arguments tells which one the caller was written for:

==========  =======  ========  ======  =====================================================================
upstream    forward  backward  update
==========  =======  ========  ======  =====================================================================
1.0         4        6         5       (x, weight, bias, ...)
1.1         5        7         5       + seq_idx
1.2-1.5.0   7        10        5-7     + initial and final states; update + cache_seqlens + conv_state_indices
1.5.1-1.7   8        12        8       results are written into tensors that the caller gives; returns None
==========  =======  ========  ======  =====================================================================

So any mamba_ssm, or a fork that vendors one, runs with any causal_conv1d. Arguments are positional, as in the compiled module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from anymamba.errors import OptionError
from anymamba.ops import causal_conv1d as _family
from anymamba.ops._checks import check_device, check_shape
from anymamba.ops._library import traced

__all__ = ["causal_conv1d_bwd", "causal_conv1d_fwd", "causal_conv1d_update"]


@torch.no_grad()
def causal_conv1d_fwd(*arguments: Any) -> torch.Tensor | None:
    """Convolve; return out, or None when `out` is among the arguments.

    Parameters
    ----------
    *arguments
        | 1.0: x, weight, bias, silu
        | 1.1: x, weight, bias, seq_idx, silu
        | 1.2-1.5.0: x, weight, bias, seq_idx, initial_states, final_states_out, silu
        | 1.5.1 on: x, weight, bias, seq_idx, initial_states, out, final_states_out, silu

        Shapes as in `anymamba.ops.causal_conv1d_fn`.
    """
    x, weight, bias, *rest = _arguments("causal_conv1d_fwd", arguments, (4, 5, 7, 8))
    seq_idx = initial_states = out = final_states_out = None
    silu = rest.pop()
    if len(arguments) >= 5:
        seq_idx = rest[0]
    if len(arguments) == 7:
        _, initial_states, final_states_out = rest
    elif len(arguments) == 8:
        _, initial_states, out, final_states_out = rest
    result = _family.causal_conv1d_fn(
        x,
        weight,
        bias,
        seq_idx,
        initial_states,
        return_final_states=final_states_out is not None,
        final_states_out=final_states_out,
        activation="silu" if silu else None,
    )
    fresh: torch.Tensor = result if final_states_out is None else result[0]
    if out is None:
        return fresh
    out.copy_(fresh)
    return None


@torch.no_grad()
def causal_conv1d_bwd(*arguments: Any) -> list[torch.Tensor | None] | None:
    """Return the gradients, or None when the tensors that receive them are among the arguments.

    Parameters
    ----------
    *arguments
        | 1.0: x, weight, bias, dout, dx, silu -> [dx, dweight, dbias]
        | 1.1: x, weight, bias, dout, seq_idx, dx, silu -> [dx, dweight, dbias]
        | 1.2-1.5.0: x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx, return_dinitial_states, silu
          -> [dx, dweight, dbias, dinitial_states]
        | 1.5.1 on: x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx, dweight, dbias, dinitial_states, silu
          -> None; the sums dweight and dbias are added to what the caller's fp32 tensors hold

        A `dx` that is given is written in place (it may be a slice of a larger buffer) and returned.
    """
    x, weight, bias, dout, *rest = _arguments("causal_conv1d_bwd", arguments, (6, 7, 10, 12))
    seq_idx = initial_states = dfinal_states = dx_out = None
    silu = bool(rest.pop())
    if len(arguments) == 6:
        (dx_out,) = rest
    elif len(arguments) == 7:
        seq_idx, dx_out = rest
    else:
        seq_idx, initial_states, dfinal_states, dx_out = rest[:4]
    check_shape("dout", dout, x.shape, "x's shape")
    check_device("dout", dout, x, "x")
    dx, dweight, dbias, dinitial = _backward(
        x, weight, bias, dout, seq_idx, initial_states, dfinal_states, silu, dx_out
    )
    if len(arguments) < 10:
        return [dx, dweight, dbias]
    if len(arguments) == 10:
        return_dinitial_states = rest[4]
        return [dx, dweight, dbias, dinitial if return_dinitial_states else None]
    for given, fresh in zip(rest[4:6], (dweight, dbias)):
        if given is not None and fresh is not None:
            given.add_(fresh)
    if rest[6] is not None and dinitial is not None:
        rest[6].copy_(dinitial)
    return None


@torch.no_grad()
def causal_conv1d_update(*arguments: Any) -> torch.Tensor | None:
    """Convolve the next columns and update conv_state in place; return out, or None when `out` is among the arguments.

    Parameters
    ----------
    *arguments
        | before 1.4: x, conv_state, weight, bias, silu
        | 1.4.0: x, conv_state, weight, bias, silu, cache_seqlens
        | 1.5.0: x, conv_state, weight, bias, silu, cache_seqlens, conv_state_indices
        | 1.5.1 on: x, conv_state, weight, bias, out, silu, cache_seqlens, conv_state_indices

        Shapes as in `anymamba.ops.causal_conv1d_update`.
    """
    x, conv_state, weight, bias, *rest = _arguments("causal_conv1d_update", arguments, (5, 6, 7, 8))
    out = rest.pop(0) if len(arguments) == 8 else None
    silu, cache_seqlens, conv_state_indices = [*rest, None, None][:3]
    fresh = _family.causal_conv1d_update(
        x, conv_state, weight, bias, "silu" if silu else None, cache_seqlens, conv_state_indices
    )
    if out is None:
        return fresh
    out.copy_(fresh)
    return None


def _arguments(function: str, arguments: Sequence[Any], counts: tuple[int, ...]) -> list[Any]:
    if len(arguments) not in counts:
        raise OptionError(
            f"{function} got {len(arguments)} arguments, but must get {', '.join(map(str, counts[:-1]))} or {counts[-1]}.",
            why="the number of arguments tells which generation of the interface the caller was written for",
            next_step="help(causal_conv1d_cuda) lists the generations",
        )
    return list(arguments)


def _backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dout: torch.Tensor,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    silu: bool,
    dx_out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    if not traced(x):
        return _family._backward(x, weight, bias, dout, seq_idx, initial_states, dfinal_states, silu, dx_out)
    dx, dweight, dbias, dinitial = torch.ops.anymamba.causal_conv1d_backward(
        x, weight, bias, dout, seq_idx, initial_states, dfinal_states, silu
    )
    return (
        dx if dx_out is None else dx_out.copy_(dx),
        dweight,
        None if bias is None else dbias,
        None if initial_states is None else dinitial,
    )
