"""Two results side by side: the same implementation at the same work, before and after, here and there."""

from __future__ import annotations

from dataclasses import dataclass

from anymamba.measure.bench.results import MEASURED, Result, Row

__all__ = ["Pair", "compare", "differences"]


@dataclass(frozen=True)
class Pair:
    """A row of the first result and the same row of the second; either may be missing."""

    first: Row | None
    second: Row | None

    @property
    def row(self) -> Row:
        """One of the two, for what they share."""
        row = self.first or self.second
        assert row is not None
        return row

    @property
    def ratio(self) -> float | None:
        """Median time of the second over the first; below 1 the second is faster."""
        if self.first is None or self.second is None or not self.first.median_ms or not self.second.median_ms:
            return None
        return self.second.median_ms / self.first.median_ms

    @property
    def memory_ratio(self) -> float | None:
        """Peak memory of the second over the first."""
        if self.first is None or self.second is None or not self.first.peak_mb or self.second.peak_mb is None:
            return None
        return self.second.peak_mb / self.first.peak_mb

    @property
    def verdict(self) -> str:
        """Faster or slower only if not one round of the two overlaps; else "same"."""
        if self.first is None or self.second is None:
            return "only in the second" if self.first is None else "only in the first"
        if self.first.status != self.second.status:
            return f"{self.first.status} -> {self.second.status}"
        if self.first.status != MEASURED:
            return self.first.status
        first, second = self.first.rounds_ms, self.second.rounds_ms
        return "faster" if max(second) < min(first) else "slower" if min(second) > max(first) else "same"


def compare(first: Result, second: Result) -> list[Pair]:
    """Return every row of the two, paired, in the first's order."""
    rest = {(*row.work, row.implementation): row for row in second.rows}
    pairs = [Pair(row, rest.pop((*row.work, row.implementation), None)) for row in first.rows]
    return pairs + [Pair(None, row) for row in rest.values()]


def differences(first: Result, second: Result) -> list[str]:
    """Return what else differs: machine and versions, "torch: 2.4.0 -> 2.5.0"."""
    found = []
    for one, other in ((first.machine, second.machine), (first.versions, second.versions)):
        for name in dict.fromkeys([*one, *other]):
            before, after = one.get(name), other.get(name)
            measured = isinstance(before, float) or name == "date"
            if before != after and not measured:
                found.append(f"{name}: {'-' if before is None else before} -> {'-' if after is None else after}")
    return found
