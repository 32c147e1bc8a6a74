"""`anymamba provenance [PACKAGE]`: where each installed file came from, what changed it, and whether it is still intact."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from anymamba.cli.progress import shown_progress
from anymamba.cli.terminal import Terminal, terminal
from anymamba.errors import OptionError
from anymamba.upstream.provenance import Traced

SCHEMA = "anymamba-provenance/1"


def command(
    packages: Annotated[
        list[str] | None, typer.Argument(metavar="[PACKAGE]...", help="mamba_ssm, causal_conv1d; default both.")
    ] = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="Print every change to upstream's text as a unified diff, for `patch -p1`.")
    ] = False,
    sbom: Annotated[bool, typer.Option("--sbom", help="Print a CycloneDX 1.6 bill of materials (JSON).")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="For --diff: use the cache; ask no index.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help=f"Print JSON (schema {SCHEMA}).")] = False,
    python: Annotated[
        Path | None, typer.Option("--python", metavar="PATH", help="The environment's interpreter instead of this one.")
    ] = None,
) -> None:
    """Show where each installed file came from and which rule changed it, and verify the installation file by file.

    Ends with 1 when a file was altered, added or removed since. Where the source archive is in the cache, the port is made
    again and compared byte for byte; else the hashes noted when it was installed are compared.

    Example: anymamba provenance mamba_ssm --diff
    """
    from anymamba.upstream.environment import inspect_environment
    from anymamba.upstream.provenance import differences, trace
    from anymamba.upstream.sbom import bill_of_materials

    if diff + sbom + as_json > 1:
        raise OptionError("--diff, --sbom and --json are three different outputs.", next_step="name one of them")
    environment = python or Path(sys.executable)
    screen = terminal()
    with shown_progress() as progress:
        ports = trace(environment, packages or [], progress)
        changes = [text for port in ports for text in differences(port, environment, offline, progress)] if diff else []
    if sbom:
        screen.json(bill_of_materials(ports, inspect_environment(environment).torch))
    elif as_json:
        screen.json({"schema": SCHEMA, "packages": [asdict(port) for port in ports]})
    elif diff:
        for text in changes:
            screen.out.file.write(text)
    else:
        for port in ports:
            _show(screen, port)
    if any(port.altered for port in ports):
        for port in ports:
            for file in port.altered:
                path = escape(str(Path(port.location, file.path)))
                screen.err.print(f"{file.state}: {path}", soft_wrap=True)  # whole: it is made to be pasted
        screen.note("Put right by: anymamba install")
        raise typer.Exit(1)


def _show(screen: Terminal, port: Traced) -> None:
    screen.say(f"[bold]{port.name} {port.version}[/] in {escape(port.location)}")
    screen.say(f"from {escape(port.source_file)}, sha256 {port.source_sha256}, by anymamba {port.made_by}")
    rows = []
    for file in port.files:
        colour = "dim" if file.state == "intact" else "bold red"
        rows.append([escape(file.path), file.origin, ", ".join(file.rules), f"[{colour}]{file.state}[/]"])
    screen.table("", ["file", "origin", "rules", "state"], rows)
    for rule, reason in port.reasons.items():
        screen.say(f"[bold]{rule}[/]: {escape(reason)}")
    how = "made again from its source archive" if port.judged_by == "source" else "compared with the hashes noted then"
    screen.say(f"{len(port.files) - len(port.altered)} of {len(port.files)} files intact ({how}).\n")
