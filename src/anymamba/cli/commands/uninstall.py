"""`anymamba uninstall`: remove the ports and restore what was there before them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from anymamba.cli.progress import shown_progress
from anymamba.cli.terminal import terminal


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    python: Annotated[
        Path | None, typer.Option("--python", metavar="PATH", help="The environment's interpreter instead of this one.")
    ] = None,
) -> None:
    """Remove what `anymamba install` brought (packages, modules of --with), and restore what was there before."""
    from anymamba.upstream.transaction import uninstall

    screen = terminal()
    with shown_progress() as progress:
        restored = uninstall(python or Path(sys.executable), progress=progress)
    if as_json:
        screen.json({"removed": restored})
        return
    for name, entries in restored.items():
        screen.say(f"{name}: removed" + (f"; restored {', '.join(entries)}" if entries else ""))
