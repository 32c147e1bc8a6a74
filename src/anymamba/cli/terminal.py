"""The one object through which commands speak.

Results go to stdout, everything else (progress, notes, errors) to stderr, so `anymamba ... --json > file` is always clean.
A console whose code page cannot show a character gets a replacement, never a UnicodeEncodeError.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from anymamba.errors import AnymambaError


class Terminal:
    """Shows tables, notes and errors; or JSON for machines."""

    def __init__(self) -> None:
        self.out = Console(file=_forgiving(sys.stdout), soft_wrap=False, highlight=False)
        self.err = Console(file=_forgiving(sys.stderr), stderr=True, highlight=False)

    def json(self, value: Any) -> None:
        """Print `value` as JSON on stdout (ASCII only: safe on every code page)."""
        self.out.file.write(json.dumps(value, indent=2, ensure_ascii=True) + "\n")

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Print a table on stdout; cells may hold rich markup."""
        table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.out.print(table)

    def say(self, text: str) -> None:
        """Print one result line on stdout."""
        self.out.print(text)

    def note(self, text: str) -> None:
        """Print one line about what is going on, on stderr."""
        self.err.print(text, style="dim")

    def error(self, error: AnymambaError) -> None:
        """Print what happened, why and the next step, on stderr."""
        self.err.print(f"[bold red]Error:[/] {_escape(error.what)}")
        if error.why:
            self.err.print(f"[bold]Why:[/]   {_escape(error.why)}")
        if error.next_step:
            self.err.print(f"[bold]Next:[/]  {_escape(error.next_step)}")


@functools.cache
def terminal() -> Terminal:
    """Return the process's terminal."""
    return Terminal()


def _forgiving(stream: TextIO) -> TextIO:
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    return stream


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
