"""`anymamba export ROUTE`: write the files of another way to a working environment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from anymamba.cli.terminal import terminal

SCHEMA = "anymamba-export/1"
_ROUTES = """\
Routes: environment (conda, pip, PowerShell, sh), dockerfile, compose, wsl, github-actions, slurm, requirements-offline."""


def command(
    route: Annotated[str, typer.Argument(help=_ROUTES, metavar="ROUTE")],
    versions: Annotated[
        str,
        typer.Option(
            help="reference: the guide's (Python 3.10, torch 2.1.1, CUDA 11.8); here: what is installed; newest: the newest "
            "torch for this machine's driver and card."
        ),
    ] = "reference",
    to: Annotated[Path, typer.Option("--to", help="The folder to write to.")] = Path(),
    native: Annotated[bool, typer.Option("--native", help="With what compiling upstream's extensions needs.")] = False,
    anymamba: Annotated[
        str | None, typer.Option(help="What pip installs for this product: a requirement, a wheel or an address.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the files; write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the files, or what was written, as JSON.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
) -> None:
    """Write the files of another way to a working environment.

    A file that is there with another content is never overwritten without asking; where nobody can be asked, nothing is
    written and the command ends with 2.

    Example: anymamba export dockerfile --versions newest --to docker
    """
    from anymamba.machine import read_machine
    from anymamba.routes import choose_versions, make_route, write_files

    choice = choose_versions(versions, machine=lambda: read_machine(operators=False), native=native, anymamba=anymamba)
    files = make_route(route, choice)
    screen = terminal()
    if dry_run and as_json:
        screen.json({"schema": SCHEMA, "files": [{"path": file.path, "text": file.text} for file in files]})
        return
    if dry_run:
        for file in files:
            screen.say(f"[bold]--- {escape(file.path)}[/]")
            screen.out.file.write(file.text + "\n")
        return

    def overwrite(path: Path) -> bool:
        return force or (sys.stdin.isatty() and typer.confirm(f"Overwrite {path}?", err=True))

    written = write_files(to, files, overwrite=overwrite)
    if as_json:
        screen.json({"schema": SCHEMA, "files": [{"path": path, "what": what} for path, what in written]})
        return
    for path, what in written:
        screen.say(f"{what:9} {escape(str(to / path))}")
