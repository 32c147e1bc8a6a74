"""`anymamba tune`, and `tune show|export|import|reset|parameters`: fit kernel parameters to this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from anymamba.cli.terminal import terminal

if TYPE_CHECKING:
    from anymamba.measure.tune.search import Found

SCHEMA = "anymamba-tune/1"
_Json = Annotated[bool, typer.Option("--json", help=f"Print as JSON (schema {SCHEMA}).")]


def command(
    context: typer.Context,
    model: Annotated[
        Path | None, typer.Option(help="Take the width from a model's config.json (mamba_ssm's or transformers').")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Run this script first, and tune for the calls that it makes.")
    ] = None,
    argument: Annotated[list[str] | None, typer.Option(help="For the script of --record (again for another).")] = None,
    kernel: Annotated[
        list[str] | None, typer.Option(help="Only kernels with this in their name (again for another).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, but keep nothing.")] = False,
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = 8,
    length: Annotated[list[int] | None, typer.Option(help="Steps (again for another); default 256 and 2048.")] = None,
    width: Annotated[int | None, typer.Option(help="The model's width, d_model: 1024 on a card, else 256.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; default the best here.")] = "",
    seconds: Annotated[float, typer.Option(help="Time for all together.")] = 120.0,
    json: _Json = False,
) -> None:
    """Measure kernel parameters on this machine and keep the best, for all later processes.

    What is kept holds for this card, the kernel as it is now, and shapes of the same class. ANYMAMBA_TUNED=0 ignores it.

    With --record the script runs as `python script.py` does; what it prints goes where it always goes.

    Example: anymamba tune --batch 32 --length 256 --width 1024 --dtype bfloat16
    """
    if context.invoked_subcommand is not None:
        return
    from dataclasses import asdict

    from anymamba.backends import tuned
    from anymamba.cli.progress import shown_progress
    from anymamba.errors import MachineError, OptionError
    from anymamba.measure.bench.machine import busy
    from anymamba.measure.bench.subjects import Size
    from anymamba.measure.selection import parse_device, parse_dtype
    from anymamba.measure.tune.search import tune
    from anymamba.measure.tune.shapes import record as calls_of_script
    from anymamba.measure.tune.shapes import width_of_model
    from anymamba.measure.tune.works import backend_for, calls_of_size, only, tasks

    screen = terminal()
    where, kind, lengths = parse_device(device), parse_dtype(dtype), length or [256, 2048]
    if model is not None:
        width = width_of_model(model)
    width = width or (256 if where.type == "cpu" else 1024)
    if min(*lengths, batch, width) < 1:
        raise OptionError("--batch, --length and --width must be at least 1.")
    backend = backend_for(where)
    if backend is None:
        raise MachineError(
            f"No backend with kernels that can be tuned runs on {where} here.",
            next_step='anymamba backends (on a CPU: pip install "anymamba[cpu]")',
        )
    if record is not None:
        calls = calls_of_script(record, argument or [])
    with shown_progress() as progress:
        progress.step("which kernels run")
        if record is None:
            calls = [
                call for steps in lengths for call in calls_of_size(Size(batch, steps, width), kind, where, backend)
            ]
        found = tune(
            only(tasks(calls), kernel or []), seconds=seconds, progress=progress, dry_run=dry_run
        )  # fmt: skip
    if json:
        screen.json({"schema": SCHEMA, "kept": not dry_run, "found": [asdict(one) for one in found]})
        return
    _show_found(found)
    if any(one.better for one in found):
        screen.note("not kept: --dry-run" if dry_run else f"kept: {tuned.path()}")
    company = busy()
    if company:
        screen.note(company)


def show(json: _Json = False) -> None:
    """Show what is kept.

    Example: anymamba tune show
    """
    from anymamba.backends import tuned

    kept = tuned.entries()
    if json:
        entries = {name: entry._asdict() for name, entry in kept.items()}
        terminal().json({"schema": SCHEMA, "file": str(tuned.path()), "entries": entries})
        return
    rows = [
        [escape(name), _words(entry.parameters), f"{entry.usual_ms:.4g}", f"{entry.tuned_ms:.4g}"]
        for name, entry in kept.items()
    ]
    terminal().table(
        escape(str(tuned.path())), ["card | kernel | shape", "parameters", "usual ms", "tuned ms"], rows
    )  # fmt: skip


def export(
    file: Annotated[Path, typer.Argument(help="The file to write.", metavar="FILE")],
    json: _Json = False,
) -> None:
    """Write what is kept to a file, for another machine with the same card.

    Example: anymamba tune export tuned.json
    """
    from anymamba.backends import tuned
    from anymamba.errors import OptionError

    kept = tuned.entries()
    try:
        tuned.write(file, kept)
    except OSError as error:
        raise OptionError(f"{file} cannot be written: {error.strerror or error}.") from error
    _count(json, "exported", len(kept), f"{len(kept)} written to {file}")


def bring(
    file: Annotated[Path, typer.Argument(help="What `tune export` wrote.", metavar="FILE")],
    json: _Json = False,
) -> None:
    """Add what `tune export` wrote on a machine with this card.

    Example: anymamba tune import tuned.json
    """
    from anymamba.backends import tuned
    from anymamba.errors import OptionError

    if not file.is_file():
        raise OptionError(f"There is no file {file}.", next_step="anymamba tune export FILE    (on the other machine)")
    brought = tuned.read(file)
    if not brought:
        raise OptionError(
            f"{file} holds nothing that was tuned.", next_step="anymamba tune export FILE    (on the other machine)"
        )
    tuned.keep(brought)
    _count(json, "imported", len(brought), f"{len(brought)} taken over; those of other cards or kernels are not used")


def reset(json: _Json = False) -> None:
    """Forget what is kept: the usual parameters everywhere.

    Example: anymamba tune reset
    """
    from anymamba.backends import tuned

    count = tuned.reset()
    _count(json, "removed", count, f"{count} forgotten")


def parameters(json: _Json = False) -> None:
    """Say what each parameter of each kernel means.

    Example: anymamba tune parameters
    """
    from anymamba.measure.tune.meaning import meanings

    found = meanings()
    if json:
        terminal().json({"schema": SCHEMA, "parameters": found})
        return
    rows = [[kernel, name, meaning] for kernel, names in found.items() for name, meaning in names.items()]
    terminal().table("", ["kernel", "parameter", "means"], rows)


SUBCOMMANDS = {
    "show": show, "export": export, "import": bring, "reset": reset, "parameters": parameters,
}  # fmt: skip


def _show_found(found: list[Found]) -> None:
    screen = terminal()
    rows = [
        [escape(one.kernel), one.size, one.dtype, _verdict(one), _time(one.usual_ms), _time(one.tuned_ms),
         f"{one.tried} + {one.pruned} of {one.offered}"]
        for one in found
    ]  # fmt: skip
    columns = ["kernel", "size", "dtype", "parameters", "usual ms", "tuned ms", "run + ruled out"]
    screen.table("", columns, rows)
    for one in found:
        for reason in one.dropped:
            screen.say(f"[dim]{escape(one.kernel)}, left out: {escape(reason)}[/]")


def _verdict(one: Found) -> str:
    if one.usual_ms is None:
        return "no time left: more --seconds, or --kernel"
    return _words(one.parameters) or "the usual ones stay"


def _time(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds:.4g}"


def _count(json: bool, what: str, count: int, words: str) -> None:
    if json:
        terminal().json({"schema": SCHEMA, what: count})
    else:
        terminal().say(escape(words))


def _words(parameters: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in parameters.items())
