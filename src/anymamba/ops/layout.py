"""Which path a call took, and why: strides, alignment, the copies that were made, what to change for the fast one.

The operators take any layout. Where the same numbers in another layout would be read faster, or a copy had to be made first,
this says so: `explain_layout(function, ...)` for one call, `ANYMAMBA_EXPLAIN_LAYOUT=1` for every first call of its kind in a
program (on stderr). A backend's `_layout` module holds what its kernels want, by operator.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from anymamba import backends
from anymamba.ops._library import _is_compiling

__all__ = ["Copy", "Layout", "Path", "TensorLayout", "announce", "asked_for", "explain_layout"]

VARIABLE = "ANYMAMBA_EXPLAIN_LAYOUT"
_VECTOR = 16  # bytes that one access of a kernel moves at best


@dataclass(frozen=True)
class TensorLayout:
    """One tensor argument as it lies in memory.

    `dense` is the dimension whose neighbours are neighbours in memory (None: no such). `past` is the address modulo 16.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    dense: int | None
    past: int

    def __str__(self) -> str:
        """Say it in a line."""
        lies = "one value for all" if not any(self.strides) else f"dense along dimension {self.dense}"
        if self.dense is None and any(self.strides):
            lies = "dense along no dimension"
        aligned = "aligned to 16 bytes" if self.past == 0 else f"{self.past} bytes past a multiple of 16"
        return f"{self.name} {self.dtype} {self.shape}, strides {self.strides}: {lies}, {aligned}"


@dataclass(frozen=True)
class Path:
    """What a backend did with a call of one operator. `advice`: what to change for a faster path; empty where it is fast."""

    operator: str
    backend: str
    path: str
    advice: tuple[str, ...] = ()


@dataclass(frozen=True)
class Copy:
    """A copy that was made while the call ran: which operation of PyTorch's, of what shape, how many bytes were written."""

    operation: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Layout:
    """The answer of `explain_layout`; `str()` of it is for people."""

    function: str
    tensors: tuple[TensorLayout, ...]
    paths: tuple[Path, ...]
    copies: tuple[Copy, ...] = ()

    @property
    def advice(self) -> tuple[str, ...]:
        """What to change, of all paths; () where nothing would help."""
        return tuple(dict.fromkeys(line for path in self.paths for line in path.advice))

    def __str__(self) -> str:
        """Return several lines: what came, what was done, what was copied, what to change."""
        lines = [self.function, *(f"  {tensor}" for tensor in self.tensors)]
        lines += [f"  {path.operator} on backend {path.backend}: {path.path}" for path in self.paths]
        total = sum(copy.bytes for copy in self.copies)
        lines += [f"  copies: {len(self.copies)}, {total:,} bytes" if self.copies else "  copies: none"]
        lines += [f"    {copy.operation} {copy.shape}, {copy.bytes:,} bytes" for copy in self.copies]
        lines += [f"  to change: {line}" for line in self.advice] or ["  nothing to change"]
        return "\n".join(lines)


def explain_layout(function: Callable[..., Any], *arguments: Any, **options: Any) -> Layout:
    """Run a call once and tell which path it took and why.

    Parameters
    ----------
    function : callable
        An operator of `anymamba.ops`, or anything that calls them (a module's forward). It is called twice: once to load and
        compile, once watched; of states that it writes, give it copies.
    arguments : tuple
        Its positional arguments, with whatever shapes and strides they have in the program.
    options : dict
        Its keyword arguments.

    Returns
    -------
    Layout
        Strides and alignment of every tensor argument, the backend and path of every operator that was called, the copies
        that were made meanwhile, and what to change for a faster path. `print` it.

    Examples
    --------
    >>> import torch
    >>> from anymamba.ops import causal_conv1d_fn, explain_layout
    >>> x = torch.randn(2, 64, 8).transpose(1, 2)  # (batch, dim, seqlen), channels side by side
    >>> explain_layout(causal_conv1d_fn, x, torch.randn(8, 4)).tensors[0].dense
    1
    """
    tensors = _tensors(function, arguments, options)
    function(*arguments, **options)
    # The choices are forgotten for this call, so each is made, and seen, again.
    with backends.recording() as calls, _copies() as copies:
        function(*arguments, **options)
    name = getattr(function, "__name__", type(function).__name__)
    return Layout(name, tuple(tensors.values()), _paths(calls, tensors), tuple(copies))


