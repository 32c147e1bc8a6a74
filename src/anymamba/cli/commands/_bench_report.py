"""How `anymamba bench` shows a result and a comparison."""

from __future__ import annotations

from rich.markup import escape

from anymamba.cli.terminal import Terminal
from anymamba.measure.bench.compare import compare, differences
from anymamba.measure.bench.results import MEASURED, Result
from anymamba.measure.bench.words import COLUMNS, amount, cells, fastest, groups

# An 80-column terminal has room for these; the page and the files have all.
_NARROW = ("implementation", "time ms", "spread", "memory MB", "Windows", "tokens/s", "copy", "error")


def show(screen: Terminal, result: Result) -> None:
    """Print a table for each piece of work, then why rows are missing, then the machine."""
    columns = [column for column in COLUMNS if screen.out.width >= 110 or column in _NARROW]
    for (subject, size, direction, dtype), rows in groups(result).items():
        best = fastest(rows)
        lines = []
        for row in rows:
            style = "green" if row is best else "dim" if row.status != MEASURED else ""
            shown = [escape(cell) for column, cell in zip(COLUMNS, cells(row)) if column in columns]
            lines.append([f"[{style}]{cell}[/]" if style else cell for cell in shown])
        screen.table(f"{subject}, {direction}, {size}, {dtype}", columns, lines)
        for row in rows:
            if row.message:
                screen.say(f"[dim]{escape(row.implementation)}, {row.status}: {escape(row.message)}[/]")
        screen.say("")
    for name, reason in result.absent.items():
        screen.say(f"[dim]not here: {escape(name)}: {escape(reason)}[/]")
    machine = result.machine
    screen.say(
        f"{escape(str(machine.get('gpu') or machine.get('processor')))}, torch {escape(result.versions['torch'])}, "
        f"copy {amount(machine.get('copy_gb_per_s'))} GB/s, matrix {amount(machine.get('matrix_tflop_per_s'))} TFLOP/s"
    )
    screen.say(f"[dim]memory: {escape(result.memory)}[/]")
    for note in result.notes:
        screen.say(f"[yellow]note:[/] {escape(note)}")


def show_comparison(screen: Terminal, first: Result, second: Result, json: bool) -> None:
    """Print the pairs, or as JSON."""
    pairs = compare(first, second)
    if json:
        screen.json({
            "schema": "anymamba-bench-compare/1",
            "differences": differences(first, second),
            "pairs": [
                {**dict(zip(("subject", "size", "direction", "dtype"), pair.row.work)),
                 "implementation": pair.row.implementation, "time_ratio": pair.ratio, "memory_ratio": pair.memory_ratio,
                 "verdict": pair.verdict}
                for pair in pairs
            ],
        })  # fmt: skip
        return
    styles = {"faster": "green", "slower": "bold red"}
    lines = []
    for pair in pairs:
        times = [amount(row.median_ms) if row else "-" for row in (pair.first, pair.second)]
        style = styles.get(pair.verdict, "dim")
        subject, size, direction, dtype = pair.row.work
        lines.append([
            escape(f"{subject}, {direction}, {size}, {dtype}"), escape(pair.row.implementation), *times,
            amount(pair.ratio), amount(pair.memory_ratio), f"[{style}]{escape(pair.verdict)}[/]",
        ])  # fmt: skip
    columns = ["work", "implementation", "first ms", "second ms", "time ratio", "memory ratio", ""]
    screen.table("Below 1: the second is faster, or takes less memory", columns, lines)
    for difference in differences(first, second):
        screen.say(f"[dim]{escape(difference)}[/]")
