"""How `anymamba verify` shows its rows: 80 columns, one line a backend, an error beside its bound for every dtype."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from anymamba.cli.terminal import Terminal
from anymamba.measure.verify import Row, Status, passed

DTYPES = ("fp32", "fp16", "bf16", "fp64")
_STYLES = {Status.PASSED: "green", Status.FAILED: "bold red", Status.REFUSED: "dim", Status.SKIPPED: "dim"}


def show(screen: Terminal, rows: Sequence[Row], seconds: float) -> None:
    """Print the guide's script, the operators, the models, what failed, and the sum."""
    for row in rows:
        if row.part == "guide":
            _line(screen, row)
    operators = [row for row in rows if row.part == "operators"]
    _show_operators(screen, operators)
    screen.say("\n[bold]Models of the installed mamba_ssm[/]")
    models = [row for row in rows if row.part == "models"]
    for row in models:
        if row.status is not Status.SKIPPED:
            _line(screen, row)
    for reason in dict.fromkeys(row.message for row in models if row.status is Status.SKIPPED):
        screen.say(f"[dim]skipped: {escape(reason)}[/]")
    _show_refusals(screen, operators)
    failed = [row for row in rows if row.status is Status.FAILED]
    if failed:
        screen.say("\n[bold red]Failed[/]")
        for row in failed:
            screen.say(f"[red]{escape(_place(row))}[/]: {escape(row.message)}{_numbers(row)}")
    counts = {status: sum(row.status is status for row in rows) for status in Status}
    summary = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
    colour = "green" if passed(rows) else "bold red"
    screen.say(f"\n[{colour}]{summary}[/] in {seconds:.1f} s")


def _line(screen: Terminal, row: Row) -> None:
    what = f"{row.name} on {row.device}"
    screen.say(
        f"[{_STYLES[row.status]}]{row.status.value:<8}[/] {escape(f'{what:<34}')} {escape(row.message)}{_numbers(row)}"
    )


def _show_operators(screen: Terminal, rows: Sequence[Row]) -> None:
    dtypes = [dtype for dtype in DTYPES if any(row.dtype == dtype for row in rows)]
    screen.say("\n[bold]Operators[/]: error/bound of the worst result, against the float64 reference")
    screen.say(f"  {'backend':<10} {'device':<7} " + " ".join(f"{dtype:<13}" for dtype in dtypes))
    by_case: dict[tuple[str, str], dict[tuple[str, str], dict[str, Row]]] = {}
    for row in rows:
        lines = by_case.setdefault((row.name, row.case), {})
        lines.setdefault((row.backend, row.device), {})[row.dtype] = row
    for (name, case), lines in by_case.items():
        screen.say(f"[bold]{escape(name)}[/]: {escape(case)}")
        for (backend, device), found in lines.items():
            cells = " ".join(_cell(found.get(dtype)) for dtype in dtypes)
            screen.say(f"  {escape(f'{backend:<10} {device:<7}')} {cells}".rstrip())


def _cell(row: Row | None) -> str:
    if row is None:
        return " " * 13
    text = row.status.value if row.error is None or row.bound is None else f"{_short(row.error)}/{_short(row.bound)}"
    return f"[{_STYLES[row.status]}]{text:<13}[/]"


def _show_refusals(screen: Terminal, rows: Sequence[Row]) -> None:
    refused = {(row.backend, row.name, row.message): None for row in rows if row.status is Status.REFUSED}
    if refused:
        screen.say("\n[bold]Refused[/]")
        for backend, name, reason in refused:
            screen.say(f"{escape(f'{backend}, {name}')}: {escape(reason)}")


def _place(row: Row) -> str:
    return ", ".join(part for part in (row.name, row.case, row.backend, row.dtype, row.device) if part)


def _numbers(row: Row) -> str:
    return "" if row.error is None or row.bound is None else f" (error {_short(row.error)}, bound {_short(row.bound)})"


def _short(number: float) -> str:
    """Return 6.5e-8 for 6.5e-08, and 2e-6 for 2.0e-06."""
    if number == 0 or number == float("inf"):
        return f"{number:.0f}"
    mantissa, exponent = f"{number:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
