"""The steps of the chunked state-space dual scan, one by one, as upstream's kernels divide it.

    dA_cumsum, dt = _chunk_cumsum_fwd(dt, A, chunk_size)       step sizes and the decay within each chunk
    states        = chunk_state(B, x, dt, dA_cumsum)           what each chunk alone leaves behind
    states, final = state_passing(states, dA_cumsum[..., -1])  the state before each chunk, and after the last
    out           = chunk_scan(B, C, x, dt, dA_cumsum, states) output of each chunk, given the state before it

`mamba_chunk_scan_combined` does not use them: they are here for code that imports them (context parallelism, tests). They
are plain differentiable PyTorch on any device. Names, arguments, shapes and dtypes are those of mamba_ssm.ops.triton's
ssd_chunk_state, ssd_chunk_scan, ssd_state_passing, ssd_bmm and ssd_combined (2.2.2 to 2.3.2), the private ones that callers
import included. nchunks = ceil(seqlen / chunk_size); sums are float32, or float64 where an input is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from anymamba.ops import ssd
from anymamba.ops._autocast import without_autocast
from anymamba.ops._linear import einsum
from anymamba.ops.causal_conv1d import causal_conv1d_fn
from anymamba.ops.selective_scan import selective_scan_fn

__all__ = [
    "ChunkScanFn",
    "ChunkStateFn",
    "StatePassingFn",
    "_bmm_chunk_bwd",
    "_bmm_chunk_fwd",
    "_chunk_cumsum_bwd",
    "_chunk_cumsum_fwd",
    "_chunk_scan_fwd",
    "_chunk_state_fwd",
    "_mamba_chunk_scan_combined_bwd",
    "_mamba_chunk_scan_combined_fwd",
    "_state_passing_bwd",
    "_state_passing_fwd",
    "chunk_scan",
    "chunk_scan_ref",
    "chunk_state",
    "chunk_state_ref",
    "chunk_state_varlen",
    "ensure_stride",
    "mamba_conv1d_scan_ref",
    "selective_scan_bwd",
    "ssd_chunk_scan_combined_ref",
    "ssd_selective_scan",
    "state_passing",
    "state_passing_ref",
]

INFINITY = float("inf")


# --- ssd_chunk_state


def _chunk_cumsum_fwd(
    dt: torch.Tensor,
    A: torch.Tensor,
    chunk_size: int,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, INFINITY),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dA_cumsum and the step sizes, both (batch, nheads, nchunks, chunk_size); steps past seqlen are zero."""
    compute = _compute(dt, A)
    step = dt.to(compute)
    if dt_bias is not None:
        step = step + dt_bias.to(compute)
    if dt_softplus:
        step = F.softplus(step)
    step = _cut(step.clamp(*dt_limit), chunk_size).permute(0, 3, 1, 2)
    return (step * A.to(compute)[:, None, None]).cumsum(-1), step.contiguous()


