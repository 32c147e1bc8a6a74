"""`anymamba verify`: run everything once and compare it with the float64 reference."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.markup import escape

from anymamba.cli.terminal import terminal


def command(
    quick: Annotated[
        bool, typer.Option("--quick", help="One typical call an operator, float32 and bfloat16: under 10 seconds.")
    ] = False,
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend (again for another).")] = None,
    device: Annotated[list[str] | None, typer.Option(help="Only this device (again for another).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON (schema anymamba-verify/1).")] = False,
) -> None:
    """Prove that what runs here is right: the guide's script, every operator, whole models.

    Every operator runs on every backend that works here, in every dtype, forward and backward, against the float64
    reference; the table shows the error of the worst tensor beside its bound. Then Mamba, Mamba2 and MambaLMHeadModel
    of the installed mamba_ssm train a few steps and generate. Ends with 0 when nothing failed, else with 1.

    Example: anymamba verify --quick
    """
    from rich.progress import Progress

    from anymamba.cli.commands._verify_report import show
    from anymamba.measure.selection import parse_device
    from anymamba.measure.verify import make_plan, passed, to_json, verify

    plan = make_plan(quick, backend or [], [parse_device(name) for name in device or []])
    start = time.perf_counter()
    rows = []
    screen = terminal()
    with Progress(console=screen.err, transient=True, disable=json or not screen.err.is_terminal) as progress:
        task = progress.add_task("", total=len(plan))
        for row in verify(plan):
            rows.append(row)
            progress.update(task, advance=1, description=escape(f"{row.name} {row.backend} {row.dtype} {row.device}"))
    seconds = time.perf_counter() - start
    if json:
        screen.json(to_json(rows, seconds))
    else:
        show(screen, rows, seconds)
    if not passed(rows):
        raise typer.Exit(1)
