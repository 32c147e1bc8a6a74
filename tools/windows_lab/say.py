"""What the laboratory says: one plain line at a time, whole, from any thread."""

from __future__ import annotations

import sys
import threading

_lock = threading.Lock()


def say(text: str) -> None:
    """Print one line."""
    with _lock:
        sys.stdout.write(f"windows-lab: {text}\n")
        sys.stdout.flush()
