"""Argument checks shared by all operators: each names the argument, what it is and what it must be.

They read only metadata (shape, dtype, device), never values, so they cost no synchronisation and survive tracing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anymamba.errors import DeviceError, DtypeError, OptionError, ShapeError

__all__ = ["FLOATING", "Passed", "cast", "check_activation", "check_device", "check_dim", "check_dtype", "check_shape"]

FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Passed:
    """Remembers the metadata of calls that passed their checks: a call like one before needs one lookup, not ten checks.

    Give it everything the checks read, as one hashable tuple; never sizes of a traced tensor (they may be symbols).
    """

    def __init__(self) -> None:
        self._keys: set[object] = set()

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def add(self, key: object) -> None:
        if len(self._keys) > 4096:  # a caller with ever new sizes must not grow this for ever
            self._keys.clear()
        self._keys.add(key)


def check_dim(name: str, tensor: torch.Tensor, dims: int, meaning: str) -> None:
    """Raise ShapeError unless `tensor` has `dims` dimensions; `meaning` is like "(batch, dim, seqlen)"."""
    if tensor.dim() != dims:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, but must be {meaning}: {dims} dimensions.")


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int], meaning: str) -> None:
    """Raise ShapeError unless `tensor` has exactly this shape."""
    if tensor.shape != tuple(shape):
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, but must be {meaning} = {tuple(shape)}.")


def check_dtype(name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Raise DtypeError unless the tensor's dtype is one of `allowed`."""
    if tensor.dtype not in allowed:
        raise DtypeError(f"{name} has dtype {tensor.dtype}, but must be one of {', '.join(map(str, allowed))}.")


def check_device(name: str, tensor: torch.Tensor, like: torch.Tensor, like_name: str) -> None:
    """Raise DeviceError unless both tensors are on the same device."""
    if tensor.device != like.device:
        raise DeviceError(
            f"{name} is on {tensor.device}, but must be on {like.device} like {like_name}.",
            next_step=_LOAD_IT_FIRST if tensor.device.type == "meta" else f"{name} = {name}.to({like_name}.device)",
        )


_LOAD_IT_FIRST = (
    "it is offloaded, and only a hook of the module that holds it would load it, which a call of an operator on "
    "module.weight does not run: have it loaded with the module around (accelerate: preload_module_classes=['MambaMixer'], "
    "the name of the class that calls)"
)


def check_activation(activation: str | None) -> bool:
    """Return whether the activation is SiLU; raise OptionError for one that does not exist."""
    if activation not in (None, "silu", "swish"):
        raise OptionError(f"activation is {activation!r}, but must be None, 'silu' or 'swish'.")
    return activation is not None


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor in this dtype; the tensor itself, without a trip through the dispatcher, if it has it."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
