"""The command line: `anymamba COMMAND`.

Thin on purpose. Each module in `commands/` is one command: a typer function named `command` (its name is the module's,
underscores as dashes) that calls a library function and shows the result through `terminal`. A new command is a new file.
One with commands of its own (`tune show`) lists them by name in SUBCOMMANDS; without one of them `command` runs.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Annotated, Any

import typer

from anymamba import __version__
from anymamba.cli import commands
from anymamba.cli.exits import exit_with_errors_explained, interruptible

__all__ = ["app", "main"]

app = typer.Typer(
    name="anymamba",
    help="mamba_ssm and causal_conv1d on any machine, no compiler needed.\n\nStart with: anymamba install",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"anymamba {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _add(name: str, module: Any) -> None:
    subcommands = getattr(module, "SUBCOMMANDS", {})
    if not subcommands:
        app.command(name=name)(interruptible(module.command))
        return
    group = typer.Typer(invoke_without_command=True)
    group.callback()(interruptible(module.command))
    for subname, subcommand in subcommands.items():
        group.command(name=subname)(interruptible(subcommand))
    app.add_typer(group, name=name)


for _module in sorted(pkgutil.iter_modules(commands.__path__), key=lambda module: module.name):
    if not _module.name.startswith("_"):
        _add(_module.name.replace("_", "-"), importlib.import_module(f"{commands.__name__}.{_module.name}"))


def main() -> None:
    """Run the command line; every deliberate error ends in a message and its documented exit code."""
    with exit_with_errors_explained():
        app()