def _chunk_cumsum_bwd(
    ddA: torch.Tensor,
    ddt_out: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, INFINITY),
    ddt: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return ddt, dA, ddt_bias, given the gradients of dA (not of its sum) and of the step sizes."""
    compute = _compute(dt, A, ddA)
    with torch.enable_grad():
        leaves = [dt.detach().to(compute).requires_grad_(), A.detach().to(compute).requires_grad_()]
        if dt_bias is not None:
            leaves.append(dt_bias.detach().to(compute).requires_grad_())
        bias = leaves[2] if dt_bias is not None else None
        _, step = _chunk_cumsum_fwd(leaves[0], leaves[1], ddA.shape[-1], bias, dt_softplus, dt_limit)
        decay = step * leaves[1][:, None, None]
    found = torch.autograd.grad([decay, step], leaves, [ddA.to(compute), ddt_out.to(compute)])
    ddt = torch.empty_like(dt).copy_(found[0]) if ddt is None else ddt.copy_(found[0])
    return ddt, found[1], found[2] if dt_bias is not None else None


def _chunk_state_fwd(
    B: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    dA_cumsum: torch.Tensor,
    seq_idx: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
    states_in_fp32: bool = True,
) -> torch.Tensor:
    """Return the states (batch, nchunks, nheads, headdim, dstate) that each chunk alone leaves behind.

    With `seq_idx` only tokens of the chunk's last sequence count. `states` receives the result.
    """
    chunk_size, compute = dt.shape[-1], _compute(B, x, dt, dA_cumsum)
    left = torch.exp(dA_cumsum[..., -1:] - dA_cumsum).to(compute) * dt.to(compute)
    if seq_idx is not None:
        owner = _cut_owner(seq_idx, chunk_size)
        left = left * (owner == owner[..., -1:]).unsqueeze(1)
    with without_autocast(x.device.type):
        groups = B.shape[2]
        driven = _cut(x.to(compute), chunk_size) * left.permute(0, 2, 3, 1).unsqueeze(-1)
        found = einsum(
            "bclgkp,bclgn->bcgkpn", driven.unflatten(3, (groups, -1)), _cut(B.to(compute), chunk_size)
        ).flatten(2, 3)
    if states is not None:
        return states.copy_(found)
    return found if states_in_fp32 else found.to(B.dtype)


def chunk_state(
    B: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, dA_cumsum: torch.Tensor, states_in_fp32: bool = True
) -> torch.Tensor:
    """Return the states that each chunk alone leaves behind.

    Parameters
    ----------
    B : Tensor
        (batch, seqlen, ngroups, dstate).
    x : Tensor
        (batch, seqlen, nheads, headdim).
    dt, dA_cumsum : Tensor
        (batch, nheads, nchunks, chunk_size).
    states_in_fp32 : bool
        Return float32 instead of B's dtype.

    Returns
    -------
    Tensor
        (batch, nchunks, nheads, headdim, dstate).
    """
    return _chunk_state_fwd(B, x, dt, dA_cumsum, states_in_fp32=states_in_fp32)


def chunk_state_ref(B: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, dA_cumsum: torch.Tensor) -> torch.Tensor:
    """Compute `chunk_state` in x's own dtype."""
    chunk_size, ratio = dt.shape[-1], x.shape[2] // B.shape[2]
    left = torch.exp(dA_cumsum[..., -1:] - dA_cumsum).to(x.dtype)
    columns = _cut(B.repeat_interleave(ratio, dim=2).to(x.dtype), chunk_size)
    return einsum("bclhn,bhcl,bhcl,bclhp->bchpn", columns, left, dt.to(x.dtype), _cut(x, chunk_size))


def chunk_state_varlen(
    B: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    dA_cumsum: torch.Tensor,
    cu_seqlens: torch.Tensor,
    chunk_states: torch.Tensor,
) -> torch.Tensor:
    """Return the state at the end of each packed sequence.

    Parameters
    ----------
    B : Tensor
        (total_seqlen, ngroups, dstate).
    x : Tensor
        (total_seqlen, nheads, headdim).
    dt, dA_cumsum : Tensor
        (nheads, nchunks, chunk_size).
    cu_seqlens : Tensor
        (sequences + 1), integer.
    chunk_states : Tensor
        (nchunks, nheads, headdim, dstate): the state before each chunk.

    Returns
    -------
    Tensor
        (sequences, nheads, headdim, dstate) in the dtype of `chunk_states`; zero for an empty sequence.
    """
    chunk_size, groups, compute = dt.shape[-1], B.shape[1], _compute(B, x, dt, dA_cumsum)
    bounds = cu_seqlens.tolist()
    found = []
    with without_autocast(x.device.type):
        for start, end in zip(bounds[:-1], bounds[1:]):
            chunk = (end - 1) // chunk_size
            first = chunk * chunk_size
            here = slice(max(start, first) - first, end - first)  # of the chunk in which the sequence ends
            if end <= start:
                found.append(torch.zeros_like(chunk_states[0]))
                continue
            sums = dA_cumsum[:, chunk].to(compute)
            at_end = sums[:, here.stop - 1]
            left = torch.exp(at_end[:, None] - sums[:, here]) * dt[:, chunk, here].to(compute)
            tokens = slice(first + here.start, end)
            driven = x[tokens].to(compute) * left.t().unsqueeze(-1)
            state = einsum("lgkp,lgn->gkpn", driven.unflatten(1, (groups, -1)), B[tokens].to(compute))
            state = state.flatten(0, 1)
            if start < first or start == 0:  # the very first chunk's state is the initial one (upstream leaves it out)
                state = state + chunk_states[chunk].to(compute) * torch.exp(at_end)[:, None, None]
            found.append(state.to(chunk_states.dtype))
    return torch.stack(found) if found else chunk_states.new_zeros((0, *chunk_states.shape[1:]))


