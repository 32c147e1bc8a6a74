"""For a machine without network: what to fetch on one that has it, and how to install it there."""

from __future__ import annotations

from anymamba.routes.choice import Choice
from anymamba.routes.environment import requirement_files
from anymamba.routes.files import File, template

__all__ = ["files"]


def files(choice: Choice) -> list[File]:
    """Return the requirement files and a pair of scripts for each shell: fetch (online) and install (offline)."""
    values = {
        "python": choice.python,
        "mamba_ssm": choice.mamba_ssm,
        "causal_conv1d": choice.causal_conv1d,
    }
    # By name alone: wherever this product came from, its wheel is in the folder.
    rest = ["anymamba" if one == choice.anymamba else one for one in choice.requirements()]
    everything = "".join(f"{one}\n" for one in (*choice.torch_requirements(), *rest))
    return [
        *requirement_files(choice),
        # Without index lines: pip would go there in spite of --no-index.
        File("requirements-offline.txt", "# Made by `anymamba export`, for pip's --no-index.\n" + everything),
        File("fetch.sh", template("fetch.sh", **values), executable=True),
        File("fetch.ps1", template("fetch.ps1", **values)),
        File("install-offline.sh", template("install-offline.sh", **values), executable=True),
        File("install-offline.ps1", template("install-offline.ps1", **values)),
    ]
