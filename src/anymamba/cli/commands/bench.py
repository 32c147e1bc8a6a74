"""`anymamba bench`: every implementation on this machine, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anymamba.cli.terminal import terminal


def command(
    preset: Annotated[str, typer.Option(help="guide, short, long, decode or ops.")] = "guide",
    batch: Annotated[int | None, typer.Option(help="Instead of the preset's batch.")] = None,
    length: Annotated[int | None, typer.Option(help="Instead of the preset's lengths.")] = None,
    width: Annotated[int | None, typer.Option(help="The model's width, d_model: 1024 on a card, else 64.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; default the best here.")] = "",
    rounds: Annotated[int, typer.Option(help="How often everything is measured, in turn.")] = 10,
    limit: Annotated[
        float, typer.Option(help="Seconds: leave out what takes longer a call, stop its rounds after as long.")
    ] = 5.0,
    only: Annotated[list[str] | None, typer.Option(help="Only this implementation (again for another).")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Measure nothing; compare two files of --json.", metavar="A B")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON (schema anymamba-bench/1).")] = False,
    csv: Annotated[Path | None, typer.Option(help="Write the rows here as CSV.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw bars and lines: .png, .svg or .pdf (anymamba[plot]).")] = None,
) -> None:
    """Measure every implementation that exists on this machine, side by side; each is checked before it is timed.

    Ends with 1 if one of ours is wrong or nothing could be measured.

    Example: anymamba bench --preset guide --rounds 3 --html bench.html
    """
    from anymamba.cli.commands._bench_report import show, show_comparison
    from anymamba.cli.progress import shown_progress
    from anymamba.measure.bench.page import page
    from anymamba.measure.bench.plots import plot as draw
    from anymamba.measure.bench.results import keep, read, to_csv, to_json
    from anymamba.measure.bench.run import Plan, bench, exit_code
    from anymamba.measure.bench.subjects import preset as work_of
    from anymamba.measure.selection import parse_device, parse_dtype

    screen = terminal()
    if compare is not None:
        show_comparison(screen, read(compare[0]), read(compare[1]), json)
        return
    where = parse_device(device)
    work = work_of(preset, card=where.type != "cpu", batch=batch, length=length, width=width)
    plan = Plan(work, where, parse_dtype(dtype), rounds, limit, tuple(only or ()))
    with shown_progress() as progress:
        result = bench(plan, progress)
    keep(result)
    if json:
        screen.json(to_json(result))
    else:
        show(screen, result)
    for path, text in ((csv, to_csv), (html, page)):
        if path is not None:
            path.write_text(text(result), encoding="utf-8", newline="\n")
            screen.note(f"written: {path}")
    if plot is not None:
        draw(result, plot)
        screen.note(f"written: {plot}")
    if exit_code(result):
        raise typer.Exit(1)