# --- ssd_state_passing


def _state_passing_fwd(
    states: torch.Tensor,
    dA_chunk_cumsum: torch.Tensor,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    chunk_size: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states before each chunk, like `states`, and those after the last (batch, nheads, dim), float32."""
    compute = _compute(states, dA_chunk_cumsum)
    passing = _passing(dA_chunk_cumsum, seq_idx, chunk_size).to(compute)
    state = torch.zeros_like(states[:, 0], dtype=compute) if initial_states is None else initial_states.to(compute)
    before = []
    for chunk in range(states.shape[1]):
        before.append(state)
        state = torch.addcmul(states[:, chunk].to(compute), passing[:, :, chunk, None], state)
    return torch.stack(before, dim=1).to(states.dtype if out_dtype is None else out_dtype), state


def _state_passing_bwd(
    states: torch.Tensor,
    dA_chunk_cumsum: torch.Tensor,
    dout: torch.Tensor,
    dfinal_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    has_initial_states: bool | None = None,
    dstates_dtype: torch.dtype | None = None,
    states_dtype: torch.dtype | None = None,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return dstates, ddA_chunk_cumsum, dinitial_states, and with `states_dtype` the states in it.

    `states` are those before each chunk, as the forward returned them.
    """
    compute = _compute(states, dA_chunk_cumsum)
    passing = _passing(dA_chunk_cumsum, seq_idx, chunk_size).to(compute)
    gradient = torch.zeros_like(dout[:, 0], dtype=compute) if dfinal_states is None else dfinal_states.to(compute)
    dstates = torch.empty_like(dout, dtype=dstates_dtype or dout.dtype)
    ddecay = torch.empty_like(dA_chunk_cumsum)
    for chunk in reversed(range(states.shape[1])):
        dstates[:, chunk] = gradient
        ddecay[:, :, chunk] = passing[:, :, chunk] * (states[:, chunk].to(compute) * gradient).sum(-1)
        gradient = passing[:, :, chunk, None] * gradient + dout[:, chunk].to(compute)
    found = (dstates, ddecay, gradient.to(dstates.dtype) if has_initial_states else None)
    return found if states_dtype is None else (*found, states.to(states_dtype))


def state_passing(
    states: torch.Tensor, dA_chunk_cumsum: torch.Tensor, initial_states: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pass states from chunk to chunk.

    Parameters
    ----------
    states : Tensor
        (batch, nchunks, nheads, dim): what each chunk alone leaves behind.
    dA_chunk_cumsum : Tensor
        (batch, nheads, nchunks): the logarithm of each chunk's decay.
    initial_states : Tensor, optional
        (batch, nheads, dim).

    Returns
    -------
    Tensor, Tensor
        The states before each chunk (batch, nchunks, nheads, dim) and after the last (batch, nheads, dim).
    """
    return _state_passing_fwd(states, dA_chunk_cumsum, initial_states)


def state_passing_ref(
    states: torch.Tensor, dA_chunk_cumsum: torch.Tensor, initial_states: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `state_passing` as one product with the matrix of all decays, in the states' own dtype."""
    first = torch.zeros_like(states[:, :1]) if initial_states is None else initial_states.unsqueeze(1)
    every = torch.cat([first.to(states.dtype), states], dim=1)
    decay = _decay(F.pad(dA_chunk_cumsum, (1, 0)).cumsum(-1))
    passed = einsum("bhzc,bchd->bzhd", decay.to(states.dtype), every)
    return passed[:, :-1], passed[:, -1]


# --- ssd_bmm


def _bmm_chunk_fwd(
    a: torch.Tensor,
    b: torch.Tensor,
    chunk_size: int,
    seq_idx: torch.Tensor | None = None,
    causal: bool = False,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return a b^T within each chunk: (batch, nchunks[, ngroups], chunk_size, chunk_size), for (batch, seqlen[, ngroups], k).

    Zero between tokens of different sequences. With `causal` upstream leaves the upper triangle undefined; here it is not.
    """
    compute = _compute(a, b)
    spec = "bclk,bcsk->bcls" if a.dim() == 3 else "bclgk,bcsgk->bcgls"
    with without_autocast(a.device.type):
        found = einsum(spec, _cut(a.to(compute), chunk_size), _cut(b.to(compute), chunk_size))
    if seq_idx is not None:
        owner = _cut_owner(seq_idx, chunk_size)
        same = owner.unsqueeze(-1) == owner.unsqueeze(-2)
        found = found * (same if a.dim() == 3 else same.unsqueeze(2))
    return found.to(a.dtype if output_dtype is None else output_dtype)


def _bmm_chunk_bwd(
    a: torch.Tensor, dout: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the gradient of b, like a, given that of a b^T; plus `residual`. `out` receives it."""
    compute = _compute(a, dout)
    spec = "bcls,bclk->bcsk" if a.dim() == 3 else "bcgls,bclgk->bcsgk"
    with without_autocast(a.device.type):
        found = einsum(spec, dout.to(compute), _cut(a.to(compute), dout.shape[-1]))
    found = found.flatten(1, 2)[:, : a.shape[1]]
    if residual is not None:
        found = found + residual.to(compute)
    return found.to(a.dtype) if out is None else out.copy_(found)


# --- ssd_chunk_scan


def _chunk_scan_fwd(
    cb: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    dA_cumsum: torch.Tensor,
    C: torch.Tensor,
    states: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out (batch, seqlen, nheads, headdim), and without the gate z again (None if there is no z).

    `cb` is `_bmm_chunk_fwd` of C and B (and of `seq_idx`), `states` those before each chunk.
    """
    chunk_size, groups, compute = dt.shape[-1], C.shape[2], _compute(x, dt, dA_cumsum, C)
    sums = dA_cumsum.to(compute)
    entering = sums.exp()
    if seq_idx is not None:
        owner = _cut_owner(seq_idx, chunk_size)
        before = torch.cat([seq_idx[:, :1], owner[:, :-1, -1]], dim=1)  # the sequence of the token before each chunk
        entering = entering * (owner == before.unsqueeze(-1)).unsqueeze(1)
    with without_autocast(x.device.type):
        scores = (_decay(sums) * dt.to(compute).unsqueeze(-2)).unflatten(1, (groups, -1)).permute(0, 3, 1, 2, 4, 5)
        scores = scores * cb.to(compute).unsqueeze(3)
        inputs = _cut(x.to(compute), chunk_size).unflatten(3, (groups, -1))
        y = einsum("bcgkls,bcsgkp->bclgkp", scores, inputs)
        columns, states = _cut(C.to(compute), chunk_size), states.to(compute).unflatten(2, (groups, -1))
        from_state = einsum("bclgn,bcgkpn->bclgkp", columns, states).flatten(3, 4)
    y = y.flatten(3, 4) + from_state * entering.permute(0, 2, 3, 1).unsqueeze(-1)
    y = y.flatten(1, 2)[:, : x.shape[1]]
    if D is not None:
        skip = D.to(compute)
        y = y + x.to(compute) * (skip if skip.dim() == 2 else skip[:, None])
    if z is None:
        return y.to(x.dtype), None
    return (y * F.silu(z.to(compute))).to(x.dtype), y.to(x.dtype)


def chunk_scan(
    B: torch.Tensor,
    C: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    dA_cumsum: torch.Tensor,
    prev_states: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output of each chunk, given the state before it.

    Parameters
    ----------
    B, C : Tensor
        (batch, seqlen, ngroups, dstate).
    x, z : Tensor
        (batch, seqlen, nheads, headdim); z may be None.
    dt, dA_cumsum : Tensor
        (batch, nheads, nchunks, chunk_size).
    prev_states : Tensor
        (batch, nchunks, nheads, headdim, dstate).
    D : Tensor, optional
        (nheads, headdim) or (nheads).

    Returns
    -------
    Tensor
        Like x.
    """
    within = _bmm_chunk_fwd(C, B, dt.shape[-1], output_dtype=_compute(C, B))
    return _chunk_scan_fwd(within, x, dt, dA_cumsum, C, prev_states, D, z)[0]


def chunk_scan_ref(
    B: torch.Tensor,
    C: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    dA_cumsum: torch.Tensor,
    prev_states: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `chunk_scan` with products in the inputs' own dtypes."""
    chunk_size, ratio = dt.shape[-1], x.shape[2] // B.shape[2]
    rows, columns = (_cut(tensor.repeat_interleave(ratio, dim=2), chunk_size) for tensor in (C, B))
    scores = einsum("bclhn,bcshn->bchls", rows, columns) * _decay(dA_cumsum).transpose(1, 2)
    y = einsum("bchls,bhcs,bcshp->bclhp", scores.to(x.dtype), dt.to(x.dtype), _cut(x, chunk_size))
    from_state = einsum("bclhn,bchpn->bclhp", rows, prev_states.to(C.dtype))
    y = y + from_state * dA_cumsum.exp().permute(0, 2, 3, 1).unsqueeze(-1)
    y = y.flatten(1, 2)[:, : x.shape[1]]
    if D is not None:
        y = y + x * (D if D.dim() == 2 else D[:, None])
    return y if z is None else y * F.silu(z)


# --- ssd_combined


def _mamba_chunk_scan_combined_fwd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, INFINITY),
) -> tuple[torch.Tensor | None, ...]:
    """Return out, out before the gate (None without z), dt, dA_cumsum, states, final_states, and with cu_seqlens theirs."""
    dA_cumsum, step = _chunk_cumsum_fwd(dt, A, chunk_size, dt_bias, dt_softplus, dt_limit)
    alone = _chunk_state_fwd(B, x, step, dA_cumsum, seq_idx)
    flat = None if initial_states is None else initial_states.flatten(-2)
    states, final_states = _state_passing_fwd(
        alone.flatten(-2), dA_cumsum[..., -1], flat, seq_idx, chunk_size, out_dtype=C.dtype
    )
    states, final_states = states.view(alone.shape), final_states.view(x.shape[0], *alone.shape[2:])
    within = _bmm_chunk_fwd(C, B, chunk_size, seq_idx, output_dtype=_compute(C, B))
    out, ungated = _chunk_scan_fwd(within, x, step, dA_cumsum, C, states, D, z, seq_idx)
    found = (out, ungated, step, dA_cumsum, states, final_states)
    if cu_seqlens is None:
        return found
    return *found, chunk_state_varlen(B[0], x[0], step[0], dA_cumsum[0], cu_seqlens, states[0])


def _mamba_chunk_scan_combined_bwd(
    dout: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    out: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dfinal_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, INFINITY),
    dx: torch.Tensor | None = None,
    ddt: torch.Tensor | None = None,
    dB: torch.Tensor | None = None,
    dC: torch.Tensor | None = None,
    dz: torch.Tensor | None = None,
    recompute_output: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Return dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_states, and with `recompute_output` the gated output.

    `out`, the output before the gate, is not needed here. dx, ddt, dB, dC, dz receive the gradients where given.
    """
    with torch.no_grad():
        found = ssd._backward(
            dout, dfinal_states, None, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, None,
            dt_softplus, *dt_limit, into=ssd.SsdBuffers(dx, ddt, dB, dC, dz), recompute_out=recompute_output,
        )  # fmt: skip
    return found if recompute_output else found[:-1]


def ssd_chunk_scan_combined_ref(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
) -> torch.Tensor:
    """Compute `mamba_chunk_scan` by the `_ref`s of its steps."""
    dA_cumsum, step = _chunk_cumsum_fwd(dt, A, chunk_size, dt_bias, dt_softplus, (-INFINITY, INFINITY))
    alone = chunk_state_ref(B, x, step, dA_cumsum)
    wide = alone.to(torch.promote_types(alone.dtype, torch.float32)).flatten(-2)
    states = state_passing_ref(wide, dA_cumsum[..., -1])[0].view(alone.shape).to(alone.dtype)
    return chunk_scan_ref(B, C, x, step, dA_cumsum, states, D, z)


def ssd_selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, INFINITY),
) -> torch.Tensor:
    """Compute Mamba-2's scan by Mamba-1's, which knows more general dt and A.

    Parameters
    ----------
    x, z : Tensor
        (batch, seqlen, nheads, headdim); z may be None.
    dt : Tensor
        (batch, seqlen, nheads) or (batch, seqlen, nheads, headdim).
    A : Tensor
        (nheads) or (nheads * headdim, dstate).
    B, C : Tensor
        (batch, seqlen, ngroups, dstate).
    D : Tensor, optional
        (nheads, headdim) or (nheads).
    dt_bias : Tensor, optional
        (nheads) or (nheads, headdim).
    dt_softplus : bool
    dt_limit : (float, float)

    Returns
    -------
    Tensor
        Like x.
    """
    heads, headdim = x.shape[2:]
    steps = (dt if dt.dim() == 4 else dt.unsqueeze(-1).expand(-1, -1, -1, headdim)).flatten(2).transpose(1, 2)
    rates = A if A.dim() == 2 else A[:, None, None].expand(-1, headdim, B.shape[-1]).flatten(0, 1)
    skip = None if D is None else (D if D.dim() == 2 else D[:, None].expand(-1, headdim)).flatten()
    bias = (
        None if dt_bias is None else (dt_bias if dt_bias.dim() == 2 else dt_bias[:, None].expand(-1, headdim)).flatten()
    )
    if tuple(dt_limit) != (0.0, INFINITY):
        steps = steps if bias is None else steps + bias[:, None]
        steps = (F.softplus(steps) if dt_softplus else steps).clamp(*dt_limit).to(x.dtype)
        bias, dt_softplus = None, False
    out = selective_scan_fn(
        x.flatten(2).transpose(1, 2),
        steps,
        rates.to(torch.promote_types(rates.dtype, torch.float32)),
        B.permute(0, 2, 3, 1),
        C.permute(0, 2, 3, 1),
        D=skip,
        z=None if z is None else z.flatten(2).transpose(1, 2),
        delta_bias=bias,
        delta_softplus=dt_softplus,
    )
    by_head: torch.Tensor = out.transpose(1, 2).unflatten(-1, (heads, headdim))
    return by_head


def selective_scan_bwd(
    dout: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ddt and dA of `ssd_selective_scan`; dt is (batch, nheads[, headdim], nchunks, chunk_size), as in chunks."""
    with torch.enable_grad():
        steps, rates = dt.detach().requires_grad_(), A.detach().requires_grad_()
        flat = steps.flatten(-2).movedim(-1, 1)  # (batch, seqlen, nheads[, headdim])
        out = ssd_selective_scan(x.detach(), flat[:, : x.shape[1]], rates, B.detach(), C.detach(), D, z)
    ddt, dA = torch.autograd.grad(out, [steps, rates], dout.to(out.dtype))
    return ddt, dA


def mamba_conv1d_scan_ref(
    xBC: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt: torch.Tensor,
    A: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, INFINITY),
    activation: str | None = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
) -> torch.Tensor:
    """Convolve xBC (batch, seqlen, dim + 2 * ngroups * dstate), split it into x, B, C and scan; z is (batch, seqlen, dim).

    `headdim` must be given where neither z nor a two-dimensional D says it. Returns (batch, seqlen, dim).
    """
    heads = dt.shape[2]
    if z is not None:
        headdim = z.shape[-1] // heads
    elif D is not None and D.dim() == 2:
        headdim = D.shape[1]
    assert headdim is not None, "headdim must be given where neither z nor a two-dimensional D says it"
    conv = causal_conv1d_fn(xBC.transpose(1, 2), conv1d_weight, conv1d_bias, activation=activation).transpose(1, 2)
    inner = (conv.shape[-1] - heads * headdim) // 2
    x, B, C = conv.split([heads * headdim, inner, inner], dim=-1)
    out = ssd_selective_scan(
        x.unflatten(-1, (heads, headdim)),
        dt.to(x.dtype),
        A,
        B.unflatten(-1, (ngroups, -1)),
        C.unflatten(-1, (ngroups, -1)),
        D=None if D is None else D.to(torch.promote_types(D.dtype, torch.float32)),
        z=None if z is None else z.unflatten(-1, (heads, headdim)),
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
    )
    return out.flatten(2)


def ensure_stride(inp: torch.Tensor) -> torch.Tensor:
    """Return the tensor as it is: upstream makes strides multiples of 8 for its convolution, ours takes any."""
    return inp


class ChunkStateFn:
    """Upstream's name for the autograd.Function; its ``apply`` is `chunk_state`."""

    apply = staticmethod(chunk_state)


class ChunkScanFn:
    """Upstream's name for the autograd.Function; its ``apply`` is `chunk_scan`."""

    apply = staticmethod(chunk_scan)


class StatePassingFn:
    """Upstream's name for the autograd.Function; its ``apply`` is `state_passing`."""

    apply = staticmethod(state_passing)


# --- what they share


def _compute(*tensors: torch.Tensor) -> torch.dtype:
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _cut(tensor: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Return (batch, seqlen, ...) as (batch, nchunks, chunk_size, ...), padded with zeros."""
    missing = -tensor.shape[1] % chunk_size
    if missing:
        tensor = F.pad(tensor, (*(0, 0) * (tensor.dim() - 2), 0, missing))
    cut: torch.Tensor = tensor.unflatten(1, (-1, chunk_size)) if tensor.shape[1] else tensor.unsqueeze(2)
    return cut


def _cut_owner(seq_idx: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Return seq_idx as (batch, nchunks, chunk_size); what pads the last chunk goes on with its last sequence."""
    missing = -seq_idx.shape[1] % chunk_size
    owner = torch.cat([seq_idx, seq_idx[:, -1:].expand(-1, missing)], dim=1)
    cut: torch.Tensor = owner.unflatten(1, (-1, chunk_size))
    return cut


def _decay(sums: torch.Tensor) -> torch.Tensor:
    """Return exp(sums[i] - sums[j]) for j <= i, else 0, over the last dimension; masked before exp, which may overflow."""
    difference = sums.unsqueeze(-1) - sums.unsqueeze(-2)
    future = torch.ones(difference.shape[-2:], dtype=torch.bool, device=sums.device).triu(1)
    return difference.masked_fill(future, -INFINITY).exp()


def _passing(dA_chunk_cumsum: torch.Tensor, seq_idx: torch.Tensor | None, chunk_size: int | None) -> torch.Tensor:
    """Return the decay of a whole chunk, zero where another sequence ends it: (batch, nheads, nchunks)."""
    passing = dA_chunk_cumsum.exp()
    if seq_idx is None:
        return passing
    assert chunk_size is not None, "chunk_size must be given with seq_idx"
    last = _cut_owner(seq_idx, chunk_size)[..., -1]
    before = torch.cat([seq_idx[:, :1], last[:, :-1]], dim=1)
    return passing * (last == before).unsqueeze(1)
