"""What a part of the sequence does to Mamba-2's states, and the gradient of the state that enters it, without the outputs.

With a[t] = dt'[t] * A and its sums s[t] from the start of the part to t:

    gain   = sum_t exp(s[end] - s[t]) * dt'[t] * outer(x[t], B[t])          a scan from zero ends in it
    dstate = sum_t exp(s[t]) * outer(dy[t], C[t])                           dy: gradient of the outputs before the gate

Both are one matrix product a head, a third of the scan's work, and nothing of the length of the sequence is kept. Tokens beyond
a boundary of packed sequences (towards the end that the state is taken at) weigh nothing. Sums are float64: the difference of
two large ones keeps its digits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from anymamba.ops._autocast import without_autocast
from anymamba.ops.ssd import ssd_compute_dtype

__all__ = ["Steps", "gradient_of_entering", "part_gain", "time_steps"]

BLOCK = 1024
"""Tokens multiplied at once: bounds the temporary memory."""


class Steps(NamedTuple):
    """The time steps of a part of the sequence, and what follows from them.

    Attributes
    ----------
    dt : Tensor
        (batch, length, nheads): after bias, softplus and limit, in the compute dtype.
    sums : Tensor
        (batch, length, nheads), float64: of dt * A, up to and with each token.
    runs : Tensor or None
        (batch, length): 0 for the part's first packed sequence, then 1, ...
    """

    dt: torch.Tensor
    sums: torch.Tensor
    runs: torch.Tensor | None

    def decay(self) -> torch.Tensor:
        """Return (batch, nheads): the logarithm of what is left of an entering state; -inf beyond a boundary."""
        total = self.sums[:, -1].to(self.dt.dtype)
        return total if self.runs is None else torch.where(self.runs[:, -1:] == 0, total, -torch.inf)

    def to_end(self) -> torch.Tensor:
        """Return (batch, length, nheads): what is left at the end of what each token brings; 0 beyond a boundary."""
        left = torch.exp((self.sums[:, -1:] - self.sums).to(self.dt.dtype))
        return left if self.runs is None else left * (self.runs == self.runs[:, -1:]).unsqueeze(-1)

    def from_start(self) -> torch.Tensor:
        """Return (batch, length, nheads): what is left at each token of an entering state; 0 beyond a boundary."""
        left = torch.exp(self.sums.to(self.dt.dtype))
        return left if self.runs is None else left * (self.runs == 0).unsqueeze(-1)


def time_steps(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt_bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> Steps:
    """Compute `Steps` from a scan's arguments."""
    compute = ssd_compute_dtype(x, dt, A, B, C)
    steps = dt.to(compute)
    if dt_bias is not None:
        steps = steps + dt_bias.to(compute)
    if dt_softplus:
        steps = F.softplus(steps)
    steps = steps.clamp(dt_min, dt_max)
    sums = (steps.double() * A.double()).cumsum(1)
    if seq_idx is None:
        return Steps(steps, sums, None)
    runs = torch.zeros_like(seq_idx)
    runs[:, 1:] = (seq_idx[:, 1:] != seq_idx[:, :-1]).cumsum(1)
    return Steps(steps, sums, runs)


def part_gain(steps: Steps, x: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """Return the state (batch, nheads, headdim, dstate) that a scan from zero ends in."""
    return _sum_of_outer(steps.to_end() * steps.dt, x, B)


def gradient_of_entering(
    steps: Steps,
    dout: torch.Tensor | None,
    z: torch.Tensor | None,
    C: torch.Tensor,
    dfinal_states: torch.Tensor | None,
    dvarlen_states: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    like: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of the entering state, like `like`, from those of everything that this part returns."""
    compute = steps.dt.dtype
    found = torch.zeros_like(like) if dout is None else _sum_of_outer(steps.from_start(), dout, C, z)
    if dfinal_states is not None:
        found = found + torch.exp(steps.decay())[..., None, None] * dfinal_states.to(compute)
    if dvarlen_states is not None and cu_seqlens is not None and steps.dt.shape[1]:
        ends = (cu_seqlens[1:].long() - 1).clamp(min=0)
        left = steps.from_start()[0, ends] * (cu_seqlens[1:] > cu_seqlens[:-1]).unsqueeze(-1)
        found = found + torch.einsum("ih,ihpn->hpn", left, dvarlen_states.to(compute))
    return found


def _sum_of_outer(
    weights: torch.Tensor, left: torch.Tensor, right: torch.Tensor, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum over time of weights * outer(left [* silu(gate)], right): (batch, nheads, headdim, dstate)."""
    batch, length, heads, headdim = left.shape
    groups, dstate = right.shape[2], right.shape[3]
    compute = weights.dtype
    total = weights.new_zeros((batch * groups, heads // groups * headdim, dstate))
    with without_autocast(left.device.type):
        for start in range(0, length, BLOCK):
            block = slice(start, start + BLOCK)
            rows = left[:, block].to(compute)
            if gate is not None:
                rows = rows * F.silu(gate[:, block].to(compute))
            rows = (rows * weights[:, block].unsqueeze(-1)).flatten(2).unflatten(2, (groups, -1))
            columns = right[:, block].to(compute)
            total.baddbmm_(rows.permute(0, 2, 3, 1).flatten(0, 1), columns.transpose(1, 2).flatten(0, 1))
    return total.view(batch, heads, headdim, dstate)
