"""`selective_scan_cuda`: the extension module of mamba_ssm, whose interface is the same from 1.0.1 to the newest.

Beside the outputs, `fwd` returns `x` (batch, dim, chunks of 2048 steps, 2 * dstate): at the end of each chunk, for each state
the product of all decays so far and the state itself, interleaved, so that ``x[:, :, -1, 1::2]`` is the last state. Our
backward wants a state every CHECKPOINT_LENGTH steps: they lie behind x in the same storage, where autograd's saving keeps
them; an x from elsewhere serves too, then they are computed again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from anymamba.ops import selective_scan as _family
from anymamba.ops._checks import check_device, check_shape
from anymamba.ops._library import traced
from anymamba.ops.selective_scan import CHECKPOINT_LENGTH, real_dtype

__all__ = ["bwd", "fwd"]

_CHUNK = 2048


@torch.no_grad()
def fwd(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
) -> list[torch.Tensor]:
    """Scan; return [out, x], or [out, x, out_z] with z.

    out, before the gate, has u's dtype and delta's layout; out_z, after it, has z's layout. Shapes and dtypes are those of
    `anymamba.ops.selective_scan_fn`; B and C vary with (batch, groups, dstate, seqlen) or are constant (dim, dstate).
    """
    _family._check(u, delta, A, B, C, D, z, delta_bias, None)
    dtype = u.dtype
    if z is not None and dtype in (torch.float16, torch.bfloat16):
        u = u.float()  # so that out_z is rounded once, not from a rounded out
    call = _family._normalised(u, delta, A, B, C, D, None, delta_bias, bool(delta_softplus), None)
    run: Any = torch.ops.anymamba.selective_scan if traced(u) else _family._forward
    y, last_state, checkpoints = run(*call, True)
    out = torch.empty_like(delta, dtype=dtype).copy_(y)
    x = _chunk_ends(call, last_state, checkpoints)
    if z is None:
        return [out, x]
    gate = F.silu(z.to(torch.promote_types(z.dtype, torch.float32)))
    return [out, x, torch.empty_like(z, dtype=dtype).copy_(y * gate)]


@torch.no_grad()
def bwd(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    dout: torch.Tensor,
    x: torch.Tensor | None,
    out: torch.Tensor | None,
    dz: torch.Tensor | None,
    delta_softplus: bool,
    recompute_out_z: bool,
) -> list[torch.Tensor | None]:
    """Return [du, ddelta, dA, dB, dC, dD, ddelta_bias], then dz if z is given, then out_z if `recompute_out_z`.

    dout is the gradient of out, or of out_z if z is given. Each gradient has its input's dtype; absent inputs have None.
    `dz`, if given, is written and returned: it may be a slice of a larger buffer. `out` and `x` are not needed (a scan of
    more than 2048 steps without x is upstream's error, not ours).
    """
    _family._check(u, delta, A, B, C, D, z, delta_bias, None)
    check_shape("dout", dout, u.shape, "(batch, dim, seqlen)")
    check_device("dout", dout, u, "u")
    if dz is not None and z is not None:
        check_shape("dz", dz, z.shape, "(batch, dim, seqlen)")
        check_device("dz", dz, u, "u")
    call = _family._normalised(u, delta, A, B, C, D, z, delta_bias, bool(delta_softplus), None)
    checkpoints = None if x is None or traced(x) else _checkpoints_behind(x, u, A)
    if traced(u):
        du, ddelta, dA, dB, dC, dD, dz_found, ddelta_bias, _ = torch.ops.anymamba.selective_scan_backward(
            *call, checkpoints, dout, None
        )
        out_z = fwd(u, delta, A, B, C, D, z, delta_bias, delta_softplus)[-1] if recompute_out_z else None
    else:
        run: Any = _family._backward
        fits = z is not None and dz is not None and dz.dtype == call[6].dtype
        du, ddelta, dA, dB, dC, dD, dz_found, ddelta_bias, _, out_z = run(
            *call, checkpoints, dout, None, return_out=bool(recompute_out_z), dz_out=dz if fits else None
        )
    result: list[torch.Tensor | None] = [
        du.to(u.dtype),
        ddelta.to(delta.dtype),
        dA.to(A.dtype),
        dB.to(B.dtype).view(B.shape),
        dC.to(C.dtype).view(C.shape),
        None if D is None else dD.to(D.dtype),
        None if delta_bias is None else ddelta_bias.to(delta_bias.dtype),
    ]
    if z is not None:
        if dz is None:
            dz = dz_found.to(z.dtype)
        elif dz_found is not dz:
            dz.copy_(dz_found)
        result.append(dz)
    if recompute_out_z:
        result.append(None if z is None or out_z is None else out_z.to(u.dtype))
    return result


def _chunk_ends(call: tuple[Any, ...], last_state: torch.Tensor, checkpoints: torch.Tensor) -> torch.Tensor:
    """Return x, with the checkpoints behind it in its storage."""
    _, delta, A, _, _, _, _, delta_bias, delta_softplus, _ = call
    batch, dim, seqlen = delta.shape
    chunks, dstate = (seqlen + _CHUNK - 1) // _CHUNK, A.shape[1]
    size = batch * dim * chunks * 2 * dstate
    storage = A.new_empty(size + checkpoints.numel())
    storage[size:].view(checkpoints.shape).copy_(checkpoints)
    x: torch.Tensor = storage[:size].view(batch, dim, chunks, 2 * dstate)
    if not chunks:
        return x
    step = delta.to(real_dtype(A.dtype))
    if delta_bias is not None:
        step = step + delta_bias[:, None]
    if delta_softplus:
        step = F.softplus(step)
    lengths = F.pad(step, (0, chunks * _CHUNK - seqlen)).unflatten(-1, (chunks, _CHUNK)).sum(-1).cumsum(-1)
    x[..., 0::2] = torch.exp(lengths.unsqueeze(-1) * A.unsqueeze(1))
    x[:, :, :-1, 1::2] = checkpoints[:, :, _CHUNK // CHECKPOINT_LENGTH :: _CHUNK // CHECKPOINT_LENGTH]
    x[:, :, -1, 1::2] = last_state
    return x


def _checkpoints_behind(x: torch.Tensor, u: torch.Tensor, A: torch.Tensor) -> torch.Tensor | None:
    """Return the checkpoints that `fwd` put behind x, or None if this x has none."""
    batch, dim, seqlen = u.shape
    shape = (batch, dim, (seqlen + CHECKPOINT_LENGTH - 1) // CHECKPOINT_LENGTH, A.shape[1])
    wanted = x.numel() + batch * dim * shape[2] * shape[3]
    if x.storage_offset() or not x.is_contiguous() or x.untyped_storage().nbytes() != wanted * x.element_size():
        return None
    if x.dtype != _family.state_dtype(u, A):
        return None
    behind: torch.Tensor = x.as_strided((wanted - x.numel(),), (1,), x.numel())
    return behind.view(shape)
