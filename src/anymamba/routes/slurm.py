"""A Slurm batch job: environment checked, kernel cache on the node, one task a GPU."""

from __future__ import annotations

from anymamba.routes.choice import Choice
from anymamba.routes.environment import requirement_files
from anymamba.routes.files import File, template

__all__ = ["files"]


def files(choice: Choice) -> list[File]:
    """Return mamba.sbatch and the requirement files."""
    values = {
        "gpus": "#SBATCH --gpus-per-node=1" if choice.gpu else "",
        "mamba_ssm": choice.mamba_ssm,
        "causal_conv1d": choice.causal_conv1d,
    }
    return [File("mamba.sbatch", template("mamba.sbatch", **values)), *requirement_files(choice)]