def asked_for() -> bool:
    """Whether ANYMAMBA_EXPLAIN_LAYOUT=1 was set when the program started to use the operators."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def announce(module: Any) -> None:
    """Have every operator in `module` explain the first call of each kind on stderr (once a kind: dtypes, shapes, strides)."""
    for name in module.__all__:
        function = getattr(module, name)
        if inspect.isfunction(function) and name != "explain_layout" and not name.endswith("_ref"):
            explained = _announcing(function)
            setattr(module, name, explained)
            family = sys.modules.get(function.__module__)
            if family is not None and getattr(family, name, None) is function:
                setattr(family, name, explained)


_inside = False
_told: set[Any] = set()


def _announcing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        global _inside  # noqa: PLW0603
        if _inside or _is_compiling():
            return function(*arguments, **options)
        tensors = _tensors(function, arguments, options)
        kind = (function.__name__, tuple((one.shape, one.strides, one.dtype, one.past) for one in tensors.values()))
        if kind in _told:
            return function(*arguments, **options)
        _told.add(kind)
        _inside = True
        try:
            # one call, not two: this one may write its arguments (decoding steps)
            with backends.recording() as calls, _copies() as copies:
                result = function(*arguments, **options)
        finally:
            _inside = False
        layout = Layout(function.__name__, tuple(tensors.values()), _paths(calls, tensors), tuple(copies))
        sys.stderr.write(f"anymamba: {layout}\n")
        return result

    return call


def _tensors(
    function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, TensorLayout]:
    try:
        named: Mapping[str, Any] = inspect.signature(function).bind(*arguments, **options).arguments
    except (TypeError, ValueError):  # the call itself will say what is wrong; a builtin has no signature
        named = {**{f"argument {number}": value for number, value in enumerate(arguments)}, **options}
    found = {}
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            found[name] = TensorLayout(
                name, tuple(value.shape), tuple(value.stride()), str(value.dtype)[6:], _dense(value), _past(value)
            )
    return found


def _dense(tensor: torch.Tensor) -> int | None:
    along = [dim for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())) if stride == 1 and size > 1]
    if along:
        return along[-1]
    return tensor.dim() - 1 if tensor.dim() and tensor.stride(-1) == 1 else None


def _past(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr() % _VECTOR
    except RuntimeError:  # a fake tensor has no address
        return 0


def _paths(calls: list[Any], tensors: Mapping[str, TensorLayout]) -> tuple[Path, ...]:
    found = []
    for operator, call in dict.fromkeys(calls):
        backend = backends.requested() or next(
            (choice.backend for choice in backends.choices(operator, call) if choice.refusal is None), ""
        )
        found.append(_path(backend, operator.name, tensors))
    return tuple(found)


def _path(backend: str, operator: str, tensors: Mapping[str, TensorLayout]) -> Path:
    try:
        module = importlib.import_module(f"anymamba.backends.{backend}._layout")
    except ModuleNotFoundError:
        return Path(operator, backend, "operations of PyTorch, which take any strides")
    words, advice = module.path(operator, tensors)
    return Path(operator, backend, words, tuple(advice))


_COPYING = ("aten::copy_", "aten::clone")


@contextlib.contextmanager
def _copies() -> Iterator[list[Copy]]:
    """Collect the copies that PyTorch makes in this context, also within operators; by its profiler, which sees both."""
    found: list[Copy] = []
    try:
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)
        profiler.__enter__()
    except RuntimeError:  # the program is being profiled already
        yield found
        return
    try:
        yield found
    finally:
        profiler.__exit__(None, None, None)
    for event in profiler.events():
        # clone and contiguous end in copy_ themselves
        if event.name == "aten::copy_" and event.input_shapes and event.input_shapes[0]:
            shape = tuple(event.input_shapes[0])
            size = _itemsize(event)
            bytes_ = size
            for extent in shape:
                bytes_ *= extent
            if bytes_ >= 1024:  # a scalar or a row of biases is no copy anybody feels
                found.append(Copy(_why(event), shape, bytes_))


def _itemsize(event: Any) -> int:
    kinds = getattr(event, "input_dtypes", None) or getattr(event, "concrete_inputs", None) or ()
    sizes = {"double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "int": 4}
    return sizes.get(str(kinds[0]), 4) if kinds else 4


def _why(event: Any) -> str:
    """Return the outermost of PyTorch's operations that the copy belongs to: contiguous, to, clone, or copy_ itself."""
    name, parent = event.name, event.cpu_parent
    while parent is not None and parent.name in ("aten::clone", "aten::contiguous", "aten::_to_copy", "aten::to"):
        name, parent = parent.name, parent.cpu_parent
    return str(name).removeprefix("aten::")
