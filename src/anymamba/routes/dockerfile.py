"""A Dockerfile with two ends: `runtime` has the port and no compiler; `native` has upstream's extensions compiled."""

from __future__ import annotations

from anymamba.routes.choice import Choice
from anymamba.routes.environment import requirement_files
from anymamba.routes.files import File, template

__all__ = ["files"]

_IGNORED = ".git\n.venv*\n__pycache__\n*.pt\n*.safetensors\n"


def files(choice: Choice) -> list[File]:
    """Return Dockerfile, .dockerignore and the requirement files that it copies."""
    if not choice.gpu:
        text = template("Dockerfile.cpu", **_values(choice))
    else:
        text = template("Dockerfile", **_values(choice))
        if choice.tag != "cu130":  # upstream's sources of these versions do not compile there without patches
            text += template("Dockerfile.native", **_values(choice))
    return [File("Dockerfile", text), File(".dockerignore", _IGNORED), *requirement_files(choice)]


def _values(choice: Choice) -> dict[str, str]:
    cuda, system, _ = choice.image
    return {
        "cuda": cuda,
        "system": system,
        "python": choice.python,
        "mamba_ssm": choice.mamba_ssm,
        "causal_conv1d": choice.causal_conv1d,
    }
