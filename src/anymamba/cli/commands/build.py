"""`anymamba build`: compile upstream's own CUDA extensions here, into wheels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anymamba.cli.commands._native import native


def command(
    requirements: Annotated[
        list[str] | None,
        typer.Argument(metavar="[REQ]...", help="Such as mamba_ssm==2.2.2 causal_conv1d==1.4.0, which is the default."),
    ] = None,
    wheel_dir: Annotated[
        Path | None, typer.Option(metavar="D", help="Where the wheels go; by default here, or nowhere with --install.")
    ] = None,
    install: Annotated[
        bool, typer.Option("--install", help="Then install them, and prove them in a fresh process.")
    ] = False,
    arch: Annotated[
        str, typer.Option(metavar="A", help="native: this machine's cards; all: what the toolkit knows; or 8.6,8.9.")
    ] = "native",
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Compilers at once; by default what memory and cores allow.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done and what is missing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a build that was cut off.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep sources and objects after success as well.")] = False,
    source: Annotated[
        Path | None, typer.Option("--source", metavar="DIR|ARCHIVE", help="Compile these sources (of one package).")
    ] = None,
    mirror: Annotated[
        str | None, typer.Option(metavar="PREFIX", help="A GitHub mirror; see `anymamba source --help`.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Use what the cache has.")] = False,
    rules: Annotated[
        list[str] | None,
        typer.Option(
            "--rule", metavar="ID", help="Also a rule that must be asked for: kernel-parameters,kNThreads=64."
        ),
    ] = None,
    without: Annotated[list[str] | None, typer.Option(metavar="ID", help="Leave a rule out.")] = None,
    hang_minutes: Annotated[
        float, typer.Option(min=0.1, help="End a compiler that neither said nor computed anything for so long.")
    ] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan, or the result, as JSON.")] = False,
) -> None:
    """Compile upstream's own CUDA extensions for this torch and this card, into wheels.

    Needs what `anymamba install` does not: Visual Studio or gcc, a CUDA toolkit of torch's version, ninja. Whatever is missing
    is named, with its fix, before anything is compiled. The log is always kept; a failure ends with its explanation.

    Example: anymamba build causal_conv1d==1.4.0 mamba_ssm==2.2.2 --arch 8.6 --wheel-dir wheels
    """
    native(
        requirements or [], install=install, dry_run=dry_run, wheel_dir=wheel_dir, arch=arch, jobs=jobs, source=source,
        mirror=mirror, offline=offline, resume=resume, keep=keep, rules=rules or [], without=without or [],
        hang_minutes=hang_minutes, as_json=as_json,
    )  # fmt: skip
