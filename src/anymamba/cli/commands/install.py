"""`anymamba install`: bring upstream's packages to this environment, made to run on anymamba's operators."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from anymamba.cli.commands._native import Mode, native
from anymamba.cli.progress import shown_progress
from anymamba.cli.terminal import terminal
from anymamba.errors import OptionError


def command(
    requirements: Annotated[
        list[str] | None,
        typer.Argument(metavar="[REQ]...", help="Such as mamba_ssm==2.2.2 causal_conv1d==1.4.0, which is the default."),
    ] = None,
    extras: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="NAME", help="vmamba: its scan modules; fork: what a fork of mamba_ssm needs."),
    ] = None,
    mode: Annotated[
        Mode,
        typer.Option(
            help="native: compile upstream's own kernels here and install those; as anymamba build --install does."
        ),
    ] = Mode.PORT,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and stop.")] = False,
    latest: Annotated[bool, typer.Option("--latest", help="The newest of both packages, where none is named.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Use what the cache has; ask no index.")] = False,
    from_folder: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="DIR", help="Use a folder that `anymamba bundle DIR` made; no network, no cache."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan, or the result, as JSON.")] = False,
    arch: Annotated[
        str | None,
        typer.Option(metavar="A", help="With --mode native: native (this machine's cards), all, or 8.6,8.9."),
    ] = None,
    mirror: Annotated[
        str | None,
        typer.Option(metavar="PREFIX", help="With --mode native: a GitHub mirror, where sources are in git."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, metavar="N", help="With --mode native: compilers at once.")] = None,
    python: Annotated[
        Path | None, typer.Option("--python", metavar="PATH", help="Install for this interpreter instead of this one.")
    ] = None,
) -> None:
    """Install upstream's mamba_ssm and causal_conv1d here, running on anymamba's operators.

    Fetches the source archives with your own pip settings, checks them, adapts them, installs them, and proves them in a
    fresh process. Whatever fails, the environment is left as it was. torch is never touched.

    Example: anymamba install "mamba_ssm>=2,<2.3"
    """
    if mode is Mode.NATIVE:
        if extras or python or latest or from_folder:
            raise OptionError(
                "--mode native builds for the interpreter that runs it, and takes no --with, --latest or --from.",
                next_step="run anymamba with that interpreter: PYTHON -m anymamba install --mode native",
            )
        native(
            requirements or [], install=True, dry_run=dry_run, arch=arch or "native", jobs=jobs, mirror=mirror,
            offline=offline, resume=True, as_json=as_json,
        )  # fmt: skip
        return
    if arch is not None or mirror is not None or jobs is not None:
        raise OptionError(
            "--arch, --mirror and --jobs are about compiling, and the port compiles nothing.",
            next_step="anymamba install    (or the same with --mode native)",
        )
    from anymamba.upstream.bundle import plan_from_bundle
    from anymamba.upstream.plan import make_plan
    from anymamba.upstream.transaction import install

    screen = terminal()
    environment = python or Path(sys.executable)
    if (latest and (requirements or from_folder)) or (extras and from_folder):
        raise OptionError(
            "--latest goes with neither requirements nor --from, and --from not with --with.",
            next_step="anymamba install --latest",
        )
    with shown_progress() as progress:
        progress.step("Planning")
        if from_folder is not None:
            plan = plan_from_bundle(from_folder, requirements or [], environment)
        else:
            plan = make_plan(requirements or [], environment, offline=offline, extras=extras or [], latest=latest)
        installation = None if dry_run else install(plan, progress)
    if as_json:
        result: dict[str, Any] = {"plan": plan.to_json()}
        if installation is not None:
            result["installed"] = installation.packages
            result["proof"] = installation.proof
        screen.json(result)
        return
    if installation is None:
        rows = []
        for package in plan.packages:
            before = f"{package.replaces.version} ({package.replaces.kind})" if package.replaces else "-"
            size = f"{package.size / 1024:.0f} KiB" if package.size is not None else "unknown"
            where = "bundle" if plan.bundle else "cache" if package.cached else "index"
            hashed = f"{(package.sha256 or '?')[:8]} ({package.hash_from})"
            if not package.file:
                size, where, hashed = "-", "anymamba", "-"
            rows.append([package.name, package.installs, before, where, size, hashed])
        screen.table("", ["package", "would install", "replaces", "source", "size", "sha256"], rows)
        screen.say(f"Into {escape(plan.site_packages)}")
        screen.say(f"torch {plan.torch} stays as it is. Nothing was changed.")
        return
    for name, version in installation.packages.items():
        screen.say(f"{name} {version}")
    screen.say("Installed and proved in a fresh process. All numbers: anymamba verify")
