"""Progress of long actions on stderr: what is being done, and how much of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.markup import escape
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from anymamba.cli.terminal import terminal

__all__ = ["shown_progress"]


class _Shown:
    """A line for each step; the last one moves. Where stderr is no terminal, each step is one plain line."""

    def __init__(self, bars: Bars, live: bool) -> None:
        self._bars = bars
        self._live = live
        self._task: TaskID | None = None
        self._first: tuple[float, int] | None = None
        self._told = ""

    def step(self, text: str) -> None:
        """Finish the last step and begin this one."""
        if not self._live:
            terminal().note(text)
            return
        self.finish()
        self._first = None
        self._task = self._bars.add_task(escape(text), total=None, amount="")

    def advance(self, done: int, total: int | None) -> None:
        """Show how far the step is."""
        if self._task is not None:
            of = "" if total is None else f" of {total / 1024:.0f}"
            self._bars.update(self._task, amount=f"{done / 1024:.0f}{of} KiB{self._rate(done)}")

    def tell(self, text: str) -> None:
        """Show a word on how far the step is; where stderr is no terminal, once a change."""
        if self._task is not None:
            self._bars.update(self._task, amount=escape(text))
        elif not self._live and text != self._told:
            self._told = text
            terminal().note(escape(text))

    def _rate(self, done: int) -> str:
        now = time.monotonic()
        self._first = self._first or (now, done)  # a resumed download begins with what was there
        seconds = now - self._first[0]
        return f", {(done - self._first[1]) / 1024 / seconds:.0f} KiB/s" if seconds > 0.5 else ""

    def finish(self) -> None:
        """End the last step."""
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None


@contextmanager
def shown_progress() -> Iterator[_Shown]:
    """Show the steps of an action on stderr while the context lasts."""
    console = terminal().err
    # "line": a spinner of plain ASCII, for consoles whose code page has no more
    text, amount = TextColumn("{task.description}"), TextColumn("{task.fields[amount]}")
    columns = (SpinnerColumn("line"), text, amount, TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        shown = _Shown(bars, console.is_terminal)
        yield shown
        shown.finish()
