"""A result as a picture: latency and memory bars, time over length; by matplotlib, which the extra `anymamba[plot]` brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anymamba.errors import MachineError, OptionError
from anymamba.measure.bench.results import Result
from anymamba.measure.bench.words import amount, groups

__all__ = ["plot"]

_ENDINGS = (".png", ".svg", ".pdf")


def plot(result: Result, path: Path) -> None:
    """Write the picture; the ending of the name says which kind.

    Raises
    ------
    OptionError
        If the ending is none of .png, .svg, .pdf, or nothing was measured.
    MachineError
        If matplotlib is not installed.
    """
    if path.suffix.lower() not in _ENDINGS:
        raise OptionError(f"--plot is {path.name!r}, but must end in {', '.join(_ENDINGS)}.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MachineError(
            "There is no matplotlib to draw with.", why=str(error), next_step='pip install "anymamba[plot]"'
        ) from None
    measured = {work: rows for work, rows in groups(result).items() if any(row.median_ms for row in rows)}
    if not measured:
        raise OptionError("--plot has nothing to draw: no row was measured.")
    lengths = _lengths(result)
    figure: Any = Figure(figsize=(11, 2.6 * len(measured) + 3.6 * len(lengths)), layout="constrained")
    axes = figure.subplots(
        len(measured) + len(lengths), 2, squeeze=False,
        gridspec_kw={"height_ratios": [2.6] * len(measured) + [3.6] * len(lengths)},
    )  # fmt: skip
    for line, ((subject, size, direction, dtype), rows) in zip(axes, measured.items()):
        names = [row.implementation for row in rows if row.median_ms]
        for axis, unit, values in (
            (line[0], "ms", [row.median_ms for row in rows if row.median_ms]),
            (line[1], "MB at peak", [row.peak_mb or 0.0 for row in rows if row.median_ms]),
        ):
            drawn = axis.barh(names, values, color=[f"C{number}" for number in range(len(names))])
            axis.bar_label(drawn, labels=[f" {amount(value)}" for value in values])
            axis.invert_yaxis()
            axis.margins(x=0.15)
            axis.set_xlabel(unit)
        least = next((row.floor_ms for row in rows if row.floor_ms), None)  # the first may not have been measured
        if least:
            line[0].axvline(least, color="black", linestyle="--", label="floor of this machine")
            line[0].legend(fontsize="small")
        line[0].set_title(f"{subject}, {direction}, {size}, {dtype}", loc="left", fontsize="medium")
    for line, (title, (series, floor)) in zip(axes[len(measured) :], lengths.items()):
        for axis, share in ((line[0], False), (line[1], True)):
            for name, points in series.items():
                xs = [length for length, _, _ in sorted(points)]
                axis.plot(xs, [(p[2] / p[0] * 1e3 if share else p[2]) for p in sorted(points)], marker="o", label=name)
            ys = [(value / length * 1e3 if share else value) for length, value in sorted(floor.items())]
            axis.plot(sorted(floor), ys, color="black", linestyle="--", label="floor of this machine")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xlabel("length")
            axis.set_ylabel("us a step" if share else "ms")
        line[0].set_title(title, loc="left", fontsize="medium")
        line[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


_Series = dict[str, list[tuple[int, int, float]]]


def _lengths(result: Result) -> dict[str, tuple[_Series, dict[int, float]]]:
    found: dict[str, tuple[_Series, dict[int, float]]] = {}
    for row in result.rows:
        if row.median_ms and row.length:
            title = f"{row.subject}, {row.direction}, batch {row.batch}, width {row.width}"
            series, floor = found.setdefault(title, ({}, {}))
            series.setdefault(row.implementation, []).append((row.length, row.batch, row.median_ms))
            floor[row.length] = row.floor_ms or 0.0
    return {title: both for title, both in found.items() if len(both[1]) > 1}
