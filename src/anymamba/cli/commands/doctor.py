"""`anymamba doctor`: what this machine is, what works on it, and one line to cure what does not."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Annotated

import typer
from rich.markup import escape

from anymamba.cli.terminal import Terminal, terminal
from anymamba.doctor import Diagnosis, Result, Status, Way, examine
from anymamba.doctor.reference import ReferenceRow
from anymamba.doctor.verdict import Verdict
from anymamba.machine import read_machine

# Words, not signs: a console with code page 936 or plain ASCII shows them too.
_MARKS = {
    Status.OK: "[green]ok[/]",
    Status.INFO: "[blue]info[/]",
    Status.WARN: "[yellow]warn[/]",
    Status.FAIL: "[bold red]FAIL[/]",
}


class _For(str, Enum):
    PORT = "port"
    NATIVE = "native"


def command(
    way: Annotated[
        _For | None,
        typer.Option("--for", help="Show only what matters for the port (no compiler) or for a native build."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON (schema anymamba-doctor/1).")] = False,
    operators: Annotated[bool, typer.Option(help="Call each operator once to see it run.")] = True,
) -> None:
    """Look at this machine and say what works, what does not, and how to cure it.

    Ends with 0 when nothing failed for the way asked for (the port, unless --for native is given), else with 1.

    Example: anymamba doctor --for native
    """
    diagnosis = examine(read_machine(operators=operators))
    judged = Way.NATIVE if way is _For.NATIVE else Way.PORT
    if json:
        terminal().json(diagnosis.to_json())
    else:
        show(terminal(), diagnosis, Way.BOTH if way is None else judged)
    if not diagnosis.healthy(judged):
        raise typer.Exit(1)


def show(screen: Terminal, diagnosis: Diagnosis, way: Way) -> None:
    """Print the checks, the comparison with the reference environment, the cures and the verdicts."""
    results = diagnosis.about(way)
    screen.table("", ["", "check", "for", "seen"], [_row(result) for result in results])
    screen.say("")
    reference = [_reference_row(row) for row in diagnosis.reference]
    screen.table("The guide's reference environment", ["", "what", "guide", "here", "matters for"], reference)
    _show_cures(screen, [result for result in results if result.status in (Status.WARN, Status.FAIL)])
    screen.say("")
    for verdict in diagnosis.verdicts:
        if way is Way.BOTH or verdict.route.startswith(way.value):
            screen.say(_sentence(verdict))


def _row(result: Result) -> list[str]:
    return [_MARKS[result.status], escape(result.title), result.way.value, escape(result.seen)]


def _reference_row(row: ReferenceRow) -> list[str]:
    mark = "[green]same[/]" if row.agrees else "none" if not row.seen else "other"
    return [
        mark,
        escape(row.title),
        escape(row.wanted),
        escape(row.seen or "-"),
        escape(f"{row.matters_for}: {row.note}"),
    ]


def _show_cures(screen: Terminal, troubles: Sequence[Result]) -> None:
    for result in troubles:
        screen.say("")
        screen.say(
            f"{_MARKS[result.status]} [bold]{escape(result.title)}[/] ({escape(result.id)}): {escape(result.seen)}"
        )
        if result.wanted:
            screen.say(f"  wanted: {escape(result.wanted)}")
        if result.why:
            screen.say(f"  why:    {escape(result.why)}")
        if result.fix:
            screen.out.print(f"  fix:    {escape(result.fix)}", soft_wrap=True)  # one line, to be copied whole


def _sentence(verdict: Verdict) -> str:
    if verdict.works is None:
        answer = "does not apply: no GPU here"
    elif verdict.works:
        answer = "[green]works[/]" + (f"; better with: {', '.join(verdict.better)}" if verdict.better else "")
    else:
        answer = f"[red]does not work yet[/]; first: {', '.join(verdict.obstacles)}"
    return f"[bold]{verdict.route}[/]: {answer}"
