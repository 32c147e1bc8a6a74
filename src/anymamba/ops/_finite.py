"""`ANYMAMBA_CHECK_FINITE=1`: the first tensor with a NaN or an infinity in it gets its name said, where it arises.

Training in half precision ends in "loss is nan" a thousand steps after the cause. With the variable set (read once, when
`anymamba.ops` is imported) each operator looks at its arguments before it computes, at its results, and in the backward
at the gradient that arrives and at those it gives, and raises `NonFiniteError` at the first that is not finite. Each look
waits for the device, so this is for finding a fault, not for training. Unset, the operators are the plain functions.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from anymamba.errors import NonFiniteError
from anymamba.ops._library import _is_compiling

__all__ = ["VARIABLE", "check_finite", "watch", "watched"]

VARIABLE = "ANYMAMBA_CHECK_FINITE"


def watched() -> bool:
    """Return whether the environment asks for it."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def watch(namespace: dict[str, Any], names: list[str]) -> None:
    """Put checking functions in the place of these functions, in their own modules too."""
    for name in names:
        function = namespace[name]
        if inspect.isfunction(function) and not name.endswith("_ref"):
            namespace[name] = check_finite(function)
            setattr(sys.modules[function.__module__], name, namespace[name])


def check_finite(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its arguments, results and gradients looked at."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checking(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            if isinstance(value, Tensor):
                _look(function, f"argument {name}", value, "it was not finite before this operator was called")
                if value.requires_grad and torch.is_grad_enabled():
                    # A view of its own: its hook sees this operator's part of the gradient alone.
                    view = value.view_as(value)
                    view.register_hook(
                        functools.partial(
                            _look, function, f"the gradient of {name}", why="it arose in this operator's backward"
                        )
                    )
                    bound.arguments[name] = view
        result = function(*bound.args, **bound.kwargs)
        for name, tensor in _tensors(result):
            _look(function, name, tensor, "it arose in this operator: its arguments were finite")
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(
                    functools.partial(
                        _look, function, f"the gradient that arrives for {name}", why="it arose after this operator"
                    )
                )
        return result

    return checking


def _tensors(result: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(result, Tensor):
        yield "the result", result
    elif isinstance(result, (tuple, list)):
        yield from ((f"result {i}", part) for i, part in enumerate(result) if isinstance(part, Tensor))


def _look(function: Callable[..., Any], name: str, tensor: Tensor, why: str) -> None:
    if not tensor.is_floating_point() and not tensor.is_complex():
        return
    finite = tensor.detach().isfinite()
    if finite.all():
        return
    bad = finite.logical_not().nonzero()
    values = tensor.detach()[tuple(bad.T)]
    raise NonFiniteError(
        f"{function.__name__}: {name}, {tensor.dtype} {tuple(tensor.shape)}, has {int(values.isnan().sum())} NaN and "
        f"{int(values.isinf().sum())} infinite values of {tensor.numel()}, the first at {tuple(bad[0].tolist())}.",
        why=why + ".",
        next_step="look at what computed it"
        if "before" in why or "after" in why
        else "try the same call in float32; if it is finite there, the values are outside this dtype's range",
    )
