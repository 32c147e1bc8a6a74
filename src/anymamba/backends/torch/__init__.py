"""Vectorised PyTorch with hand-written backward; any device."""

from __future__ import annotations

PRIORITY = 50
SUMMARY = "Vectorised PyTorch with hand-written backward; any device"


def unavailable() -> str | None:
    """Return None: it runs wherever torch does."""
    return None
