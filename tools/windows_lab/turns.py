"""Several commands may use one laboratory at once; one that changes it waits until it is alone.

Without this, a `setup` from another checkout would replace a Windows Python under a running test-suite.
"""

from __future__ import annotations

from types import TracebackType

from tools.windows_lab.layout import Layout
from tools.windows_lab.say import say

try:
    import fcntl
except ImportError:  # a real Windows, where `wine.find_or_install` says what is needed
    fcntl = None  # type: ignore[assignment]


class Turn:
    """Holds the laboratory, at first beside others; `alone` and `together` change between the two."""

    def __init__(self, layout: Layout, file: str = "turn.lock") -> None:
        layout.root.mkdir(parents=True, exist_ok=True)
        self._file = (layout.root / file).open("w", encoding="utf-8")

    def __enter__(self) -> Turn:
        self.together()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def alone(self) -> None:
        """Wait until no other command uses the laboratory, and keep all others out."""
        if fcntl is not None:
            self._take(fcntl.LOCK_EX)

    def together(self) -> None:
        """Keep out only what would change the laboratory."""
        if fcntl is not None:
            self._take(fcntl.LOCK_SH)

    def _take(self, kind: int) -> None:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another command that uses the laboratory")
            fcntl.flock(self._file, kind)
