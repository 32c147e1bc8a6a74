"""What a benchmark gives: rows and what they depend on; as JSON with a version, as CSV, and back."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

from anymamba.errors import OptionError

__all__ = ["SCHEMA", "Result", "Row", "from_json", "keep", "last_result", "read", "to_csv", "to_json"]

SCHEMA = "anymamba-bench/1"
"""Name and version of the JSON form; the number changes when a field changes its meaning or goes away."""

MEASURED, WRONG, REFUSED, SKIPPED, FAILED = "measured", "wrong", "refused", "skipped", "failed"


@dataclass(frozen=True)
class Row:
    """One implementation at one piece of work.

    Parameters
    ----------
    subject, size, direction, dtype : str
        The work; `size` in words, `batch`, `length`, `width` in numbers.
    implementation, windows : str
    status : str
        measured; wrong (not timed: its result is not the reference's); refused (says it cannot); skipped (too slow for
        the limit); failed (an error).
    message : str
        Why it was not measured.
    rounds_ms : tuple of float
        Milliseconds of one call, one a round.
    peak_mb : float or None
        See `Result.memory`.
    tokens_per_s, copy_share, matrix_share : float or None
        Of the median; the shares are of this machine's own measured copy and matrix rates.
    cold_s : float or None
        Seconds of the implementation's first call of this work in the process, at the size of the check: loading and
        compiling, or taking from a disk cache.
    cold_ms : float or None
        Median of a few calls, each after memory was swept: nothing of the arguments is left in a cache. The rounds are warm.
    full_error : float or None
        Relative error of the outputs at the full size, against the first implementation measured there.
    error, bound : float or None
        Of the tensor closest to its bound, against the float64 reference at the size of the check.
    """

    subject: str
    size: str
    batch: int
    length: int
    width: int
    direction: str
    dtype: str
    implementation: str
    windows: str
    status: str
    message: str = ""
    rounds_ms: tuple[float, ...] = ()
    peak_mb: float | None = None
    tokens_per_s: float | None = None
    copy_share: float | None = None
    matrix_share: float | None = None
    cold_s: float | None = None
    error: float | None = None
    bound: float | None = None
    floor_ms: float | None = None
    cold_ms: float | None = None
    full_error: float | None = None

    @property
    def work(self) -> tuple[str, str, str, str]:
        """What is compared side by side: rows with the same."""
        return self.subject, self.size, self.direction, self.dtype

    @property
    def median_ms(self) -> float | None:
        """The median round."""
        return median(self.rounds_ms) if self.rounds_ms else None

    @property
    def spread(self) -> float | None:
        """(slowest - fastest) / median of the rounds."""
        middle = self.median_ms
        return (max(self.rounds_ms) - min(self.rounds_ms)) / middle if middle else None


@dataclass(frozen=True)
class Result:
    """Rows and what they depend on.

    Parameters
    ----------
    rows : tuple of Row
    machine, versions : dict
    memory : str
        How peak memory was measured.
    notes : tuple of str
        What may have disturbed the measurement.
    absent : dict
        Implementations that do not exist here, and why.
    """

    rows: tuple[Row, ...]
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    memory: str = ""
    notes: tuple[str, ...] = ()
    absent: dict[str, str] = field(default_factory=dict)


def to_json(result: Result) -> dict[str, Any]:
    """Return plain values for `json.dumps`."""
    rows = [
        {**asdict(row), "rounds_ms": list(row.rounds_ms), "median_ms": row.median_ms, "spread": row.spread,
         "error": "inf" if row.error == float("inf") else row.error}
        for row in result.rows
    ]  # fmt: skip
    return {
        "schema": SCHEMA,
        "machine": result.machine,
        "versions": result.versions,
        "memory": result.memory,
        "notes": list(result.notes),
        "absent": result.absent,
        "rows": rows,
    }


def from_json(document: Any, name: str) -> Result:
    """Return the result that `to_json` wrote.

    Raises
    ------
    OptionError
        If the document, called `name`, is none of this version.
    """
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise OptionError(f"{name} has schema {schema!r}, but must be a file of `anymamba bench --json`: {SCHEMA!r}.")
    known = {field.name for field in fields(Row)}
    try:
        rows = tuple(
            Row(**{
                **{key: value for key, value in row.items() if key in known},
                "rounds_ms": tuple(row["rounds_ms"]),
                "error": float("inf") if row.get("error") == "inf" else row.get("error"),
            })
            for row in document["rows"]
        )  # fmt: skip
        return Result(
            rows, document["machine"], document["versions"], document["memory"], tuple(document["notes"]),
            document["absent"],
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise OptionError(f"{name} is damaged: {type(error).__name__}: {error}.") from None


def read(path: Path) -> Result:
    """Read a file of `anymamba bench --json`; see `from_json`."""
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        # PowerShell before 7 writes UTF-16 by `>`
        raise OptionError(f"{path} is not JSON in UTF-8: {error}.") from None
    return from_json(document, str(path))


def last_result() -> Path:
    """Return where this machine's last result is kept (`anymamba report` shows it); there may be none yet."""
    from anymamba.machine.folders import cache_folder

    return cache_folder() / "last-bench.json"


def keep(result: Result) -> None:
    """Keep a result as this machine's last; a cache folder that cannot be written to is no fault of the benchmark."""
    path = last_result()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}.tmp")
        beside.write_text(json.dumps(to_json(result)), encoding="utf-8")
        beside.replace(path)


def to_csv(result: Result) -> str:
    """Return the rows as CSV, a line each, the rounds as median, fastest and slowest."""
    columns = [field.name for field in fields(Row) if field.name != "rounds_ms"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns, "median_ms", "fastest_ms", "slowest_ms", "rounds"])
    for row in result.rows:
        times = row.rounds_ms
        ends = (min(times), max(times)) if times else (None, None)
        writer.writerow([*(getattr(row, column) for column in columns), row.median_ms, *ends, len(times)])
    return text.getvalue()
