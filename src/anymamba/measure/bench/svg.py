"""Charts as inline SVG, for the page: no library, no network; colours are CSS variables, so both themes work.

Numbers stand in the bars' own lines as text: the page is readable without seeing colours, and by a screen reader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from anymamba.measure.bench.words import amount

__all__ = ["bars", "lines"]

WIDTH = 360  # of the view box: a phone's width, scaled up on wider screens
COLOURS = 6  # --c0 ... --c5 in the page's style


def bars(title: str, unit: str, values: Sequence[tuple[str, float, int]], floor: float | None = None) -> str:
    """Return horizontal bars of (name, value, number of the colour), with a line at the floor."""
    longest = max([value for _, value, _ in values] + [floor or 0.0]) or 1.0
    height = 26 + 36 * len(values)
    parts = [f'<text x="0" y="14" class="head">{escape(title)}</text>']
    for number, (name, value, colour) in enumerate(values):
        y = 26 + 36 * number
        parts += [
            f'<text x="0" y="{y + 11}">{escape(name)}</text>',
            f'<text x="{WIDTH}" y="{y + 11}" text-anchor="end">{amount(value)} {escape(unit)}</text>',
            f'<rect x="0" y="{y + 16}" width="{max(value / longest * WIDTH, 1):.1f}" height="11" rx="2"'
            f' fill="var(--c{colour % COLOURS})"/>',
        ]
    if floor:
        x = floor / longest * WIDTH
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="26" y2="{height}" class="floor"/>')
    return _svg(title, height, parts)


def lines(
    title: str, unit: str, series: Mapping[str, Sequence[tuple[float, float]]], floor: Sequence[tuple[float, float]]
) -> str:
    """Return values over lengths on logarithmic axes, a line for each name, the floor dashed."""
    points = [point for line in series.values() for point in line] + list(floor)
    points = [(x, y) for x, y in points if x > 0 and y > 0]
    if not points:
        return ""
    left, top, right, bottom = 44, 24, WIDTH - 8, 220
    xs, ys = [math.log10(x) for x, _ in points], [math.log10(y) for _, y in points]
    x0, x1, y0, y1 = min(xs), max(xs), math.floor(min(ys)), math.ceil(max(ys))
    y1 = max(y1, y0 + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - x0) / ((x1 - x0) or 1)
        return left + across * (right - left), bottom - (math.log10(y) - y0) / (y1 - y0) * (bottom - top)

    parts = [f'<text x="0" y="14" class="head">{escape(title)}</text>']
    for power in range(int(y0), int(y1) + 1):
        _, y = place(10**x0, 10.0**power)
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">{amount(10.0**power)}</text>')
    for length in sorted({x for x, _ in points}):
        x, _ = place(length, 10.0**y0)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{length:g}</text>')
    parts.append(f'<text x="{right}" y="{bottom + 30}" text-anchor="end">length; {escape(unit)} up</text>')
    height = bottom + 40
    for number, (name, line) in enumerate(series.items()):
        drawn = [place(x, y) for x, y in sorted(line) if x > 0 and y > 0]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        colour = f"var(--c{number % COLOURS})"
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in drawn]
        parts.append(f'<rect x="{left}" y="{height - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{left + 16}" y="{height}">{escape(name)}</text>')
        height += 18
    if floor:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(x, y) for x, y in sorted(floor) if x > 0 and y > 0))
        parts.append(f'<polyline points="{path}" fill="none" class="floor"/>')
        parts.append(f'<line x1="{left}" x2="{left + 10}" y1="{height - 4}" y2="{height - 4}" class="floor"/>')
        parts.append(f'<text x="{left + 16}" y="{height}">floor of this machine</text>')
        height += 18
    return _svg(title, height, parts)


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title, quote=True)}">'
        + "".join(parts)
        + "</svg>"
    )
