"""`anymamba bench` and `anymamba tune` as typed: what is printed, what is written, how they end. No figure is judged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from anymamba.backends import tuned
from anymamba.cli import app
from anymamba.cli.terminal import terminal
from anymamba.errors import OptionError
from anymamba.measure.bench import floors

TINY = ["--preset", "ops", "--batch", "1", "--length", "8", "--width", "32", "--rounds", "2", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _small_and_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(floors.COPIED, "cpu", 2**12)
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "cache"))
    tuned.forget()
    yield
    monkeypatch.undo()
    tuned.forget()


def invoke(words: list[str]) -> Result:
    terminal.cache_clear()  # each command is a process of its own
    return CliRunner().invoke(app, words)


def test_json_is_one_document_on_stdout_and_can_be_compared_with_itself(tmp_path: Path) -> None:
    run = invoke(["bench", *TINY, "--only", "torch", "--json", "--csv", str(tmp_path / "a.csv")])
    assert run.exit_code == 0, run.output
    document = json.loads(run.stdout)
    assert document["schema"] == "anymamba-bench/1"
    assert {row["status"] for row in document["rows"]} == {"measured"}
    assert len((tmp_path / "a.csv").read_text(encoding="utf-8").splitlines()) == len(document["rows"]) + 1
    file = tmp_path / "a.json"
    file.write_text(run.stdout, encoding="utf-8")
    compared = invoke(["bench", "--compare", str(file), str(file), "--json"])
    pairs = json.loads(compared.stdout)["pairs"]
    assert {(pair["time_ratio"], pair["verdict"]) for pair in pairs} == {(1.0, "same")}


def test_the_table_and_the_page_name_every_implementation(tmp_path: Path) -> None:
    page = tmp_path / "bench.html"
    run = invoke(["bench", *TINY, "--only", "torch", "--only", "reference", "--html", str(page)])
    assert run.exit_code == 0, run.output
    for text in (run.stdout, page.read_text(encoding="utf-8")):
        assert "torch" in text and "reference" in text and "selective_scan" in text


@pytest.mark.parametrize("wish", [["--preset", "huge"], ["--rounds", "0"], ["--limit", "0"], ["--dtype", "int8"]])
def test_wishes_that_mean_nothing_are_refused_before_anything_runs(wish: list[str]) -> None:
    run = invoke(["bench", "--device", "cpu", *wish])
    assert isinstance(run.exception, OptionError)
    assert wish[0] in run.exception.what


def test_tune_shows_and_forgets_what_is_kept() -> None:
    tuned.keep({"card | kernel | shape": tuned.Entry({"block": 32}, "s", 2.0, 1.0)})
    shown = invoke(["tune", "show", "--json"])
    assert json.loads(shown.stdout)["entries"]["card | kernel | shape"]["parameters"] == {"block": 32}
    assert "1 forgotten" in invoke(["tune", "reset"]).stdout
    assert tuned.entries() == {}


def test_tune_measures_within_its_time_and_keeps_nothing_when_dry() -> None:
    pytest.importorskip("numba", reason="the CPU's kernels need numba")
    run = invoke(
        ["tune", "--dry-run", "--batch", "1", "--length", "16", "--width", "32", "--seconds", "1", "--device", "cpu",
              "--kernel", "selective_scan", "--kernel", "causal_conv1d", "--json"],
    )  # fmt: skip
    assert run.exit_code == 0, run.output
    document = json.loads(run.stdout)
    assert {one["kernel"] for one in document["found"]} == {
        "cpu selective_scan forward", "cpu selective_scan backward", "cpu causal_conv1d forward, rows",
        "cpu causal_conv1d backward, rows",
    }  # fmt: skip
    assert document["kept"] is False
    assert tuned.entries() == {}


def test_tune_says_what_parameters_mean() -> None:
    meant = json.loads(invoke(["tune", "parameters", "--json"]).stdout)["parameters"]
    assert "register" in meant["cuda selective_scan backward"]["min_blocks"]
    assert "lanes" in invoke(["tune", "parameters"]).stdout


def test_tune_records_a_script_and_tunes_for_its_calls(tmp_path: Path) -> None:
    pytest.importorskip("numba", reason="the CPU's kernels need numba")
    script = tmp_path / "small.py"
    script.write_text(
        "import torch\nfrom anymamba.ops import causal_conv1d_fn\n"
        "causal_conv1d_fn(torch.rand(1, 40, 8), torch.rand(40, 4))\n",
        encoding="utf-8",
    )
    run = invoke(["tune", "--record", str(script), "--seconds", "1", "--dry-run", "--json"])
    assert run.exit_code == 0, run.output
    (found,) = json.loads(run.stdout)["found"]
    assert (found["kernel"], found["size"]) == ("cpu causal_conv1d forward, rows", "1x40x8")


def test_a_model_that_is_not_there_and_a_kernel_that_is_not_here_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("numba", reason="the CPU's kernels need numba")
    absent = invoke(["tune", "--model", str(tmp_path / "config.json"), "--device", "cpu"])
    assert isinstance(absent.exception, OptionError)
    unknown = invoke(
        ["tune", "--kernel", "winograd", "--batch", "1", "--length", "8", "--width", "32", "--device", "cpu"]
    )
    assert isinstance(unknown.exception, OptionError)


def test_a_file_that_is_not_there_is_told_from_one_that_holds_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    assert "no file" in str(invoke(["tune", "import", str(file)]).exception)
    file.write_text("{}", encoding="utf-8")
    assert "holds nothing" in str(invoke(["tune", "import", str(file)]).exception)
