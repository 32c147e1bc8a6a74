"""A result as one HTML page: no network, no script, light and dark, readable on a phone."""

from __future__ import annotations

from html import escape

from anymamba.measure.bench import svg
from anymamba.measure.bench.results import SCHEMA, Result
from anymamba.measure.bench.words import COLUMNS, cells, fastest, groups, machine_lines

__all__ = ["STYLE", "over_length", "page"]

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1a1c20; --soft: #5a6069; --line: #d9dce1; --best: #e7f4ea;
  --c0: #1f6feb; --c1: #c2410c; --c2: #15803d; --c3: #9333ea; --c4: #a16207; --c5: #0e7490; }
@media (prefers-color-scheme: dark) { :root { --page: #14161a; --text: #e7e9ec; --soft: #a2a9b3; --line: #343942;
  --best: #16321f; --c0: #6ea8ff; --c1: #ff9a62; --c2: #5fd38a; --c3: #c99bff; --c4: #e5c04d; --c5: #5cc8de; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 16px; max-width: 1160px; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p, li { max-width: 70ch; } .soft { color: var(--soft); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; width: 100%; }
th, td { text-align: right; padding: .35rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--page); }
th { color: var(--soft); font-weight: 600; } tr.best td { background: var(--best); }
.charts { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr));
  margin: 1rem 0; }
svg { width: 100%; max-width: 520px; height: auto; } svg text { fill: var(--text); font: 11px system-ui, sans-serif; }
svg .head { font-weight: 600; font-size: 12px; } svg .grid { stroke: var(--line); }
svg .floor { stroke: var(--text); stroke-width: 1.5; stroke-dasharray: 4 3; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: .9rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
"""


def page(result: Result) -> str:
    """Return the whole page."""
    machine = result.machine
    where = machine.get("gpu") or machine.get("processor") or ""
    body = [
        "<h1>anymamba bench</h1>",
        f'<p class="soft">{escape(str(where))}, {escape(str(machine.get("system", "")))}, '
        f"PyTorch {escape(result.versions.get('torch', '?'))}, {escape(str(machine.get('date', '')))}</p>",
    ]
    if result.notes:
        body.append("<ul>" + "".join(f"<li>{escape(note)}</li>" for note in result.notes) + "</ul>")
    body += [_work(result, work) for work in groups(result)]
    body += over_length(result)
    body += ["<h2>Not on this machine</h2>", _pairs(result.absent.items())] if result.absent else []
    body += ["<h2>Machine and versions</h2>", _pairs(machine_lines(result)), _legend(result)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="generator" content="{SCHEMA}"><title>anymamba bench: {escape(str(where))}</title>'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head><body>\n' + "\n".join(body) + "\n</body></html>\n"
    )


def over_length(result: Result) -> list[str]:
    """Return charts of time over length, one for each subject and direction measured at several lengths."""
    series: dict[tuple[str, str, int, int], dict[str, list[tuple[float, float]]]] = {}
    floors: dict[tuple[str, str, int, int], dict[float, float]] = {}
    for row in result.rows:
        if row.median_ms is not None and row.length:
            key = (row.subject, row.direction, row.batch, row.width)
            series.setdefault(key, {}).setdefault(row.implementation, []).append((row.length, row.median_ms))
            if row.floor_ms:
                floors.setdefault(key, {})[row.length] = row.floor_ms
    charts = [
        svg.lines(
            f"{subject}, {direction}, batch {batch}, width {width}",
            "ms",
            drawn,
            sorted(floors.get((subject, direction, batch, width), {}).items()),
        )
        for (subject, direction, batch, width), drawn in series.items()
        if len({length for line in drawn.values() for length, _ in line}) > 1
    ]
    return ["<h2>Time over length</h2>", '<div class="charts">', *charts, "</div>"] if charts else []


def _work(result: Result, work: tuple[str, str, str, str]) -> str:
    rows = groups(result)[work]
    best = fastest(rows)
    subject, size, direction, dtype = work
    head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    lines = "".join(
        f"<tr{' class=best' if row is best else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells(row))
        + "</tr>"
        for row in rows
    )
    numbers = {name: number for number, name in enumerate(dict.fromkeys(row.implementation for row in result.rows))}
    times = [(row.implementation, row.median_ms, numbers[row.implementation]) for row in rows if row.median_ms]
    peaks = [(row.implementation, row.peak_mb, numbers[row.implementation]) for row in rows if row.peak_mb]
    floor = next((row.floor_ms for row in rows if row.floor_ms), None)  # the first may not have been measured
    charts = [svg.bars("time", "ms", times, floor)] if times else []
    charts += [svg.bars("peak memory", "MB", peaks)] if peaks else []
    reasons = [f"{row.implementation}, {row.status}: {row.message}" for row in rows if row.message]
    return (
        f"<h2>{escape(subject)}, {escape(direction)}</h2>"
        f'<p class="soft">{escape(size)}, {escape(dtype)}</p>'
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
        + "".join(f'<p class="soft">{escape(reason)}</p>' for reason in reasons)
        + f'<div class="charts">{"".join(charts)}</div>'
    )


def _pairs(pairs: object) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)  # type: ignore[attr-defined]
    return f"<dl>{items}</dl>"


def _legend(result: Result) -> str:
    return (
        "<h2>How to read it</h2><p>Time: the median of interleaved rounds; spread: slowest less fastest round, of the median. "
        f"Memory: {escape(result.memory)}. Copy and matrix: the least that any implementation must move or multiply, at the "
        "rates measured on this machine, over the time taken; 100% is the floor, drawn dashed. First call: loading and "
        "compiling, or taking from a disk cache. Error: relative, of the tensor nearest to its bound, against the float64 "
        "reference, before anything is timed; an implementation that is wrong is not timed.</p>"
    )
