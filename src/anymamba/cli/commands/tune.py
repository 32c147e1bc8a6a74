"""`anymamba tune`: fit kernel parameters to this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from anymamba.cli.terminal import terminal


def command(
    show: Annotated[bool, typer.Option("--show", help="Measure nothing; show what is kept.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Measure nothing; forget what is kept.")] = False,
    export: Annotated[Path | None, typer.Option("--export", help="Measure nothing; write what is kept here.")] = None,
    import_: Annotated[
        Path | None,
        typer.Option("--import", help="Measure nothing; add what --export wrote on a machine with this card."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Take the width from a model's config.json (mamba_ssm's or transformers').")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Run this script first, and tune for the shapes it calls with.")
    ] = None,
    argument: Annotated[list[str] | None, typer.Option(help="For the script of --record (again for another).")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, but keep nothing.")] = False,
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = 8,
    length: Annotated[list[int] | None, typer.Option(help="Steps (again for another); default 256 and 2048.")] = None,
    width: Annotated[int | None, typer.Option(help="The model's width, d_model: 1024 on a card, else 256.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; default the best here.")] = "",
    seconds: Annotated[float, typer.Option(help="Time for all together.")] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="Print as JSON (schema anymamba-tune/1).")] = False,
) -> None:
    """Measure kernel parameters on this machine and keep the best, for all later processes.

    What is kept holds for this card, the kernel as it is now, and shapes of the same class. ANYMAMBA_TUNED=0 ignores it.

    With --record the script runs as `python script.py` does; what it prints goes where it always goes.

    Example: anymamba tune --batch 32 --length 256 --width 1024 --dtype bfloat16
    """
    from dataclasses import asdict

    from anymamba.backends import tuned
    from anymamba.cli.progress import shown_progress
    from anymamba.errors import MachineError, OptionError
    from anymamba.measure.bench.subjects import Size
    from anymamba.measure.selection import parse_device, parse_dtype
    from anymamba.measure.tune.kernels import kernels
    from anymamba.measure.tune.search import tune
    from anymamba.measure.tune.shapes import record as shapes_of
    from anymamba.measure.tune.shapes import width_of_model

    screen = terminal()
    if reset:
        count = tuned.reset()
        if json:
            screen.json({"schema": "anymamba-tune/1", "removed": count})
        else:
            screen.say(f"{count} forgotten")
        return
    if show:
        kept = tuned.entries()
        if json:
            entries = {name: entry._asdict() for name, entry in kept.items()}
            screen.json({"schema": "anymamba-tune/1", "file": str(tuned.path()), "entries": entries})
            return
        rows = [
            [escape(name), _words(entry.parameters), f"{entry.usual_ms:.4g}", f"{entry.tuned_ms:.4g}"]
            for name, entry in kept.items()
        ]
        screen.table(escape(str(tuned.path())), ["card | kernel | shape", "parameters", "usual ms", "tuned ms"], rows)
        return
    if export is not None:
        kept = tuned.entries()
        try:
            tuned.write(export, kept)
        except OSError as error:
            raise OptionError(f"{export} cannot be written: {error.strerror or error}.") from error
        _count(json, "exported", len(kept), f"{len(kept)} written to {export}")
        return
    if import_ is not None:
        brought = tuned.read(import_)
        if not brought:
            raise OptionError(
                f"{import_} holds nothing that was tuned.",
                next_step="anymamba tune --export FILE    (on the other machine)",
            )
        tuned.keep(brought)
        _count(
            json, "imported", len(brought), f"{len(brought)} taken over; those of other cards or kernels are not used"
        )
        return
    where, lengths = parse_device(device), length or [256, 2048]
    if model is not None:
        width = width_of_model(model)
    size = Size(batch, 0, width or (256 if where.type == "cpu" else 1024))
    if min(*lengths, size.batch, size.width) < 1:
        raise OptionError("--batch, --length and --width must be at least 1.")
    works = {parse_dtype(dtype): [size._replace(length=steps) for steps in lengths]}
    if record is not None:
        works = {}
        for shape, kind in shapes_of(record, argument or []):
            works.setdefault(kind, []).append(shape)
    able = kernels(where)
    if not able:
        raise MachineError(
            f"No backend with kernels that can be tuned runs on {where} here.",
            next_step='anymamba backends (on a CPU: pip install "anymamba[cpu]")',
        )
    with shown_progress() as progress:
        found = []
        total = sum(len(sizes) for sizes in works.values())
        for kind, sizes in works.items():
            share = seconds * len(sizes) / total
            found += tune(able, sizes, kind, where, seconds=share, progress=progress, dry_run=dry_run)
    if json:
        screen.json({"schema": "anymamba-tune/1", "kept": not dry_run, "found": [asdict(one) for one in found]})
        return
    rows = [
        [escape(one.kernel), one.size, _words(one.parameters) or "the usual ones stay", f"{one.usual_ms:.4g}",
         f"{one.tuned_ms:.4g}", f"{one.tried} of {one.offered}"]
        for one in found
    ]  # fmt: skip
    screen.table("", ["kernel", "size", "parameters", "usual ms", "tuned ms", "tried"], rows)
    for one in found:
        for reason in one.dropped:
            screen.say(f"[dim]{escape(one.kernel)}, left out: {escape(reason)}[/]")
    if any(one.better for one in found):
        screen.note("not kept: --dry-run" if dry_run else f"kept: {tuned.path()}")


def _count(json: bool, what: str, count: int, words: str) -> None:
    if json:
        terminal().json({"schema": "anymamba-tune/1", what: count})
    else:
        terminal().say(escape(words))


def _words(parameters: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in parameters.items())
