"""`anymamba bundle DIR`: a folder that installs on a machine with no network."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from anymamba.cli.progress import shown_progress
from anymamba.cli.terminal import terminal


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make; an earlier bundle is replaced.")],
    requirements: Annotated[
        list[str] | None, typer.Argument(metavar="[REQ]...", help="As for install; the guide's pair by default.")
    ] = None,
    platform: Annotated[
        str | None,
        typer.Option(
            help="The other machine: windows, linux, linux-arm or macos. Default: as this one.", metavar="NAME"
        ),
    ] = None,
    python_version: Annotated[
        str | None,
        typer.Option("--python-version", metavar="3.N", help="The other machine's Python. Default: this one's."),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="With numba, for the CPU kernels.")] = False,
    ports_only: Annotated[
        bool, typer.Option("--ports-only", help="Without anymamba and what it needs: it is installed there.")
    ] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Take sources from the cache; ask no index for them.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what is in the folder as JSON.")] = False,
) -> None:
    """Make a folder that installs on a machine with no network.

    It holds mamba_ssm and causal_conv1d as wheels with their provenance, anymamba, and what it needs (not torch), each with
    its sha256. There: python -m pip install --no-index --find-links DIR anymamba; anymamba install --from DIR

    Example: anymamba bundle usb-stick --platform windows --python-version 3.11
    """
    from anymamba.upstream.bundle import make_bundle
    from anymamba.upstream.plan import make_plan
    from anymamba.upstream.target import Target

    target = Target(platform, python_version)
    with shown_progress() as progress:
        progress.step("Planning")
        plan = make_plan(requirements or [], Path(sys.executable), offline=offline)
        extras = ("cpu",) if cpu else ()
        bundle = make_bundle(plan, folder, target, extras, companions=not ports_only, progress=progress)
    screen = terminal()
    if as_json:
        screen.json({"folder": str(bundle.folder), "packages": bundle.packages, "others": bundle.others})
        return
    for name, version in bundle.packages.items():
        screen.say(f"{name} {version}")
    for file in bundle.others:
        screen.say(escape(file))
    screen.say(f"In {escape(str(bundle.folder))}. There: HOW-TO-INSTALL.txt")
