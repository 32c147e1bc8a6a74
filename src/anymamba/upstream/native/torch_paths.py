"""Where torch's headers and libraries are and how it was compiled, told by torch in a process of its own."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from anymamba.errors import MachineError
from anymamba.upstream.environment import run_in

__all__ = ["TorchPaths", "read_torch_paths"]


@dataclass(frozen=True)
class TorchPaths:
    """What compiling against a torch takes.

    Attributes
    ----------
    folder : str
        The package's folder.
    version, cuda : str
        "2.11.0+cu130", "13.0"; cuda is empty for a CPU build.
    new_abi : bool
        _GLIBCXX_USE_CXX11_ABI.
    standard : str
        The C++ that its headers want: "c++17", "c++20".
    defines : tuple of str
        pybind11's marks, which make extensions share types.
    python_include, python_library : str
    extension_suffix, tag : str
        ".cpython-311-x86_64-linux-gnu.so", "cp311-cp311-linux_x86_64".
    nvidia : tuple of str
        Include folders of NVIDIA's packages in the environment, for what a bare compiler lacks (cublas, cusparse, cusolver).
    """

    folder: str
    version: str
    cuda: str
    new_abi: bool
    standard: str
    defines: tuple[str, ...]
    python_include: str
    python_library: str
    extension_suffix: str
    tag: str
    nvidia: tuple[str, ...] = ()

    @property
    def includes(self) -> tuple[str, ...]:
        """Torch's include folders."""
        root = Path(self.folder, "include")
        return (str(root), str(root / "torch" / "csrc" / "api" / "include"))


_PROBE = r"""
import glob, json, os, re, sys, sysconfig
import torch
from packaging.tags import sys_tags
root = os.path.dirname(torch.__file__)
with open(os.path.join(root, "utils", "cpp_extension.py"), encoding="utf-8") as file:
    standards = re.findall(r"-?std[=:](c\+\+\d\d)", file.read())
defines = []
for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):
    value = getattr(torch._C, "_PYBIND11_" + name, None)
    if value is not None and os.name != "nt":
        defines.append('-DPYBIND11_%s="%s"' % (name, value))
tag = next(tag for tag in sys_tags() if "manylinux" not in tag.platform and "musllinux" not in tag.platform)
nvidia = [path for place in sys.path if place for path in sorted(glob.glob(os.path.join(place, "nvidia", "*", "include")))]
print("anymamba-torch:" + json.dumps({
    "folder": root, "version": torch.__version__, "cuda": torch.version.cuda or "",
    "new_abi": bool(torch._C._GLIBCXX_USE_CXX11_ABI), "standard": max(standards, key=standards.count) if standards else "c++17",
    "defines": defines, "python_include": sysconfig.get_path("include"),
    "python_library": os.path.join(sys.base_exec_prefix, "libs"),
    "extension_suffix": sysconfig.get_config_var("EXT_SUFFIX"), "tag": str(tag), "nvidia": nvidia,
}))
"""


def read_torch_paths(python: Path = Path(sys.executable)) -> TorchPaths:
    """Ask an interpreter's torch.

    Raises
    ------
    MachineError
        It has none, or one that does not import.
    """
    result = run_in(str(python), ["-c", _PROBE])
    answer = next((line for line in result.stdout.splitlines() if line.startswith("anymamba-torch:")), None)
    if result.returncode != 0 or answer is None:
        raise MachineError(
            f"torch of {python} cannot be imported.",
            why=(result.stderr.strip().splitlines() or ["it said nothing"])[-1],
            next_step="anymamba doctor",
        )
    facts = json.loads(answer.partition(":")[2])
    return TorchPaths(**{**facts, "defines": tuple(facts["defines"]), "nvidia": tuple(facts["nvidia"])})
