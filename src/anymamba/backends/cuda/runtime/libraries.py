"""Where the shared libraries are: NVRTC as PyTorch ships it, and the driver's own library.

Linux: `libnvrtc.so.*` in torch/lib (hash in the name, CUDA 11 wheels), in the nvidia wheels (`nvidia/cuda_nvrtc/lib` for
CUDA 11 and 12, `nvidia/cu13/lib`), in a conda prefix, or in a toolkit. Windows: `nvrtc64_112_0.dll` (CUDA 11),
`nvrtc64_120_0.dll`, `nvrtc64_130_0.dll` in torch/lib, or `bin` of the same wheels. NVRTC opens its builtins library by bare
name: on Windows that fails ("failed to open nvrtc-builtins64_118.dll") unless it is loaded already, so it always is here.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["nvrtc_candidates", "nvrtc_major", "open_driver", "open_nvrtc"]

WINDOWS = sys.platform == "win32"
ENVIRONMENT_VARIABLE = "ANYMAMBA_NVRTC"
_NAME = re.compile(r"^(?:libnvrtc(?:-[0-9a-f]+)?\.so\.(?P<so>\d+)(?:\.\d+)*|nvrtc64_(?P<dll>\d+)_\d+\.dll)$")


def nvrtc_major(file_name: str) -> int | None:
    """Return the CUDA major version in the name of an NVRTC library, None if it is not one (builtins, .alt, static)."""
    match = _NAME.match(file_name)
    if match is None:
        return None
    return int(match["so"]) if match["so"] else int(match["dll"]) // 10


def nvrtc_candidates() -> list[Path]:
    """Return every NVRTC library found, those of PyTorch's CUDA version first, in the order of `_folders`."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        return [Path(named)]
    found: list[Path] = []
    for folder in _folders():
        try:
            names = sorted(entry.name for entry in folder.iterdir() if nvrtc_major(entry.name) is not None)
        except OSError:
            continue
        # "libnvrtc.so.12" and "libnvrtc.so.12.9.86" are one file: the shorter name is the one torch loads.
        found += [folder / name for name in sorted(names, key=len)]
    wanted = int((torch.version.cuda or "0").partition(".")[0])
    return sorted(dict.fromkeys(found), key=lambda path: nvrtc_major(path.name) != wanted)


def _folders() -> Iterator[Path]:
    yield from _loaded_folders()
    torch_lib = Path(torch.__file__).parent / "lib"
    yield torch_lib
    sites = [Path(entry) for entry in sys.path if entry]
    for site in dict.fromkeys([torch_lib.parent.parent, *sites]):
        nvidia = site / "nvidia"
        if nvidia.is_dir():
            for package in ("cuda_nvrtc", "cu13", "cu14"):
                for folder in ("lib", "bin", "bin/x86_64"):
                    yield nvidia / package / folder
    prefix = Path(sys.prefix)
    yield from (prefix / "Library" / "bin", prefix / "bin") if WINDOWS else (prefix / "lib",)
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(variable):
            toolkit = Path(os.environ[variable])
            yield from (toolkit / "bin", toolkit / "bin" / "x64") if WINDOWS else (toolkit / "lib64", toolkit / "lib")
    if not WINDOWS:
        yield from (Path("/usr/local/cuda/lib64"), Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"))


def _loaded_folders() -> Iterator[Path]:
    """Yield folders of NVRTC libraries that this process has mapped already (Linux), wherever they came from."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in maps.splitlines():
        path = line.partition("/")[2]
        if "nvrtc" in path and nvrtc_major(path.rpartition("/")[2]) is not None:
            yield Path("/" + path).parent


def open_nvrtc(path: Path) -> ctypes.CDLL:
    """Load NVRTC, after the builtins library beside it."""
    # WinDLL and CDLL differ only in 32-bit processes; a full path makes Windows search the DLL's own folder.
    loader = getattr(ctypes, "WinDLL", ctypes.CDLL)
    pattern = "nvrtc-builtins64_*.dll" if WINDOWS else "libnvrtc-builtins*.so*"
    for builtins in sorted(path.parent.glob(pattern)):
        if ".alt." not in builtins.name:
            try:
                loader(str(builtins))
            except OSError:  # another version's, say; the right one missing shows in the compile log
                continue
    library: ctypes.CDLL = loader(str(path))
    return library


def open_driver() -> ctypes.CDLL:
    """Load the driver's library; OSError if there is no driver."""
    if WINDOWS:
        windows: ctypes.CDLL = getattr(ctypes, "WinDLL")("nvcuda.dll")  # noqa: B009 - absent from other systems' stubs
        return windows
    return ctypes.CDLL("libcuda.so.1")
