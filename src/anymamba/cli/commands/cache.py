"""`anymamba cache info|clear|path`: what is kept on disk for the next time."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer
from rich.markup import escape

from anymamba.cli.terminal import terminal


class _Action(str, Enum):
    INFO = "info"
    CLEAR = "clear"
    PATH = "path"


def command(
    action: Annotated[_Action, typer.Argument(help="info: what is kept; clear: delete it; path: the folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Show, delete or locate what is kept on disk: downloaded sources, compiled kernels, measurements.

    Everything can be fetched or made again. ANYMAMBA_CACHE_DIR moves the folder.

    Example: anymamba cache info
    """
    from anymamba.machine.folders import cache_folder
    from anymamba.upstream.cache import cache_contents, clear_cache

    screen = terminal()
    if action is _Action.PATH:
        # whole, whatever the console's width: it is made to be pasted
        if as_json:
            screen.json({"path": str(cache_folder())})
        else:
            screen.out.print(escape(str(cache_folder())), soft_wrap=True)
        return
    contents = cache_contents()
    if action is _Action.CLEAR:
        clear_cache()
    files, size = sum(part.files for part in contents), sum(part.size for part in contents)
    if as_json:
        parts = {part.name: {"files": part.files, "bytes": part.size} for part in contents}
        screen.json({"path": str(cache_folder()), "parts": parts, "cleared": action is _Action.CLEAR})
    elif action is _Action.CLEAR:
        screen.say(f"Deleted {files} files, {size / 1e6:.1f} MB.")
    else:
        rows = [[escape(part.name), str(part.files), f"{part.size / 1e6:.1f} MB"] for part in contents]
        screen.table("", ["part", "files", "size"], [*rows, ["all", str(files), f"{size / 1e6:.1f} MB"]])
        screen.out.print(f"In {escape(str(cache_folder()))}", soft_wrap=True)
