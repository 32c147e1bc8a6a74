"""`anymamba report`: one file to attach to a bug report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from anymamba.cli.terminal import terminal
from anymamba.errors import OptionError


def command(
    to: Annotated[Path, typer.Option("--to", help="The file to write: .html for a page, else plain text.")] = Path(
        "anymamba-report.txt"
    ),
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON (schema anymamba-report/1).")] = False,
    verify: Annotated[bool, typer.Option(help="Run every operator once: 10 s and more.")] = True,
    bench: Annotated[Path | None, typer.Option(help="A file of bench --json; default this machine's last.")] = None,
    log: Annotated[
        Path | None, typer.Option(help="A build log to explain; default that of the last build here.")
    ] = None,
    show_paths: Annotated[
        bool, typer.Option("--show-paths", help="Leave paths and names in; passwords and tokens go all the same.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write one file with everything a bug report needs: doctor, versions, backends, provenance, verify, last build, bench.

    Paths, user and machine names, tokens and passwords are taken out; read the file before you send it.

    Example: anymamba report --to report.html
    """
    from anymamba.cli.progress import shown_progress
    from anymamba.measure.report import gather, to_html, to_json, to_text

    if not json and to.exists() and not force:
        raise OptionError(f"{to} exists.", next_step="choose another name with --to, or add --force")
    screen = terminal()
    with shown_progress() as progress:
        sections = gather(progress, verify=verify, bench=bench, log=log, show_paths=show_paths)
    if json:
        screen.json(to_json(sections))
        return
    text = to_html(sections) if to.suffix.lower() in (".html", ".htm") else to_text(sections)
    try:
        to.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise OptionError(f"{to} cannot be written: {error.strerror or error}.") from error
    screen.say(f"{escape(str(to))}: {', '.join(section.name for section in sections)}")
    screen.say("Read it before you send it." + ("" if show_paths else " Names and paths were taken out by patterns."))
