"""The checks, grouped by subject: one function a check, `Machine` in, `Result` out (None: does not apply here).

Every public function of every module here is a check and is found by itself; their order is the order of `ORDER` (new
modules come last) and, within a module, of the file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator

from anymamba.doctor.result import Result
from anymamba.machine import Machine

__all__ = ["Check", "all_checks"]

Check = Callable[[Machine], "Result | None"]

ORDER = (
    "python", "torch", "gpu", "operators", "packages", "project", "folders", "network", "wsl", "windows", "extensions",
    "triton", "compilers",
)  # fmt: skip


def all_checks() -> Iterator[Check]:
    """Yield every check in the order shown."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    for name in sorted(names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name)):
        module = importlib.import_module(f"{__name__}.{name}")
        for function_name, function in vars(module).items():
            public = callable(function) and not function_name.startswith("_")
            if public and getattr(function, "__module__", "") == module.__name__:
                yield function
