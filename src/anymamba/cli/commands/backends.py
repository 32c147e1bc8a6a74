"""`anymamba backends`: which backend computes what here, and why the others do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from anymamba.cli.terminal import terminal

if TYPE_CHECKING:
    from anymamba.backends.table import Row


def command(
    device: Annotated[str, typer.Option(help="Where the operators would run: cpu, cuda, cuda:1, mps, xpu.")] = "",
    dtype: Annotated[str, typer.Option(help="Of the activations: float32, float16, bfloat16 or float64.")] = "float32",
    json: Annotated[bool, typer.Option("--json", help="Print the table as JSON (schema anymamba-backends/1).")] = False,
) -> None:
    """Show for every operator which backend is chosen, which others could do it, and why the rest cannot.

    The first backend from the left that can, does; ANYMAMBA_BACKEND=NAME asks for one by name. Without --device: the
    NVIDIA card if there is one, else the CPU.

    Example: anymamba backends --device cpu --dtype bfloat16
    """
    from anymamba import backends
    from anymamba.backends.table import SCHEMA, table
    from anymamba.measure.selection import parse_device, parse_dtype

    where, what = parse_device(device), parse_dtype(dtype)
    rows = table(where, what)
    known = [
        {"name": name, "summary": backends.summary(name), "unavailable": backends.unavailable(name)}
        for name in backends.names()
    ]
    if json:
        terminal().json(
            {
                "schema": SCHEMA,
                "device": str(where),
                "dtype": dtype,
                "requested": backends.requested(),
                "backends": known,
                "operators": [row.to_json() for row in rows],
            }
        )
        return
    absent = {one["name"] for one in known if one["unavailable"] is not None}
    cells = [[escape(row.operator), *_cells(row, absent)] for row in rows]
    terminal().table(f"{where}, {dtype}", ["operator", *backends.names()], cells)
    terminal().say("")
    for one in known:
        terminal().say(f"[bold]{one['name']}[/]: {escape(str(one['summary']))}")
        if one["unavailable"] is not None:
            terminal().say(f"  not here: {escape(one['unavailable'])}")
    wanted = backends.requested()
    if wanted is not None:
        terminal().say(f"\n{backends.ENVIRONMENT_VARIABLE} asks for [bold]{escape(wanted)}[/]: nothing else is used.")


def _cells(row: Row, absent: set[str | None]) -> list[str]:
    if not row.choices:
        return ["no typical call of this dtype"]
    cells = []
    for choice in row.choices:
        if choice.backend == row.chosen:
            cells.append("[bold green]chosen[/]")
        elif choice.refusal is None:
            cells.append("able")
        else:
            cells.append(f"[dim]{'not here' if choice.backend in absent else escape(choice.refusal)}[/]")
    return cells
