"""CPU kernels, compiled by numba on first use; no compiler needed. The extra `anymamba[cpu]` brings numba."""

from __future__ import annotations

import importlib.util

PRIORITY = 20
SUMMARY = "Kernels for the CPU, compiled by numba on first use; pip install anymamba[cpu]"


def unavailable() -> str | None:
    """Return why nothing of it works here, or None."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed (pip install numba)"
    return None
