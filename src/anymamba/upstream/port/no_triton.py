"""What upstream's kernel modules get for `triton` and `tl` where Triton is not installed.

Enough to define the kernels and the plain functions beside them; launching a kernel raises `MissingOperatorError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anymamba.errors import MissingOperatorError

__all__ = ["tl", "triton"]


class _Kernel:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__ = function.__name__
        self.fn = function

    def __getitem__(self, grid: Any) -> _Kernel:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise MissingOperatorError(
            f"The kernel {self.__name__} of mamba_ssm needs Triton, which is not installed.",
            why="anymamba has no operator of its own for the function that launches it.",
            next_step="python -m pip install triton (on Windows: triton-windows)",
        )


class _Namespace:
    """Answers to every name; used as a decorator it makes kernels."""

    __anymamba_stand_in__ = True
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Namespace()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if (
            len(arguments) == 1
            and not options
            and (callable(arguments[0]) and not isinstance(arguments[0], _Namespace))
        ):
            return arguments[0] if isinstance(arguments[0], _Kernel) else _Kernel(arguments[0])
        return _Namespace()

    def __getitem__(self, _: Any) -> Any:
        return _Namespace()

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        """Return a / b rounded up."""
        return -(-a // b)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        """Return the least power of two that is not less than n."""
        return 1 << max(n - 1, 0).bit_length()


triton: Any = _Namespace()
tl: Any = _Namespace()
