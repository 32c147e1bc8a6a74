"""A bundle to attach to a question: the answer, the log, and what machine it was; scrubbed.

One zip of plain text files, so its owner can read all of it before sending it.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anymamba.errors import OptionError
from anymamba.faults.brief import this_system
from anymamba.faults.explain import Explanation
from anymamba.faults.scrub import scrub

__all__ = ["write_report"]

_README = """\
Made by `anymamba explain --make-report`. Read it before you send it.

log.txt       what was kept of the log (a big one is condensed), with the original line numbers
answer.json   what anymamba made of it
machine.json  what `anymamba doctor --json` says

User names, home folders, machine names, addresses, tokens and passwords were replaced by words in capitals. That works by
patterns: something unusual may have slipped through.
"""


def write_report(
    path: Path,
    explanation: Explanation,
    *,
    overwrite: bool = False,
    machine: Callable[[], dict[str, Any]] | None = None,
) -> None:
    """Write the bundle.

    Parameters
    ----------
    path : Path
        The zip to write.
    explanation : Explanation
    overwrite : bool
        Replace an existing file.
    machine : callable, optional
        Returns the machine part; the doctor's own answer by default.

    Raises
    ------
    OptionError
        If the file exists and must not be overwritten, or cannot be written.
    """
    log = explanation.log
    parts = {
        "README.txt": _README,
        "log.txt": "\n".join(f"{number:>7} {line}" for number, line in zip(log.numbers, log.lines)) + "\n",
        "answer.json": json.dumps(
            explanation.to_json("en", explanation.system or this_system()), indent=2, ensure_ascii=False
        ),
        "machine.json": json.dumps((machine or _diagnose)(), indent=2, ensure_ascii=False),
    }
    try:
        with (
            path.open("wb" if overwrite else "xb") as stream,
            zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as bundle,
        ):
            for name, text in parts.items():
                bundle.writestr(name, scrub(text) if name != "README.txt" else text)
    except FileExistsError as error:
        raise OptionError(f"{path} exists.", next_step="choose another name, or add --force") from error
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror or error}.") from error


def _diagnose() -> dict[str, Any]:
    from anymamba.doctor import examine
    from anymamba.machine import read_machine

    return examine(read_machine()).to_json()
