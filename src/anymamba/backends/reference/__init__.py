"""The formula written down: a plain loop over time. The oracle of every test; slow."""

from __future__ import annotations

PRIORITY = 90
SUMMARY = "The formula written down: a plain loop over time. The oracle of every test; slow"


def unavailable() -> str | None:
    """Return None: it runs wherever torch does."""
    return None
