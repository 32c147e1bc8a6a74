"""Calls like one before: no checks, no choice of a backend, no views; one lookup, then straight to the launch.

A backend's module may have `prepare(operator, arguments)`, which returns a function of the same arguments that does the call
for tensors alike (same shapes, strides, dtypes, devices, alignment), or None. An operator keeps it under the metadata of the
call that passed its checks. What costs 20 us of Python otherwise costs 5: at decoding sizes that is the time of the operator.
A differentiable operator's prepared call has a method `backward` too.

Making the metadata's tuple takes longest of all, half a microsecond a tensor. So the first few kinds of calls are known by one
function in C++ as well, the one with which torch.compile guards tensors (`same_kind`). It does not see where tensors begin: a
backend that says CHECKS_ALIGNMENT returns None from a prepared call whose tensors do not all begin at 16 bytes, and the call
goes the longer way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from anymamba.backends import Operator, is_recording, requested, tuned

__all__ = ["DEVICES", "STEP_DEVICES", "Prepared", "forget", "same_kind"]

DEVICES = {"cuda"}
"""Types of devices whose backends prepare calls of any operator."""

STEP_DEVICES = {"cuda", "cpu"}
"""Types of devices whose backends prepare decoding steps."""

MOST_KINDS = 8
"""Kinds of calls of an operator that are known by `same_kind`: they are tried one after the other."""

_all: list[Prepared] = []


def _guarded(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    guards: Any = torch._C._dynamo.guards.TensorGuards
    check: Callable[..., bool] = guards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check
    return check


def _works() -> bool:
    """Return whether the guards of this PyTorch tell apart what must be told apart: they are none of its public parts."""
    try:
        one, other = torch.zeros(2, 3, 4), torch.zeros(5)
        check = _guarded((one, other))
        wanted = check(one.clone(), other.clone()) is True
        unwanted = (
            one.half(), one.to("meta"), one[:, :, :3], torch.zeros(2, 4, 3).transpose(1, 2), torch.zeros(1, 3, 4),
            torch.zeros(2, 3), one.clone().requires_grad_(), torch.nn.Parameter(one), None,
        )  # fmt: skip
        return wanted and not any(check(tensor, other) for tensor in unwanted)
    except Exception:
        return False


_guards_work = _works()


def same_kind(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Return a function that says whether as many tensors have the types, shapes, strides, dtypes, devices and
    requires_grad of these; it may say no though they have. None where this PyTorch has none.
    """
    return _guarded(tensors) if _guards_work else None


class Prepared:
    """What an operator remembers of its calls."""

    def __init__(self) -> None:
        self._calls: dict[object, Callable[..., Any]] = {}
        self._kinds: list[tuple[tuple[object, ...], Callable[..., bool], Callable[..., Any]]] = []
        _all.append(self)

    def alike(self, tensors: Sequence[torch.Tensor | None], *rest: object) -> Callable[..., Any] | None:
        """Return the function that does calls like this one, if this is one of the few known at a glance.

        Parameters
        ----------
        tensors, rest
            As of `key`.

        Returns
        -------
        callable or None
            It returns None itself if the tensors begin elsewhere than at 16 bytes.
        """
        if not self._kinds or is_recording():
            return None
        given = [tensor for tensor in tensors if tensor is not None]
        asked = (
            requested(),
            len(tensors),
            rest,
            [tensor is None for tensor in tensors] if len(given) < len(tensors) else None,
        )
        for known, check, call in self._kinds:
            if known == asked and check(*given):
                return call
        return None

    def _know(self, tensors: Sequence[torch.Tensor | None], rest: tuple[object, ...], call: Callable[..., Any]) -> None:
        given = [tensor for tensor in tensors if tensor is not None]
        if len(self._kinds) >= MOST_KINDS or any(tensor.data_ptr() & 15 for tensor in given):
            return
        check = same_kind(given)
        # The guards refuse one tensor in two places: not worth an entry.
        if check is not None and check(*given):
            nones = [tensor is None for tensor in tensors] if len(given) < len(tensors) else None
            self._kinds.append(((requested(), len(tensors), rest, nones), check, call))

    def key(self, tensors: Sequence[torch.Tensor | None], *rest: object) -> object:
        """Return what a call of these tensors and other arguments is remembered by. Only for real tensors."""
        metadata = [None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15) for t in tensors]
        return tuple(metadata), rest, requested()

    def find(self, key: object) -> Callable[..., Any] | None:
        """Return the function that does a call with this key, None if there was none yet."""
        return None if is_recording() else self._calls.get(key)

    def remember(
        self, key: object, backend: Any, operator: Operator, arguments: tuple[Any, ...],
        tensors: Sequence[torch.Tensor | None], *rest: object,
    ) -> None:  # fmt: skip
        """Ask the backend that did the call to prepare the next one like it; `tensors` and `rest` as of `key`."""
        prepare = getattr(backend, "prepare", None)
        call = None if prepare is None else prepare(operator, arguments)
        if call is not None:
            if len(self._calls) > 4096:  # a caller with ever new sizes must not grow this for ever
                self._calls.clear()
                self._kinds.clear()
            self._calls[key] = call
            if getattr(backend, "CHECKS_ALIGNMENT", False):
                self._know(tensors, rest, call)


def forget() -> None:
    """Forget all prepared calls (tests, when they change the runtime beneath)."""
    for prepared in _all:
        prepared._calls.clear()
        prepared._kinds.clear()


tuned.on_forget(forget)
