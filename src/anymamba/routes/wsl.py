"""WSL2: a script for Windows that sets it up and checks it, and the one that runs inside."""

from __future__ import annotations

from anymamba.routes.choice import Choice
from anymamba.routes.environment import requirement_files
from anymamba.routes.files import File, template

__all__ = ["files"]


def files(choice: Choice) -> list[File]:
    """Return setup-wsl.ps1, setup-wsl.sh and the requirement files."""
    distribution = "Ubuntu-22.04" if choice.python == "3.10" else "Ubuntu-24.04"
    values = {
        "distribution": distribution,
        "mamba_ssm": choice.mamba_ssm,
        "causal_conv1d": choice.causal_conv1d,
        "gpu": "yes" if choice.gpu else "no",
    }
    return [
        File("setup-wsl.ps1", template("setup-wsl.ps1", **values)),
        File("setup-wsl.sh", template("setup-wsl.sh", **values), executable=True),
        *requirement_files(choice),
    ]
