"""Kernels written in Python: compiled by numba once a machine, kept as machine code, called without numba from then on.

`@kernel` marks a function ``(first, after, ...)`` that computes the work items first <= item < after. Its other arguments are
tensors (one-dimensional arrays that start at the tensor's first element; sizes and strides are arguments of their own: any
layout costs no copy, and one compiled variant a dtype serves all of them), whole numbers, truth values and floats.

numba takes 0.3 s to import and as much again to find what it cached, in every process. So a kernel becomes an object file of
our own with two entries that know nothing of Python (`_build`), which any later process links and calls (`_native`).
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from anymamba.backends.cpu import _native
from anymamba.backends.cpu._threads import run_compiled

__all__ = ["CODES", "FLOATS", "Kernel", "exact_kernel", "inline", "kernel"]

# No "nnan"/"ninf": an infinity or NaN in the inputs must come out as one. Reassociation lets LLVM sum lanes in parallel.
_FLAGS = frozenset({"contract", "reassoc", "nsz", "arcp"})

CODES = {
    torch.float32: "s", torch.float64: "d", torch.int32: "w", torch.int64: "l", torch.uint8: "u", torch.bool: "o",
}  # fmt: skip
"""What stands for a tensor of a dtype in a signature; beside them i: a whole number, b: a truth value, f: a float."""


FLOATS = (torch.float32, torch.float64)
"""What kernels compute in."""


class Entry(NamedTuple):
    """A compiled variant of a kernel."""

    code: _native.Code
    layout: struct.Struct  # of the block with the arguments


class Kernel:
    """A function that numba compiles for the dtypes of its arguments when it is first called with them.

    Parameters
    ----------
    function : callable
        ``(first, after, ...)``.
    flags : set of str
        What LLVM may do to floating point arithmetic.
    """

    def __init__(self, function: Callable[..., Any], flags: frozenset[str]) -> None:
        self.function, self.flags = function, flags
        made_for = [repr(cell.cell_contents) for cell in function.__closure__ or ()]
        self.name = f"{function.__module__}.{function.__qualname__}({', '.join(made_for)})"
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Lock()
        self._type: Any = None

    def __call__(self, first: int, after: int, *arguments: Any) -> None:
        """Compute the items first <= item < after on this thread."""
        entry, block = self.bound(arguments)
        _native.check(entry.code.range(first, after, block))

    def over(self, items: int, *arguments: Any, at_least: int = 1, most: int = 0) -> None:
        """Compute the items 0 <= item < items on PyTorch's threads: see `_threads.run`."""
        entry, block = self.bound(arguments)
        run_compiled(entry.code, items, block, at_least=at_least, most=most)

    def bound(self, arguments: Any) -> tuple[Entry, bytes]:
        """Return the variant for these arguments, and them as it takes them."""
        codes, values = [], []
        for argument in arguments:
            kind = type(argument)
            if kind is int:
                codes.append("i")
                values.append(argument)
            elif kind is bool:
                codes.append("b")
                values.append(argument)
            elif kind is float:
                codes.append("f")
                values.append(argument)
            else:
                codes.append(CODES[argument.dtype])
                values.append(argument.data_ptr())
        entry = self.variant("".join(codes))
        return entry, entry.layout.pack(*values)

    def variant(self, signature: str) -> Entry:
        """Return the variant for arguments of these kinds (`CODES`): compiled before, kept on disk, or compiled now."""
        entry = self._entries.get(signature)
        if entry is None:
            with self._lock:
                entry = self._entries.get(signature)
                if entry is None:
                    layout = struct.Struct(
                        f"={_native.HEADER_BYTES}x" + "".join("d" if code == "f" else "q" for code in signature)
                    )
                    entry = self._entries[signature] = Entry(_native.code(self, signature), layout)
        return entry

    @property
    def _numba_type_(self) -> Any:
        """What numba takes this object for where another kernel calls it."""
        from anymamba.backends.cpu import _build

        if self._type is None:
            self._type = _build.callable_type(self)
        return self._type


def kernel(function: Callable[..., Any]) -> Kernel:
    """Compile for the dtypes of its arguments on first call; keep the machine code in anymamba's cache folder."""
    return Kernel(function, _FLAGS)


def exact_kernel(function: Callable[..., Any]) -> Kernel:
    """Compile as `kernel` does, but sum in the order that is written: for sums that carry their own rounding error along."""
    return Kernel(function, frozenset({"contract"}))


def inline(function: Callable[..., Any]) -> Kernel:
    """Mark a function that kernels call: any arguments, any result; not to be called from Python."""
    return Kernel(function, _FLAGS)
