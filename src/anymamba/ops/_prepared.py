"""Calls like one before: no checks, no choice of a backend, no views; one lookup, then straight to the launch.

A backend's module may have `prepare(operator, arguments)`, which returns a function of the same arguments that does the call
for tensors alike (same shapes, strides, dtypes, devices, alignment), or None. An operator keeps it under the metadata of the
call that passed its checks. What costs 20 us of Python otherwise costs 5: at decoding sizes that is the time of the operator.
A differentiable operator's prepared call has a method `backward` too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from anymamba.backends import Operator, is_recording, requested, tuned

__all__ = ["DEVICES", "STEP_DEVICES", "Prepared", "forget"]

DEVICES = {"cuda"}
"""Types of devices whose backends prepare calls of any operator."""

STEP_DEVICES = {"cuda", "cpu"}
"""Types of devices whose backends prepare decoding steps."""

_all: list[Prepared] = []


class Prepared:
    """What an operator remembers of its calls."""

    def __init__(self) -> None:
        self._calls: dict[object, Callable[..., Any]] = {}
        _all.append(self)

    def key(self, tensors: Sequence[torch.Tensor | None], *rest: object) -> object:
        """Return what a call of these tensors and other arguments is remembered by. Only for real tensors."""
        metadata = [None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15) for t in tensors]
        return tuple(metadata), rest, requested()

    def find(self, key: object) -> Callable[..., Any] | None:
        """Return the function that does a call with this key, None if there was none yet."""
        return None if is_recording() else self._calls.get(key)

    def remember(self, key: object, backend: Any, operator: Operator, arguments: tuple[Any, ...]) -> None:
        """Ask the backend that did the call to prepare the next one like it."""
        prepare = getattr(backend, "prepare", None)
        call = None if prepare is None else prepare(operator, arguments)
        if call is not None:
            if len(self._calls) > 4096:  # a caller with ever new sizes must not grow this for ever
                self._calls.clear()
            self._calls[key] = call


def forget() -> None:
    """Forget all prepared calls (tests, when they change the runtime beneath)."""
    for prepared in _all:
        prepared._calls.clear()


tuned.on_forget(forget)
