"""The state-space dual scan: cut into blocks that fit a memory budget, each a handful of matrix products (_ssd_chunks).

The backward saves nothing: it recomputes a block's states from the state that enters it. Temporary memory is the budget,
whatever the length.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from anymamba.backends.torch._ssd_chunks import Block, BlockInputs, Ends
from anymamba.machine.memory import empty, empty_like
from anymamba.ops._autocast import without_autocast
from anymamba.ops.ssd import NEW_BUFFERS, SsdBuffers, SsdGradients, ssd_compute_dtype

__all__ = ["ssd_backward", "ssd_forward"]

CHUNK = 64
"""Tokens a chunk: the products with B, C and the states cost the same at any chunk length, those within it grow with it."""

BLOCK_BYTES = {"cpu": 64 << 20}
"""Temporary memory of a block. On a CPU a block should not leave the caches far behind; elsewhere launches count."""

BLOCK_BYTES_ELSEWHERE = 512 << 20


def ssd_forward(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    return_final_states: bool,
    *,
    make_block: type[Block] = Block,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """See `anymamba.ops.ssd.SsdBackend`. `make_block`, `chunk`: how another backend computes a block."""
    with without_autocast(x.device.type):
        call = _Call(
            x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_min, dt_max,
            chunk,
        )  # fmt: skip
        out = empty(x, *x.shape)
        state_shape = (x.shape[0], x.shape[2], x.shape[3], B.shape[3])
        final = x.new_zeros(state_shape, dtype=call.dtype) if return_final_states else None
        varlen = None if cu_seqlens is None else C.new_zeros((cu_seqlens.shape[0] - 1, *state_shape[1:]))
        for rows in call.batches():
            state = call.entering(rows)
            for start, stop in call.blocks:
                block = make_block(call.inputs(rows, start, stop, state), call.chunk)
                states = block.states()
                out[rows, start:stop] = block.outputs(states)
                ends = call.ends(start, stop, None)
                if ends is not None:
                    which, places = ends
                    assert varlen is not None
                    varlen[which] = block.states_at(places, states).to(varlen.dtype)
                state = states[-1]
            if final is not None and state is not None:
                final[rows] = state
    return out, final, varlen


def ssd_backward(
    dout: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    dvarlen_states: torch.Tensor | None,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    *,
    into: SsdBuffers = NEW_BUFFERS,
    recompute_out: bool = False,
    make_block: type[Block] = Block,
    chunk: int = CHUNK,
) -> SsdGradients:
    """See `anymamba.ops.ssd.SsdBackend`. `make_block`, `chunk`: how another backend computes a block."""
    with without_autocast(x.device.type):
        call = _Call(
            x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_min, dt_max,
            chunk,
        )  # fmt: skip
        dx, ddt, dB, dC = (
            empty_like(tensor) if buffer is None else buffer
            for tensor, buffer in ((x, into.dx), (dt, into.ddt), (B, into.dB), (C, into.dC))
        )
        dz = (empty_like(z) if into.dz is None else into.dz) if z is not None else None
        dinitial = None if initial_states is None else torch.zeros_like(initial_states)
        out = x.new_empty(x.shape) if recompute_out else None
        dA = torch.zeros_like(call.A)
        dD = None if call.D is None else call.D.new_zeros(call.D.shape)
        dbias = None if dt_bias is None else dA.new_zeros(dA.shape)
        for rows in call.batches():
            dstate = None if dfinal_states is None else dfinal_states[rows].to(call.dtype)
            for (start, stop), state in reversed(list(zip(call.blocks, call.states_before_blocks(rows)))):
                block = make_block(call.inputs(rows, start, stop, state), call.chunk)
                ends = None if dvarlen_states is None else call.ends(start, stop, dvarlen_states)
                found = block.gradients(
                    None if dout is None else dout[rows, start:stop],
                    dstate,
                    None if ends is None else ends[1],
                    recompute_out,
                )
                dx[rows, start:stop] = found.dx
                dB[rows, start:stop] = found.dB
                dC[rows, start:stop] = found.dC
                draw = call.through_step(rows, start, stop, found.dstep)
                ddt[rows, start:stop] = draw
                if dbias is not None:
                    dbias += draw.sum((0, 1))
                dA += found.dA
                if dD is not None and found.dD is not None:
                    dD += found.dD
                if dz is not None and found.dz is not None:
                    dz[rows, start:stop] = found.dz
                if out is not None and found.out is not None:
                    out[rows, start:stop] = found.out
                dstate = found.dstate
            if dinitial is not None and dstate is not None:
                dinitial[rows] = dstate
        if dD is not None and D is not None and D.dim() == 1:
            dD = dD.sum(1)
        return SsdGradients(
            dx,
            ddt,
            torch.empty_like(A).copy_(dA),
            dB,
            dC,
            None if D is None or dD is None else torch.empty_like(D).copy_(dD),
            dz,
            None if dt_bias is None or dbias is None else torch.empty_like(dt_bias).copy_(dbias),
            dinitial,
            out,
        )


class _Call:
    """The inputs of one call, and how they are cut."""

    def __init__(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None,
        z: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        initial_states: torch.Tensor | None,
        seq_idx: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        dt_softplus: bool,
        dt_min: float,
        dt_max: float,
        chunk: int,
    ) -> None:
        _, seqlen, nheads, headdim = x.shape
        self.x, self.dt, self.B, self.C, self.z = x, dt, B, C, z
        self.initial_states, self.dt_softplus, self.dt_min, self.dt_max = initial_states, dt_softplus, dt_min, dt_max
        self.dtype = ssd_compute_dtype(x, dt, A, B, C)
        self.A = A.to(self.dtype)
        self.D = None if D is None else (D if D.dim() == 2 else D[:, None].expand(-1, headdim)).to(self.dtype)
        self.bias = None if dt_bias is None else dt_bias.to(self.dtype)
        self.bounds: list[int] | None = None if cu_seqlens is None else cu_seqlens.tolist()
        self.runs = None
        if seq_idx is not None:
            changed = torch.zeros_like(seq_idx, dtype=torch.int32)
            torch.ne(seq_idx[:, 1:], seq_idx[:, :-1], out=changed[:, 1:])
            self.runs = changed.cumsum(1, dtype=torch.int32)
        self.chunk = max(1, min(chunk, seqlen))
        dstate = B.shape[3]
        a_token = nheads * (4 * self.chunk + 8 * headdim + 2 * headdim * dstate // self.chunk) * self.dtype.itemsize
        tokens = BLOCK_BYTES.get(x.device.type, BLOCK_BYTES_ELSEWHERE) // max(1, a_token)
        a_block = max(1, min(tokens, seqlen) // self.chunk) * self.chunk
        self.rows = max(1, tokens // max(1, seqlen))
        self.blocks = [(start, min(start + a_block, seqlen)) for start in range(0, seqlen, a_block)]

    def batches(self) -> Iterator[slice]:
        """Yield the rows of the batch that are worked on together."""
        batch = self.x.shape[0]
        for first in range(0, batch, self.rows):
            yield slice(first, min(first + self.rows, batch))

    def entering(self, rows: slice) -> torch.Tensor | None:
        """Return the initial states of these rows."""
        return None if self.initial_states is None else self.initial_states[rows].to(self.dtype)

    def inputs(self, rows: slice, start: int, stop: int, state: torch.Tensor | None) -> BlockInputs:
        """Return the inputs of one block."""
        here = (rows, slice(start, stop))
        runs = before = None
        if self.runs is not None:
            runs = self.runs[here]
            before = self.runs[rows, max(start - 1, 0)]
        return BlockInputs(
            self.x[here],
            self._step(rows, start, stop),
            self.A,
            self.B[here],
            self.C[here],
            self.D,
            None if self.z is None else self.z[here],
            state,
            runs,
            before,
        )

    def _raw_step(self, rows: slice, start: int, stop: int) -> torch.Tensor:
        raw = self.dt[rows, start:stop].to(self.dtype)
        return raw if self.bias is None else raw + self.bias

    def _step(self, rows: slice, start: int, stop: int) -> torch.Tensor:
        raw = self._raw_step(rows, start, stop)
        return (F.softplus(raw) if self.dt_softplus else raw).clamp(self.dt_min, self.dt_max)

    def through_step(self, rows: slice, start: int, stop: int, dstep: torch.Tensor) -> torch.Tensor:
        """Return the gradient of dt + dt_bias, given that of the step."""
        raw = self._raw_step(rows, start, stop)
        step = F.softplus(raw) if self.dt_softplus else raw
        found = dstep * ((step >= self.dt_min) & (step <= self.dt_max))
        if self.dt_softplus:
            found = torch.where(raw <= 20, found * torch.sigmoid(raw), found)  # F.softplus is linear above 20
        return found

    def states_before_blocks(self, rows: slice) -> list[torch.Tensor | None]:
        """Return the state that enters each block of these rows."""
        states = [self.entering(rows)]
        for start, stop in self.blocks[:-1]:
            block = Block(self.inputs(rows, start, stop, states[-1]), self.chunk)
            states.append(block.states()[-1].clone())  # keeps the block's other states from living on
        return states

    def ends(self, start: int, stop: int, gradients: torch.Tensor | None) -> tuple[torch.Tensor, Ends] | None:
        """Return which sequences of cu_seqlens end in this block, and where; None if none does."""
        if self.bounds is None:
            return None
        found = [
            (sequence, end - 1 - start)
            for sequence, (begin, end) in enumerate(zip(self.bounds[:-1], self.bounds[1:]))
            if end > begin and start < end <= stop
        ]
        if not found:
            return None
        which, places = torch.tensor(found, device=self.x.device).unbind(1)
        given = None if gradients is None else gradients[which].to(self.dtype)
        return which, Ends(places // self.chunk, places % self.chunk, given)
