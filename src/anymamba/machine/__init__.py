"""Facts about this machine, without opinions (those are `anymamba.doctor`'s).

One module a family of facts: a frozen dataclass and the function that reads it. Every function takes what it looks at
(environment, platform name, a way to run programs) as arguments with honest defaults, so a test can put any machine in
front of it. Nothing here imports torch into this process: a torch that dies on import must not take the doctor with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anymamba.machine.facts import Machine, read_machine

__all__ = ["Machine", "read_machine"]


def __getattr__(name: str) -> Any:
    """Import what reads everything only when somebody asks: operators want a folder and an allocation from this package."""
    if name in __all__:
        from anymamba.machine import facts

        return getattr(facts, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
