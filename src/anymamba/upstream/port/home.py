"""HOME and TRITON_CACHE_DIR: set what is missing, never overwrite what is there.

Triton looks for its cache below HOME; Windows has USERPROFILE instead, and older Tritons die with KeyError: 'HOME'.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

__all__ = ["complete_environment"]


def complete_environment(environment: MutableMapping[str, str] | None = None) -> dict[str, str]:
    """Set the variables that are missing or empty, and return what was set.

    Parameters
    ----------
    environment : mutable mapping, optional
        Default: this process's.
    """
    variables = os.environ if environment is None else environment
    added: dict[str, str] = {}
    if not variables.get("HOME"):
        profile = variables.get("USERPROFILE") or _home()
        if profile:
            added["HOME"] = profile
    if not variables.get("TRITON_CACHE_DIR") and (home := added.get("HOME")):
        # where HOME was there, Triton's own default below it holds
        added["TRITON_CACHE_DIR"] = str(Path(home) / ".triton" / "cache")
    variables.update(added)
    return added


def _home() -> str:
    try:
        return str(Path.home())
    except RuntimeError:
        return ""
