"""`anymamba source REQ`: upstream's C++ and CUDA sources of a release, checked, in a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from anymamba.cli.progress import shown_progress
from anymamba.cli.terminal import terminal


def command(
    requirement: Annotated[str, typer.Argument(metavar="NAME==VERSION", help="Such as causal_conv1d==1.4.0.")],
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="D", help="The new folder; by default NAME-VERSION here.")
    ] = None,
    mirror: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX",
            help="A GitHub mirror: put before the address, or an address with {path} for owner/name. Default: "
            "ANYMAMBA_GITHUB_MIRROR.",
        ),
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--source", metavar="DIR|ARCHIVE", help="Take these sources, and compare them.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Use what the cache has.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print folder and origin as JSON.")] = False,
) -> None:
    """Fetch the sources that a native build compiles, and check that they are upstream's.

    From the package index where its archive holds csrc/, else from the release's git tag, whose tree id is compared with the
    one that anymamba knows.

    Example: anymamba source causal_conv1d==1.4.0 --mirror https://mirror.example/
    """
    from anymamba.upstream.native.sources import get_sources
    from anymamba.upstream.native.wishes import exact_release

    name, version = exact_release(requirement)
    into = folder or Path(f"{name}-{version}")
    with shown_progress() as progress:
        progress.step(f"Looking for {name} {version}")
        sources = get_sources(
            name,
            version,
            into,
            python=Path(sys.executable),
            given=source,
            mirror=mirror,
            offline=offline,
            progress=progress,
        )
    if as_json:
        facts = {"folder": str(sources.folder), "origin": sources.origin, "proved": sources.proved}
        terminal().json({**facts, "identity": dict(sources.identity)})
        return
    terminal().say(f"{escape(str(sources.folder))}: {escape(sources.origin)}")
