"""Other ways to a working environment, written out as files: conda, Docker, WSL2, a workflow, a batch job, no network.

`make_route(name, choice)` returns the files as plain values (nothing is written); `write_files` writes them and never
overwrites unasked. What goes into them comes from the doctor's data: `choose_versions` takes the guide's reference
environment, what is installed here, or the newest that this machine's driver and card can run.

A route is a module here with `files(choice)`; its texts are in `templates/`, with %%name%% where a value goes.
"""

from __future__ import annotations

import importlib

from anymamba.errors import OptionError
from anymamba.routes.choice import SETS, Choice, choose_versions
from anymamba.routes.files import File, write_files

__all__ = ["ROUTES", "SETS", "Choice", "File", "choose_versions", "make_route", "write_files"]

ROUTES = {
    "environment": "conda environment, pip requirements, set-up scripts for PowerShell and sh",
    "dockerfile": "a Dockerfile: a slim image with the port, and one with upstream compiled",
    "compose": "the Dockerfile and a compose file that gives it the GPU",
    "wsl": "scripts that set up WSL2 on Windows and the environment inside it",
    "github-actions": "a workflow that tests the port on three systems and builds native wheels",
    "slurm": "a batch job",
    "requirements-offline": "requirements and scripts for a machine without network",
}


def make_route(name: str, choice: Choice) -> list[File]:
    """Return the files of a route.

    Raises
    ------
    OptionError
        If there is no route of that name.
    """
    if name not in ROUTES:
        raise OptionError(
            f"There is no route named {name!r}.",
            why=f"the routes are: {', '.join(ROUTES)}",
            next_step="anymamba export --help",
        )
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    files: list[File] = module.files(choice)
    return files
