"""NVRTC, the run-time compiler that every CUDA build of PyTorch carries, through ctypes (11.2 to 13.x).

Nothing newer than 11.2 is called. A compile releases the GIL. The libraries are found by `libraries.nvrtc_candidates`.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from anymamba.backends.cuda.runtime.libraries import nvrtc_candidates, open_nvrtc
from anymamba.errors import KernelCompileError, MachineError

__all__ = ["Compiled", "Nvrtc", "find_nvrtc"]


class Compiled(NamedTuple):
    """What a compile gave: a cubin (for a real architecture) or PTX text, and the compiler's log."""

    image: bytes
    log: str


class Nvrtc:
    """One loaded NVRTC library.

    Parameters
    ----------
    library : ctypes.CDLL
    path : str
        Where it came from; shown to people, never parsed.
    """

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        self._library = library
        self.path = path
        pointer, string = ctypes.c_void_p, ctypes.c_char_p
        strings = ctypes.POINTER(ctypes.c_char_p)
        out = ctypes.POINTER(ctypes.c_void_p)
        size = ctypes.POINTER(ctypes.c_size_t)
        integer = ctypes.POINTER(ctypes.c_int)
        for name, arguments in {
            "nvrtcVersion": [integer, integer],
            "nvrtcGetNumSupportedArchs": [integer],
            "nvrtcGetSupportedArchs": [integer],
            "nvrtcCreateProgram": [out, string, string, ctypes.c_int, strings, strings],
            "nvrtcDestroyProgram": [out],
            "nvrtcCompileProgram": [pointer, ctypes.c_int, strings],
            "nvrtcGetProgramLogSize": [pointer, size],
            "nvrtcGetProgramLog": [pointer, string],
            "nvrtcGetPTXSize": [pointer, size],
            "nvrtcGetPTX": [pointer, string],
            "nvrtcGetCUBINSize": [pointer, size],
            "nvrtcGetCUBIN": [pointer, string],
        }.items():
            function = getattr(library, name)  # AttributeError: older than 11.2, find_nvrtc says so
            function.argtypes, function.restype = arguments, ctypes.c_int
        library.nvrtcGetErrorString.argtypes = [ctypes.c_int]
        library.nvrtcGetErrorString.restype = string
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check("nvrtcVersion", library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = (major.value, minor.value)
        count = ctypes.c_int()
        self._check("nvrtcGetNumSupportedArchs", library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        numbers = (ctypes.c_int * count.value)()
        self._check("nvrtcGetSupportedArchs", library.nvrtcGetSupportedArchs(numbers))
        self.architectures = tuple(sorted(numbers))

    def compile(self, source: str, name: str, headers: Mapping[str, str], options: Sequence[str]) -> Compiled:
        """Compile one source file.

        Parameters
        ----------
        source, name : str
            The text, and the file name that messages show.
        headers : mapping
            What `#include "name"` finds: nothing is read from disk.
        options : sequence of str
            With ``--gpu-architecture=sm_XX`` the result is a cubin, with ``compute_XX`` it is PTX.

        Raises
        ------
        KernelCompileError
            With the compiler's log, which quotes the source lines.
        """
        library = self._library
        program = ctypes.c_void_p()
        count = len(headers)
        texts = (ctypes.c_char_p * count)(*(text.encode() for text in headers.values()))
        names = (ctypes.c_char_p * count)(*(header.encode() for header in headers))
        self._check(
            "nvrtcCreateProgram",
            library.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), name.encode(), count, texts if count else None,
                names if count else None,
            ),
        )  # fmt: skip
        try:
            arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            code = library.nvrtcCompileProgram(program, len(options), arguments)
            log = self._text(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").decode(errors="replace")
            if code:
                log = _with_source_lines(log, {**headers, name: source})
                raise KernelCompileError(
                    f"NVRTC {self.version[0]}.{self.version[1]} could not compile {name}"
                    f" ({library.nvrtcGetErrorString(code).decode()}).",
                    why=f"{log.strip()}\noptions: {' '.join(options)}",
                    next_step="please report this with the lines above; ANYMAMBA_BACKEND=torch works meanwhile",
                )
            real = any(option.startswith("--gpu-architecture=sm_") for option in options)
            kind = "CUBIN" if real else "PTX"
            return Compiled(self._text(program, f"nvrtcGet{kind}Size", f"nvrtcGet{kind}", strip=not real), log)
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, size_function: str, function: str, *, strip: bool = True) -> bytes:
        size = ctypes.c_size_t()
        self._check(size_function, getattr(self._library, size_function)(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        self._check(function, getattr(self._library, function)(program, buffer))
        data = buffer.raw[: size.value]
        return data.rstrip(b"\0") if strip else data

    def _check(self, function: str, code: int) -> None:
        if code:
            text = self._library.nvrtcGetErrorString(code).decode()
            raise KernelCompileError(f"{function} failed: {text}.", why=f"library: {self.path}")


def _with_source_lines(log: str, texts: Mapping[str, str]) -> str:
    """Return the log with the line that each message is about under it (NVRTC 12 quotes it itself, 11 does not)."""
    lines = log.splitlines()
    result = []
    for message, following in zip(lines, [*lines[1:], ""]):
        result.append(message)
        place = re.match(r"(\S+)\((\d+)\): ", message)
        if place is not None and place[1] in texts:
            source = texts[place[1]].splitlines()
            number = int(place[2]) - 1
            if 0 <= number < len(source) and source[number].strip() not in following:
                result.append(f"    {source[number].strip()}")
    return "\n".join(result)


@functools.cache
def find_nvrtc(driver_major: int | None = None) -> Nvrtc:
    """Return the NVRTC to use: the one of PyTorch's own CUDA version first.

    Parameters
    ----------
    driver_major : int, optional
        Major CUDA version of the driver; a newer NVRTC makes cubins that this driver would refuse, so it is passed over.

    Raises
    ------
    MachineError
        If there is none; says where was looked and what was wrong with each.
    """
    tried: list[str] = []
    for path in nvrtc_candidates():
        try:
            found = _open(str(path))
        except (OSError, AttributeError) as error:
            tried.append(f"{path}: {error}")
            continue
        if driver_major is not None and found.version[0] > driver_major:
            tried.append(
                f"{path}: version {found.version[0]}.{found.version[1]} is newer than the driver's {driver_major}"
            )
            continue
        return found
    raise MachineError(
        "No usable NVRTC library was found.",
        why="; ".join(tried) or "PyTorch carries none, and neither do the nvidia wheels, conda or a CUDA toolkit",
        next_step="pip install nvidia-cuda-nvrtc-cu12 (or the one of your CUDA version), or name a file in ANYMAMBA_NVRTC",
    )


@functools.cache
def _open(path: str) -> Nvrtc:
    return Nvrtc(open_nvrtc(Path(path)), path)
