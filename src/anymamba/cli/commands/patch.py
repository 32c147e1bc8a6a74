"""`anymamba patch DIR`: make upstream's sources compile elsewhere, and say why each line changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from anymamba.cli.terminal import terminal
from anymamba.errors import OptionError


def command(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Upstream's sources: `anymamba source` puts them there.")
    ],
    show_diff: Annotated[bool, typer.Option("--diff", help="Show the changes as a diff; write nothing.")] = False,
    rules: Annotated[
        list[str] | None,
        typer.Option(
            "--rule", metavar="ID", help="Also a rule that must be asked for: kernel-parameters,kNThreads=64."
        ),
    ] = None,
    without: Annotated[list[str] | None, typer.Option(metavar="ID", help="Leave a rule out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> None:
    """Apply the patch rules to a folder of upstream's sources, for those who compile them on their own.

    Every edit that some compiler asks for; a second time changes nothing. `anymamba build` prefers compiler flags, and edits
    only what is left. All rules with their reasons: docs/native.md.

    Example: anymamba patch causal_conv1d-1.4.0 --diff
    """
    from anymamba.upstream.native.rules import diff, select, work_out, write
    from anymamba.upstream.native.wishes import parse_rules

    name, version = _release(folder)
    asked, arguments = parse_rules(rules or [])
    cures = select(name, version, None, asked=asked, without=without or [])
    changes, applied = work_out(folder, name, version, [cure.rule for cure in cures], arguments)
    screen = terminal()
    if show_diff:
        screen.out.file.write(diff(changes, f"{name} {version}"))
        return
    write(folder, changes)
    if as_json:
        screen.json([vars(done) for done in applied])
        return
    for cure in cures:
        screen.say(f"[bold]{escape(cure.rule.id)}[/]: {escape(cure.rule.reason)}")
        for done in applied:
            if done.rule == cure.rule.id:
                screen.say(f"  {done.outcome}: {escape(done.file)}")


def _release(folder: Path) -> tuple[str, str]:
    from anymamba.upstream.releases import PACKAGES

    for name in PACKAGES:
        init = folder / name / "__init__.py"
        if init.is_file():
            found = re.search(r"^__version__\s*=\s*[\"']([^\"']+)", init.read_text(encoding="utf-8"), re.MULTILINE)
            if found is not None:
                return name, found[1]
    raise OptionError(
        f"{folder} holds neither {' nor '.join(PACKAGES)}.", next_step="anymamba source causal_conv1d==1.4.0"
    )
