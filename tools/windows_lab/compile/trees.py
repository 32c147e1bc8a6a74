"""Compilers for Windows: Microsoft's, from a folder that the user has; NVIDIA's, from wheels of the package index.

There is no nvcc.exe before CUDA 13 on the index. For older CUDAs a tree has nvcc 13 with the C++ headers (CUB, Thrust,
libcu++) of the older one, and for 11.8 also its check of the host compiler (`crt/host_config.h`).
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.windows_lab import fetch
from tools.windows_lab.interpreters import Pinned
from tools.windows_lab.wine import windows_path

__all__ = ["CUDA_LABELS", "MicrosoftTree", "TreeError", "cuda_tree", "find_microsoft", "make_stand_ins"]


class TreeError(Exception):
    """A folder that is no compiler tree; the text says what was looked for."""


@dataclass(frozen=True)
class MicrosoftTree:
    """cl.exe with its headers and libraries, and a Windows SDK.

    Attributes
    ----------
    programs : Path
        The folder of cl.exe and link.exe.
    toolset, sdk : str
        "14.44.35207", "10.0.26100.0".
    includes, libraries : tuple of Path
    """

    programs: Path
    toolset: str
    sdk: str
    sdk_programs: Path
    includes: tuple[Path, ...]
    libraries: tuple[Path, ...]

    def environment(self, *, first: tuple[Path, ...] = (), programs: tuple[Path, ...] = ()) -> Mapping[str, str]:
        """Return what vcvarsall would set; `first` go before its headers, `programs` before its programs."""
        return {
            "INCLUDE": ";".join(windows_path(folder) for folder in (*first, *self.includes)),
            "LIB": ";".join(windows_path(folder) for folder in self.libraries),
            "WINEPATH": ";".join(windows_path(folder) for folder in (*programs, self.programs, self.sdk_programs)),
            "DISTUTILS_USE_SDK": "1",
            "VSLANG": "1033",
        }


def find_microsoft(root: Path) -> MicrosoftTree:
    """Find the newest toolset and SDK below a folder, laid out as Visual Studio and the SDK lay theirs out.

    Raises
    ------
    TreeError
    """
    cl = _newest(root, "**/VC/Tools/MSVC/*/bin/Hostx64/x64/cl.exe", "VC/Tools/MSVC/VERSION/bin/Hostx64/x64/cl.exe")
    tools = cl.parents[3]
    ucrt = _newest(root, "**/Include/10.*/ucrt", "Windows Kits/10/Include/VERSION/ucrt").parent
    kit, sdk = ucrt.parents[1], ucrt.name
    found = MicrosoftTree(
        programs=cl.parent,
        toolset=tools.name,
        sdk=sdk,
        sdk_programs=kit / "bin" / sdk / "x64",
        includes=(tools / "include", *(ucrt / part for part in ("ucrt", "shared", "um", "winrt"))),
        libraries=(tools / "lib" / "x64", *(kit / "Lib" / sdk / part / "x64" for part in ("ucrt", "um"))),
    )
    missing = [folder for folder in (*found.includes[:4], *found.libraries) if not folder.is_dir()]
    if missing:
        raise TreeError(f"{root} has no {missing[0].relative_to(root)}")
    return found


def _newest(root: Path, pattern: str, words: str) -> Path:
    candidates = sorted(root.glob(pattern))
    if not candidates:
        raise TreeError(f"{root} has no {words}")
    return candidates[-1]


# --- NVIDIA's

_NVCC = (
    Pinned("nvidia-cuda-nvcc==13.5.37", "2e33114ed3109eabfaa820cf8ddd534d0b98c47065f8390a56e6eaae04dcca31"),
    Pinned("nvidia-nvvm==13.5.37", "9422cd190cedabca85f88de6674e0ee16f508915698517e04bfaf193f1809c21"),
    Pinned("nvidia-cuda-crt==13.5.37", "30cded98a895e80586b4e233afd4e09e511205c767f1921a28710900a2399818"),
    Pinned("nvidia-cuda-runtime==13.5.37", "f225d3fa5ea6bfbb58fc4979ef72375cbe661d9107f0d8a4ff22cc151525e4a9"),
)
# torch's headers include theirs
_MATHS = (
    Pinned("nvidia-cublas==13.10.0.20", "c310b749eea855b88fafb906de08d6819b87216c6711640771764fea5dcd8546"),
    Pinned("nvidia-cusolver==12.4.1.2", "6b7be7d7dd60ba0e91cae19357a1d8c57dae321c0df99d92792ec025d791cc88"),
    Pinned("nvidia-cusparse==12.9.4.2", "2defba1fbe76140c9eedc9fe82d58f11a0e2b7fd2c12dc5fb1267cc076689669"),
)
# the C++ headers: wheel, folder in it, folder in the tree
_CCCL = {
    "13.5": (
        Pinned("nvidia-cuda-cccl==13.3.5.0.6", "6e1f96b71d582171cebd9ae1d7ffbfc726e112a0a41aef77b9ead500aad7e0a2"),
        "nvidia/cu13/",
        "",
    ),
    "12.9": (
        Pinned("nvidia-cuda-cccl-cu12==12.9.27", "72106f95a9bb3be18472806b4f663ebf0f9248a86d14b4ae3305725b855d9d92"),
        "nvidia/cuda_cccl/include/",
        "include/",
    ),
    "11.8": (
        Pinned(
            "nvidia-cuda-cccl-cu11==11.8.89.post1", "d758d188468c4732a8bcd9c3ec76d2b249be20d97afe7a5a59266addbd05cb0a"
        ),
        "nvidia/cuda_cccl/include/",
        "include/",
    ),
}
_OLD_GUARD = Pinned(
    "nvidia-cuda-nvcc-cu11==11.8.89", "bcfb622d2449982812eb0fa43b3de0593e877edd33790f423a228ed1be62378c"
)
CUDA_LABELS = tuple(_CCCL)


def cuda_tree(label: str, root: Path, nvcc: Path | None = None) -> Path:
    """Make a CUDA tree and return it; one that was made before is taken as it is.

    Parameters
    ----------
    label : str
        "13.5": all of nvcc 13.5. "12.9", "11.8": nvcc 13.5 with the C++ headers of that CUDA.
    root : Path
        The folder of trees; wheels are kept in it.
    nvcc : Path, optional
        A toolkit of the user's, instead of NVIDIA's wheels; then only its own label makes sense.
    """
    if nvcc is not None:
        if not (nvcc / "bin" / "nvcc.exe").is_file():
            raise TreeError(f"{nvcc} has no bin/nvcc.exe")
        return nvcc
    tree, done = root / label, root / label / "complete"
    if done.is_file():
        return tree
    shutil.rmtree(tree, ignore_errors=True)
    wheels = root / "wheels"
    for pinned in _NVCC:
        _unpack(fetch.wheel(pinned, wheels), "nvidia/cu13/", tree)
    for pinned in _MATHS:
        _unpack(fetch.wheel(pinned, wheels), "nvidia/cu13/include/", tree / "include")
    pinned, prefix, into = _CCCL[label]
    _unpack(fetch.wheel(pinned, wheels), prefix, tree / into)
    if label == "11.8":
        guard = "nvidia/cuda_nvcc/include/crt/host_config.h"
        _unpack(fetch.wheel(_OLD_GUARD, wheels), guard, tree / "include/crt/host_config.h")
    done.touch()
    return tree


def _unpack(wheel: Path, prefix: str, into: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if entry.filename.startswith(prefix) and not entry.is_dir():
                rest = entry.filename[len(prefix) :]
                target = into / rest if rest else into
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(entry))


def make_stand_ins(folder: Path) -> Path:
    """Write the one header that a CPU build of torch lacks (a CUDA build makes it) and return its folder."""
    header = folder / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    header.parent.mkdir(parents=True, exist_ok=True)
    header.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n", encoding="utf-8")
    return folder
