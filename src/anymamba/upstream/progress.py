"""How a long action tells what it is doing, without knowing of terminals."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Progress", "Silent"]


class Progress(Protocol):
    """Receives the steps of an action; the command line shows them, tests record them."""

    def step(self, text: str) -> None:
        """A new step begins."""
        ...

    def advance(self, done: int, total: int | None) -> None:
        """`done` of `total` bytes of this step are here; total is None where nobody knows."""
        ...


class Silent:
    """Shows nothing."""

    def step(self, text: str) -> None:
        """Ignore."""

    def advance(self, done: int, total: int | None) -> None:
        """Ignore."""
