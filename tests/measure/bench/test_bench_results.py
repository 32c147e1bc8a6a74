"""Results as files: what is written is read back, what is none is refused, and two are compared."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from anymamba.errors import MachineError, OptionError
from anymamba.measure.bench import plots
from anymamba.measure.bench.compare import compare, differences
from anymamba.measure.bench.results import Result, Row, from_json, read, to_csv, to_json
from anymamba.measure.bench.words import amount, cells

ROW = Row(
    "Mamba block", "B2 L64 d32", 2, 64, 32, "forward", "float32", "torch", "yes", "measured",
    rounds_ms=(1.0, 2.0, 4.0), peak_mb=10.0,
)  # fmt: skip
WRONG = replace(ROW, implementation="wrong", status="wrong", error=float("inf"), rounds_ms=(), message='off, "very"')
RESULT = Result(
    (ROW, WRONG), {"processor": "p", "copy_gb_per_s": 1.5}, {"torch": "2.13"}, "counted", ("busy",), {"x": "y"}
)


def test_json_comes_back_as_it_was() -> None:
    assert from_json(json.loads(json.dumps(to_json(RESULT))), "a.json") == RESULT


def test_json_has_its_schema_and_the_median() -> None:
    document = to_json(RESULT)
    assert document["schema"] == "anymamba-bench/1"
    assert document["rows"][0]["median_ms"] == 2.0
    assert document["rows"][0]["spread"] == 1.5


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"schema": "anymamba-verify/1"}', '{"schema": "anymamba-bench/1", "rows": [1]}']
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    with pytest.raises(OptionError, match=r"a\.json"):
        read(tmp_path / "a.json")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        read(tmp_path / "b.json")


def test_csv_has_a_line_a_row_whatever_the_message_holds() -> None:
    lines = list(csv.DictReader(io.StringIO(to_csv(RESULT))))
    assert [line["implementation"] for line in lines] == ["torch", "wrong"]
    assert (lines[0]["median_ms"], lines[0]["slowest_ms"], lines[0]["rounds"]) == ("2.0", "4.0", "3")
    assert lines[1]["message"] == WRONG.message


@pytest.mark.parametrize(
    ("times", "verdict"),
    [((0.5, 0.6, 0.9), "faster"), ((4.5, 5.0), "slower"), ((0.5, 1.5), "same"), ((1.0, 9.0), "same")],
)
def test_faster_is_said_only_when_no_round_overlaps(times: tuple[float, ...], verdict: str) -> None:
    (pair, _) = compare(RESULT, Result((replace(ROW, rounds_ms=times), WRONG)))
    assert pair.verdict == verdict


def test_rows_of_only_one_side_and_changes_of_status_are_told() -> None:
    other = replace(ROW, implementation="new")
    pairs = compare(RESULT, Result((other, replace(ROW, status="failed", rounds_ms=()))))
    assert {pair.row.implementation: pair.verdict for pair in pairs} == {
        "torch": "measured -> failed", "wrong": "only in the first", "new": "only in the second",
    }  # fmt: skip
    assert pairs[0].ratio is None


def test_what_else_differs_is_told_but_not_what_is_measured() -> None:
    other = replace(RESULT, machine={"processor": "q", "copy_gb_per_s": 9.0}, versions={"torch": "2.13", "numba": "1"})
    assert differences(RESULT, other) == ["processor: p -> q", "numba: - -> 1"]


def test_figures_have_three_digits() -> None:
    assert [amount(value) for value in (None, 0.0, 0.01234, 4.045, 12.34, 1234.5, 2.5e6, 3e9)] == [
        "-", "0", "0.0123", "4.04", "12.3", "1,234", "2.5M", "3G",
    ]  # fmt: skip


def test_a_row_that_was_not_measured_shows_no_time() -> None:
    assert cells(WRONG)[:2] == ["wrong", "wrong"]


def test_a_plot_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="must end in"):
        plots.plot(RESULT, tmp_path / "a.gif")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MachineError, match="matplotlib") as caught:
        plots.plot(RESULT, tmp_path / "a.png")
    assert "anymamba[plot]" in caught.value.next_step


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_plot_is_written(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib", reason="the extra anymamba[plot] is not installed")
    longer = replace(ROW, length=128, size="B2 L128 d32", floor_ms=0.5)
    plots.plot(Result((ROW, longer)), tmp_path / f"a.{ending}")
    head = (tmp_path / f"a.{ending}").read_bytes()[:300]
    assert (b"PNG" if ending == "png" else b"<svg") in head or b"<?xml" in head
