"""Calls of backends' functions that can be made again: what tuning times.

A call is caught on its way into a backend (`anymamba.backends.watching`), whoever made it: an operator, a block, a model in a
user's script. Kept of it are the metadata of its tensors and their values: all of small ones and of integers (indices and
lengths must stay what they are), a sample of large ones, from which the same distribution is drawn again. So the tensors of a
recorded script are not held, and a step size stays positive and a decay negative.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch

from anymamba import backends
from anymamba.measure.accuracy import GRADIENT_BOUND, OUTPUT_BOUND

__all__ = ["Ready", "Recorded", "catching"]

VERBATIM = 1 << 16
"""Elements up to which a tensor's values are kept as they are."""

SAMPLE = 1 << 12


class _Tensor(NamedTuple):
    """A tensor to be made again."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    past: int  # elements from 16 bytes to its first
    values: torch.Tensor  # of this shape, or a sample
    whole: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tensor:
        tensor = tensor.detach()
        whole = tensor.numel() <= VERBATIM or not tensor.is_floating_point()
        if whole:
            values = tensor.clone()
        else:
            values = tensor[tuple(torch.randint(size, (SAMPLE,), device=tensor.device) for size in tensor.shape)]
        past = tensor.data_ptr() % 16 // tensor.element_size() if tensor.numel() else 0
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, past, values, whole)

    def make(self) -> torch.Tensor:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride)) if all(self.shape) else 0
        count = self.past + extent
        if self.whole:
            made = torch.empty(count, dtype=self.dtype, device=self.device).as_strided(
                self.shape, self.stride, self.past
            )
            # an expanded dimension is one element in memory
            alone = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in self.stride)
            made[alone].copy_(self.values[alone])
            return made
        buffer = self.values[torch.randint(len(self.values), (count,), device=self.device)]
        return buffer.as_strided(self.shape, self.stride, self.past)


class Recorded(NamedTuple):
    """A call that can be made again.

    Parameters
    ----------
    backend : str
    module : module
        The backend's.
    operator, function : str
    arguments : tuple
        Positional ones, then a dict of the others; tensors as `_Tensor`.
    """

    backend: str
    module: ModuleType
    operator: str
    function: str
    arguments: Any

    @property
    def size(self) -> str:
        """Return its first tensor in words: "8x2048x256"."""
        first = next(iter(self._tensors()), None)
        return "" if first is None else "x".join(map(str, first.shape))

    @property
    def dtype(self) -> torch.dtype:
        """Return the narrowest dtype of its tensors: it bounds how alike two results can be."""
        found = [tensor.dtype for tensor in self._tensors() if tensor.dtype in OUTPUT_BOUND]
        return max(found, key=OUTPUT_BOUND.__getitem__, default=torch.float32)

    @property
    def device(self) -> torch.device:
        """Return where its tensors are."""
        return next((tensor.device for tensor in self._tensors()), torch.device("cpu"))

    @property
    def bound(self) -> float:
        """Return by how much two right results may differ."""
        bounds = GRADIENT_BOUND if self.function.endswith("backward") else OUTPUT_BOUND
        return 2 * bounds[self.dtype]

    def ready(self) -> Ready:
        """Return it with tensors."""
        return Ready(self)

    def _tensors(self) -> list[_Tensor]:
        found: list[_Tensor] = []
        _each(self.arguments, _Tensor, found.append)
        return found


class Ready:
    """A recorded call with tensors: call it."""

    def __init__(self, recorded: Recorded) -> None:
        made: list[torch.Tensor] = []

        def make(tensor: _Tensor) -> torch.Tensor:
            made.append(tensor.make())
            return made[-1]

        self._function: Callable[..., Any] = getattr(recorded.module, recorded.function)
        arguments, options = _each(recorded.arguments, _Tensor, make)
        self._arguments, self._options = arguments, options
        before = [tensor.clone() for tensor in made]
        with torch.no_grad():
            self()
        # what it writes in place counts among the results, and is put back before they are compared
        self._changed = [(now, was) for now, was in zip(made, before) if not torch.equal(now, was)]

    def __call__(self) -> Any:
        return self._function(*self._arguments, **self._options)

    def results(self, poison: Callable[[], object] = lambda: None) -> list[torch.Tensor]:
        """Return what a call from the start gives, and leaves in its arguments."""
        for now, was in self._changed:
            now.copy_(was)
        poison()
        outputs: list[torch.Tensor] = []
        _each(self(), torch.Tensor, outputs.append)
        return [*outputs, *(now.clone() for now, _ in self._changed)]


@contextlib.contextmanager
def catching() -> Iterator[list[tuple[Recorded, int]]]:
    """Note every call of a backend's function, each kind once with how often it came; filled in when the context ends."""
    found: list[tuple[Recorded, int]] = []
    kinds: dict[object, list[Any]] = {}

    def note(call: backends.Watched) -> None:
        plain = True

        def key(tensor: torch.Tensor) -> object:
            nonlocal plain
            plain = plain and type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta
            return _metadata(tensor)

        kind = (call.module.__name__, call.function, repr(_each((call.arguments, call.options), torch.Tensor, key)))
        if not plain or not any(kind):
            return
        known = kinds.get(kind)
        if known is None:
            with torch.no_grad():
                kept = _each((call.arguments, call.options), torch.Tensor, _Tensor.of)
            backend = call.module.__name__.split(".")[-2]
            kinds[kind] = known = [Recorded(backend, call.module, call.operator.name, call.function, kept), 0]
        known[1] += 1

    try:
        with backends.watching(note):
            yield found
    finally:
        found += sorted(((call, count) for call, count in kinds.values()), key=lambda one: -one[1])


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    past = tensor.data_ptr() % 16 if tensor.numel() else 0
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, past


def _each(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return the nest of tuples, lists and dicts with `change` made to each `kind` in it."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, dict):
        return {name: _each(value, kind, change) for name, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields") and not isinstance(tree, _Tensor):
        return type(tree)(*(_each(value, kind, change) for value in tree))
    if isinstance(tree, (tuple, list)) and not isinstance(tree, _Tensor):
        return type(tree)(_each(value, kind, change) for value in tree)
    return tree
