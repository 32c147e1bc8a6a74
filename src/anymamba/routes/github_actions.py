"""A workflow: the port proved on three systems, and upstream's native wheels built for Linux."""

from __future__ import annotations

from anymamba.routes.choice import Choice
from anymamba.routes.files import File, template

__all__ = ["files"]


def files(choice: Choice) -> list[File]:
    """Return .github/workflows/mamba.yml."""
    cuda, system, python = choice.image
    values = {
        "cuda": cuda,
        "system": system,
        "image_python": python,
        "torch": " ".join(f'"{one}"' for one in choice.torch_requirements()) if choice.gpu else '"torch"',
        "index": choice.index or "",
        "anymamba": choice.anymamba,
        "mamba_ssm": choice.mamba_ssm,
        "causal_conv1d": choice.causal_conv1d,
    }
    text = template("workflow.yml", **values)
    if choice.gpu and choice.tag != "cu130":
        text += template("workflow-native.yml", **values)
    return [File(".github/workflows/mamba.yml", text)]
