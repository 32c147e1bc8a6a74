"""Figures as people read them; shared by the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anymamba.measure.bench.results import MEASURED, Result, Row

__all__ = ["COLUMNS", "amount", "cells", "fastest", "groups", "machine_lines"]

COLUMNS = (
    "implementation", "time ms", "spread", "memory MB", "Windows", "tokens/s", "copy", "matrix", "swept ms", "first call s",
    "error",
)  # fmt: skip


def amount(value: float | None, unit: str = "") -> str:
    """Return three significant digits without an exponent, "-" for None."""
    if value is None:
        return "-"
    if value == 0:
        return f"0{unit}"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M{unit}" if abs(value) < 1e9 else f"{value / 1e9:.3g}G{unit}"
    return f"{value:,.0f}{unit}" if abs(value) >= 100 else f"{value:.3g}{unit}"


def cells(row: Row) -> list[str]:
    """Return a row's cells, as many as COLUMNS; a row that was not measured says why in place of the time."""
    if row.status != MEASURED:
        return [row.implementation, row.status, "-", "-", row.windows, "-", "-", "-", "-", "-", _error(row.error)]
    return [
        row.implementation,
        amount(row.median_ms),
        f"{(row.spread or 0):.0%}",
        amount(row.peak_mb),
        row.windows,
        amount(row.tokens_per_s),
        _share(row.copy_share),
        _share(row.matrix_share),
        amount(row.cold_ms),
        amount(row.cold_s),
        _error(row.error),
    ]


def groups(result: Result) -> dict[tuple[str, str, str, str], list[Row]]:
    """Return the rows by the work they are compared at, in order."""
    found: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in result.rows:
        found.setdefault(row.work, []).append(row)
    return found


def fastest(rows: Sequence[Row]) -> Row | None:
    """Return the row with the smallest median, None if nothing was measured."""
    measured = [row for row in rows if row.median_ms is not None]
    return min(measured, key=lambda row: row.median_ms or 0.0) if measured else None


def machine_lines(result: Result) -> list[tuple[str, str]]:
    """Return the machine's facts and the versions as (name, value)."""
    lines: list[tuple[str, str]] = []
    for name, value in result.machine.items():
        lines.append((name.replace("_", " "), _value(value)))
    return lines + list(result.versions.items())


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}" if value < 0.1 else f"{value:.0%}"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.0e}"
