"""The kernels' sources: `.cu` files and the `.cuh` files they include, and the parameter structs written in them.

A kernel takes one by-value struct. Its layout is read from the source, so that Python packs exactly what the compiler reads:

    struct ScaleParameters {
        const void* x;  // pointers, any type
        float* out;
        long long x_stride[3];  // arrays take that many values
        int batch, dim;
        float by;
    };
    extern "C" __global__ void scale(const ScaleParameters p) { ... }

Allowed are pointers, `long long` (`i64`), `int`, `unsigned` and `float`: types of the same size on every system.
"""

from __future__ import annotations

import functools
import re
import struct
from pathlib import Path
from typing import NamedTuple

__all__ = ["Layout", "Source", "layout", "read"]

FOLDER = Path(__file__).resolve().parent.parent / "kernels"
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_FORMATS = {"long long": "q", "i64": "q", "int": "i", "unsigned": "I", "unsigned int": "I", "float": "f"}


class Source(NamedTuple):
    """A source file and what it includes, by the names used in `#include`."""

    text: str
    headers: dict[str, str]


class Layout(NamedTuple):
    """A kernel's parameter struct: the fields in order (an array counts as one) and the format for `struct.pack`."""

    fields: tuple[str, ...]
    format: str

    @property
    def size(self) -> int:
        """Return the size in bytes, trailing padding included."""
        return struct.calcsize(self.format)

    @property
    def pointers(self) -> int:
        """Return how many pointers the struct begins with."""
        return len(self.format) - 1 - len(self.format[1:].lstrip("P"))


@functools.cache
def read(file: str) -> Source:
    """Return the source `file` of the kernels' folder and all that it includes."""
    headers: dict[str, str] = {}

    def text_of(name: str) -> str:
        text = (FOLDER / name).read_text(encoding="utf-8")
        for include in _INCLUDE.findall(text):
            if include not in headers:
                headers[include] = ""  # seen; keeps a circle from turning for ever
                headers[include] = text_of(include)
        return text

    return Source(text_of(file), headers)


@functools.cache
def layout(file: str, kernel: str) -> Layout:
    """Return the layout of the struct that `kernel` in `file` takes.

    Raises
    ------
    ValueError
        If the kernel or its struct is not there, or a field has a type that is not allowed: a mistake in our source.
    """
    source = read(file)
    text = _COMMENT.sub("", "\n".join([*source.headers.values(), source.text]))
    signature = rf"\b{re.escape(kernel)}\s*\(\s*(?:const\s+|__grid_constant__\s+)*(\w+)\s+\w+\s*\)"
    match = re.search(signature, text)
    if match is None:
        raise ValueError(f"{file} has no kernel {kernel}(const SomeParameters p)")
    body = re.search(rf"\bstruct\s+{match[1]}\s*\{{(.*?)\}}\s*;", text, re.DOTALL)
    if body is None:
        raise ValueError(f"{file} has no struct {match[1]}")
    fields: list[str] = []
    formats: list[str] = []
    for statement in body[1].split(";"):
        if statement.strip():
            for name, code in _declared(statement, file):
                fields.append(name)
                formats.append(code)
    packed = "".join(formats)
    # "0P" pads the end to the alignment of the widest member, as C does.
    return Layout(tuple(fields), "@" + packed + ("0P" if set("Pq") & set(packed) else ""))


def _declared(statement: str, file: str) -> list[tuple[str, str]]:
    declaration = " ".join(statement.split())
    pointer = re.fullmatch(r"(?:const )?\w+(?: \w+)? ?\*(?: ?(?:const|__restrict__))* ?(\w+)", declaration)
    if pointer is not None:
        return [(pointer[1], "P")]
    plain = re.fullmatch(r"(long long|i64|unsigned int|unsigned|int|float) (.+)", declaration)
    if plain is None:
        raise ValueError(f"{file}: cannot read the parameter {declaration!r}")
    result = []
    for declarator in plain[2].split(","):
        name = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", declarator.strip())
        if name is None:
            raise ValueError(f"{file}: cannot read the parameter {declaration!r}")
        result.append((name[1], (name[2] or "") + _FORMATS[plain[1]]))
    return result
