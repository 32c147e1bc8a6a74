"""The environment itself: conda, pip, and a script for each shell that makes it and proves it."""

from __future__ import annotations

from anymamba.routes.choice import Choice
from anymamba.routes.files import File, template

__all__ = ["files", "requirement_files"]


def files(choice: Choice) -> list[File]:
    """Return environment.yml, the two requirement files and the two scripts."""
    return [
        File("environment.yml", conda_file(choice)),
        *requirement_files(choice),
        File("setup-environment.ps1", template("setup-environment.ps1", **_values(choice))),
        File("setup-environment.sh", template("setup-environment.sh", **_values(choice)), executable=True),
    ]


def requirement_files(choice: Choice) -> list[File]:
    """Return requirements-torch.txt and requirements.txt.

    Two files because torch must come from PyTorch's index alone: with two indexes at once pip takes the highest version of
    either, which on Windows may be the CPU build.
    """
    index = f"--index-url {choice.index}\n" if choice.index else ""
    head = "# Made by `anymamba export`. Install this file first: pip install -r requirements-torch.txt\n"
    return [
        File("requirements-torch.txt", head + index + _lines(choice.torch_requirements())),
        File("requirements.txt", "# Made by `anymamba export`. Install after torch.\n" + _lines(choice.requirements())),
    ]


def conda_file(choice: Choice) -> str:
    """Return environment.yml: Python, for a native build the CUDA compiler, and for pinned versions all the rest."""
    label = f"nvidia/label/cuda-{choice.image[0]}"
    lines = [
        "# Made by `anymamba export`. Use: conda env create -f environment.yml",
        "name: anymamba",
        "channels:",
        *([f"  - {label}"] if choice.native else []),
        "  - conda-forge",
        "dependencies:",
        f"  - python={choice.python}",
        "  - pip",
    ]
    if choice.native:
        packages = ("cuda-nvcc", "cuda-cudart-dev", "libcublas-dev", "libcusparse-dev", "libcusolver-dev")
        lines += [f"  - {label}::{package}" for package in packages]
    if choice.torch is not None:
        lines.append("  - pip:")
        if choice.index:
            lines.append(f"      - --extra-index-url {choice.index}")
        lines += [f'      - "{one}"' for one in (*choice.torch_requirements(), *choice.requirements())]
    else:
        lines.append("# torch is not pinned, and conda cannot give pip one index for torch and another for the rest:")
        lines.append("# after creating it, pip install -r requirements-torch.txt, then -r requirements.txt")
    return "\n".join(lines) + "\n"


def _values(choice: Choice) -> dict[str, str]:
    return {
        "python": choice.python,
        "mamba_ssm": choice.mamba_ssm,
        "causal_conv1d": choice.causal_conv1d,
    }


def _lines(requirements: list[str]) -> str:
    return "".join(f"{one}\n" for one in requirements)
