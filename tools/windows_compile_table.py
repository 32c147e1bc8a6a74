"""The tables of docs/native.md about real Windows compilers, made from what `python -m tools.windows_lab compile` recorded.

python -m tools.windows_compile_table            show them
python -m tools.windows_compile_table --write    put them into the document
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tools.windows_lab.compile.command import DEBUG, PTX
from tools.windows_lab.compile.record import RESULTS, Entry, Record
from tools.windows_lab.compile.wanted import NOT_TRIED

__all__ = ["DOCUMENT", "replaced", "tables"]

DOCUMENT = Path(__file__).parents[1] / "docs" / "native.md"
_MODES = {DEBUG: "with `-G`", PTX: "with `-G` up to PTX"}
_BEGIN, _END = "<!-- compiled: made by tools/windows_compile_table.py -->", "<!-- end of compiled -->"


def tables(record: Record) -> str:
    """Return the tables: with the rules, without each rule, and what was not compiled."""
    tools, dates = record.tools, sorted({entry.date for entry in record.entries})
    parts = [
        f"cl.exe and link.exe of toolset {tools['cl']}, Windows SDK {tools['sdk']}, nvcc.exe {tools['nvcc']}, under "
        f"{tools['wine']}; sm_{tools['architecture'].replace('.', '')}; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}.",
        _with_rules(record),
        _without(record),
        "\n".join(["Not tried by leaving it out:", "", *(f"- `{one}`: {why}" for one, why in NOT_TRIED.items())]),
        _quick(record),
        _left(record),
    ]
    return "\n\n".join(parts)


def _with_rules(record: Record) -> str:
    lines = ["| release | Windows Python, torch | CUDA's C++ headers | compiled by the product's commands | extension |",
             "|---|---|---|---|---|"]  # fmt: skip
    for key, build in record.builds.items():
        mine = [entry for entry in record.entries if entry.build == key and not entry.without]
        units = [entry for entry in mine if entry.wanted == "compiles"]
        links = [entry for entry in mine if entry.wanted == "links"]
        if not units:
            continue
        good = sum(entry.as_wanted for entry in units)
        left = sum(text.startswith(f"{key}: ") and " without " not in text for text in record.not_compiled)
        seconds = f"{min(entry.seconds for entry in units):.0f} to {max(entry.seconds for entry in units):.0f} s each"
        bad = [f"`{Path(entry.unit).name}`: {_cell(entry.error)}" for entry in units if not entry.as_wanted]
        modes = [entry.note for entry in units]
        how = [f"{modes.count(mode)} of them {words}" for mode, words in _MODES.items() if mode in modes]
        compiled = "; ".join([f"{good} of {len(units) + left} units", *how, seconds, *bad])
        linked = "; ".join(f"`{one.unit}` {_linked(one)}" for one in links) or "-"
        lines.append(
            f"| {build['package']} {build['version']} | {build['python']}, {build['torch']}, {build['standard']} "
            f"| {build['cuda_headers']} | {compiled} | {linked} |"
        )
    return "\n".join(lines)


def _linked(entry: Entry) -> str:
    if not entry.as_wanted:
        return _cell(entry.error)
    objects = [part.replace(f"with {PTX}", _MODES[PTX]) for part in entry.note.split("; ") if "objects" in part]
    return f"linked ({'; '.join(objects)})" if objects else "linked"


def _without(record: Record) -> str:
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in record.entries:
        if entry.without:
            groups[entry.without].append(entry)
    lines = ["| left out | tried on | the first error |", "|---|---|---|"]
    for rule, entries in sorted(groups.items()):
        builds = [record.builds[one.build] for one in entries]
        where = dict.fromkeys(f"{b['package']} {b['version']} ({b['standard']}, {b['cuda_headers']})" for b in builds)
        units = dict.fromkeys(f"`{Path(one.unit).name}`" for one in entries)
        places = f"{', '.join(units)} of {', '.join(where)}"
        errors = dict.fromkeys(
            _short(one.error) if one.as_wanted else f"**not its error**: {one.error}" for one in entries
        )
        lines.append(f"| `{rule}` | {places} | {'; '.join(map(_cell, errors))} |")
    return "\n".join(lines)


def _quick(record: Record) -> str:
    parts = []
    for mode, words in (
        (DEBUG, "with `-G` added: device code is not optimised (the same front ends and host compiler, in less time)"),
        (PTX, "with `-G` up to PTX: neither optimised nor assembled for a card (all but `ptxas`, which is the same"
              " everywhere and takes longest)"),
    ):  # fmt: skip
        names: dict[str, list[str]] = defaultdict(list)
        for entry in record.entries:
            if entry.note == mode:
                names[entry.build].append(f"`{Path(entry.unit).name}`")
        if names:
            lines = [f"- {key}: {', '.join(units)}" for key, units in names.items()]
            parts.append("\n".join([f"Compiled {words}:", "", *lines]))
    return "\n\n".join(parts) or "Every unit was compiled by the product's command word for word."


def _left(record: Record) -> str:
    if not record.not_compiled:
        return "Nothing of what is wanted was left uncompiled."
    groups: dict[str, list[str]] = defaultdict(list)
    for text in record.not_compiled:
        key, _, what = text.partition(": ")
        groups[key].append(f"`{Path(what).name}`" if "/" in what else what)
    return "\n".join(["Not compiled:", "", *(f"- {key}: {', '.join(names)}" for key, names in groups.items())])


def _short(error: str) -> str:
    """The same error in another release stands on another line of it."""
    return re.sub(r"^\S+\(\d+\)\s*:\s*", "", error).partition(". ")[0]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<").replace("*", "\\*") if "**" not in text else text


def replaced(text: str, record: Record) -> str:
    """Return the document with the tables as they are now."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{tables(record)}\n\n{_END}{after}"


def main(words: Sequence[str]) -> None:
    """Show the tables, or write them."""
    record = Record(RESULTS)
    if "--write" in words:
        DOCUMENT.write_text(replaced(DOCUMENT.read_text(encoding="utf-8"), record), encoding="utf-8", newline="\n")
    else:
        print(tables(record))


if __name__ == "__main__":
    main(sys.argv[1:])
