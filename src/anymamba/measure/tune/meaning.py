"""What the parameters of every kernel mean, as declared beside their launches."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from anymamba.backends import tuned

__all__ = ["meanings"]


def meanings() -> dict[str, dict[str, str]]:
    """Return the meaning of each parameter by kernel: of all backends whose modules can be imported here."""
    for name in ("cuda", "cpu"):
        try:
            package: ModuleType = importlib.import_module(f"anymamba.backends.{name}")
            for module in pkgutil.iter_modules(package.__path__):
                if not module.ispkg:
                    importlib.import_module(f"{package.__name__}.{module.name}")
        except ImportError:  # the CPU's without numba: nothing of them runs here
            continue
    return {kernel: dict(names) for kernel, names in sorted(tuned.declared().items())}
