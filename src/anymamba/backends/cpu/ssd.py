"""The chunked scan on the CPU: the torch backend's matrix products over chunks, and the decays within them in one pass.

L[i, j] = exp(cs[i] - cs[j]) for j <= i, else 0, times C B^T where that is what is wanted: six passes of whole-tensor operations
over (chunk, chunk) matrices, a third of the forward's time, are one here. `sums` and `rest` are the two halves of cs: their
differences are summed in that order, so that the last digits survive.
"""

from __future__ import annotations

from typing import Any

import torch

from anymamba.backends.cpu._compile import exact_kernel
from anymamba.backends.cpu._device import refusal
from anymamba.backends.cpu._math import LOG2E, exp2
from anymamba.backends.cpu._tuning import Tunable, tunable
from anymamba.backends.torch import ssd as products
from anymamba.backends.torch._ssd_chunks import Block

__all__ = ["refusal", "ssd_backward", "ssd_forward"]

ELEMENTS_A_THREAD = 1 << 15
CHUNKS = (16, 32, 64, 128, 256)
_CHUNK = (
    "steps of a chunk: short ones have less to do within a chunk, long ones fewer states and fewer, larger products"
)
_FORWARD, _BACKWARD = (
    tunable(
        f"ssd {way}", __name__, block=products.CHUNK, blocks=CHUNKS, meaning=_CHUNK, threads=False,
        sizes=("heads", "length", "headdim", "states"),
    )
    for way in ("forward", "backward")
)  # fmt: skip


class _Block(Block):
    """A block whose decays one kernel computes, where there are no packed sequences."""

    def _mask(self) -> torch.Tensor:
        return self._decayed(None)

    def _scores(self, within: torch.Tensor) -> torch.Tensor:
        return self._decayed(within)

    def _decayed(self, within: torch.Tensor | None) -> torch.Tensor:
        if self.same is not None or self.rest is None:
            return super()._mask() if within is None else super()._scores(within)
        shape = (*self.sums.shape, self.chunk)
        out = self.sums.new_empty(shape)
        matrices = self.sums.numel() // max(self.chunk, 1)
        arguments: tuple[Any, ...] = (
            self.chunk, self.per_group, self.sums.contiguous(), self.rest.contiguous(),
            self.sums if within is None else within, within is not None, out,
        )  # fmt: skip
        _decays.over(matrices, *arguments, at_least=max(1, ELEMENTS_A_THREAD // max(self.chunk**2, 1)))
        return out


def ssd_forward(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, *others: Any) -> Any:
    """See `anymamba.ops.ssd.SsdBackend`."""
    return products.ssd_forward(x, dt, A, B, *others, make_block=_Block, chunk=_chunk(_FORWARD, x, B))


def ssd_backward(
    dout: Any, dfinal_states: Any, dvarlen_states: Any, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
    *others: Any, **into: Any,
) -> Any:  # fmt: skip
    """See `anymamba.ops.ssd.SsdBackend`."""
    return products.ssd_backward(
        dout,
        dfinal_states,
        dvarlen_states,
        x,
        dt,
        A,
        B,
        *others,
        **into,
        make_block=_Block,
        chunk=_chunk(_BACKWARD, x, B),
    )


def _chunk(kernel: Tunable, x: torch.Tensor, B: torch.Tensor) -> int:
    """Return the length of a chunk. Of the threads PyTorch's own products decide."""
    batch, seqlen, heads, headdim = x.shape
    return kernel.settings(x.element_size(), batch * heads, seqlen, headdim, B.shape[3]).block


@exact_kernel
def _decays(first, after, chunk, per_group, sums, rest, within, has_within, out):
    """Compute the matrices first <= m < after; one a head, `within` one a group of heads."""
    kind = out.dtype
    log2e = kind.type(LOG2E)
    zero = kind.type(0)
    for m in range(first, after):
        s, r = sums[m * chunk : m * chunk + chunk], rest[m * chunk : m * chunk + chunk]
        for i in range(chunk):
            row = out[(m * chunk + i) * chunk : (m * chunk + i + 1) * chunk]
            for j in range(
                chunk
            ):  # also above the diagonal, where it may overflow: one loop of vectors is cheaper than two
                decay = exp2(((s[i] - s[j]) + (r[i] - r[j])) * log2e)
                row[j] = decay if j <= i else zero
            if has_within:
                at = (m // per_group * chunk + i) * chunk
                scale = within[at : at + chunk]
                for j in range(chunk):
                    row[j] = row[j] * scale[j] if j <= i else zero
