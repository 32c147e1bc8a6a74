"""Registration of operators with torch.library, the same way on every torch from 2.1 on.

Each differentiable operator is a pair as in aten: `anymamba::x` returns its outputs (and what the backward wants saved),
`anymamba::x_backward` returns the gradients. Eager code applies the autograd.Function directly on the chosen backend's
functions (no dispatcher: cheapest); torch.compile, torch.export and FakeTensor see `torch.ops.anymamba.x`, an opaque
operator with a fake implementation, whose Autograd kernel applies the same autograd.Function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from anymamba.backends import pinned, requested

__all__ = ["backward_where_forward_ran", "below_autograd", "define", "differentiated", "placeholder", "traced"]

_library = torch.library.Library("anymamba", "DEF")
# torch 2.1 has neither the tag nor the argument for it.
_tags: dict[str, Any] = {"tags": (torch.Tag.pt2_compliant_tag,)} if hasattr(torch.Tag, "pt2_compliant_tag") else {}
_is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling
# The dynamo of torch 2.1 cannot be asked for a tensor's type (nor can its DTensors be compiled).
_TYPES_ARE_OPAQUE = not hasattr(torch.library, "custom_op")

below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context in which an autograd.Function calls its own operator without coming back to itself."""


def define(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any] | None = None,
) -> None:
    """Register the operator ``anymamba::<schema>``.

    Parameters
    ----------
    schema : str
        As in native_functions.yaml, e.g. ``"scale(Tensor x, float by) -> Tensor"``.
    implementation : callable
        Runs on real tensors of any device, below autograd. Returns fresh tensors, none a view of an input.
    fake : callable
        Returns empty tensors of the right shape, dtype, device and strides.
    autograd : callable, optional
        Runs when gradients may be wanted: applies the autograd.Function.
    """
    name = schema.partition("(")[0]
    _library.define(schema, **_tags)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    if hasattr(torch.library, "register_fake"):
        torch.library.register_fake(f"anymamba::{name}", fake, lib=_library)
    elif hasattr(torch.library, "impl_abstract"):  # torch < 2.4
        torch.library.impl_abstract(f"anymamba::{name}", fake, lib=_library)
    else:  # torch < 2.2: FakeTensor runs the kernel of the meta device
        _library.impl(name, fake, "Meta")
    if autograd is not None:
        _library.impl(name, autograd, "Autograd")


Function = TypeVar("Function", bound=type[torch.autograd.Function])


def backward_where_forward_ran(function: Function) -> Function:
    """Decorate an autograd.Function: its backward runs on the backend that was asked for when its forward ran.

    Autograd runs a backward after the `use_backend` context has been left, and for CUDA tensors on another thread.
    """
    forward, backward = function.forward, function.backward

    @functools.wraps(forward)
    def remembering(ctx: Any, *arguments: Any) -> Any:
        ctx.backend_asked_for = requested()
        return forward(ctx, *arguments)

    @functools.wraps(backward)
    def recalling(ctx: Any, *gradients: Any) -> Any:
        with pinned(ctx.backend_asked_for):
            return backward(ctx, *gradients)

    function.forward, function.backward = staticmethod(remembering), staticmethod(recalling)  # type: ignore[method-assign]
    return function


def traced(x: torch.Tensor) -> bool:
    """Return whether the call must go through the dispatcher: tracing, or a tensor subclass (FakeTensor, DTensor).

    The functional wrappers of torch 2.1 are plain tensors to Python, so they are asked for by name.
    """
    if _TYPES_ARE_OPAQUE and _is_compiling():
        return True
    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        return type(x).__name__ != "DTensor" or _know_dtensors()
    return _is_compiling() or torch._is_functional_tensor(x)


def _know_dtensors() -> bool:
    """Tell PyTorch how the operators may be sharded, the first time that a DTensor comes."""
    from anymamba.distributed.dtensor import register  # imports torch.distributed.tensor, as the caller did

    register()
    return True


# What torch.compiler.assume_constant_result sets, without importing the compiler: dynamo calls the function while tracing.
_know_dtensors._dynamo_marked_constant = True  # type: ignore[attr-defined]


def differentiated(*tensors: torch.Tensor | None) -> bool:
    """Return whether autograd will want a backward through a function of these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def placeholder(like: torch.Tensor) -> torch.Tensor:
    """Return the empty tensor that stands for "none" among an operator's outputs (schemas have no optional outputs)."""
    return like.new_empty(0)
