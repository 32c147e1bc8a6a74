"""The report holds what each command says, survives one that dies, and gives nobody away."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

import machines
from anymamba.cli import app
from anymamba.cli.terminal import terminal
from anymamba.doctor import examine
from anymamba.machine._programs import Answer
from anymamba.measure import report
from anymamba.measure.bench.results import Result, Row, keep, last_result, to_json
from anymamba.measure.report import gather, to_html, to_text
from browser import look, needs_browser, readable

VERIFY = {
    "passed": False,
    "counts": {"passed": 3, "failed": 1},
    "seconds": 9.5,
    "rows": [
        {"status": "passed", "name": "ssd", "case": "", "backend": "cpu", "dtype": "fp32", "device": "cpu", "message": ""},
        {"status": "failed", "name": "swiglu", "case": "as in GatedMLP", "backend": "cpu", "dtype": "bf16", "device": "cpu",
         "message": "out is wrong"},
    ],
}  # fmt: skip
BACKENDS = {
    "device": "cpu",
    "dtype": "float32",
    "requested": None,
    "backends": [{"name": "cuda", "unavailable": "built without CUDA"}, {"name": "cpu", "unavailable": None}],
    "operators": [{"operator": "ssd", "chosen": "cpu"}],
}
LOG = """\
/home/wei/Documents/mamba: building
/usr/bin/ld: cannot find -lcudart
pip config: https://wei:hunter2hunter2@mirror.example/simple
"""


class Quiet:
    def step(self, text: str) -> None:
        pass


def answers(**other: Answer) -> Callable[[Sequence[str]], Answer]:
    doctor = examine(machines.windows_laptop()).to_json()
    usual = {
        "doctor": Answer(0, json.dumps(doctor), ""),
        "backends": Answer(0, json.dumps(BACKENDS), ""),
        "provenance": Answer(7, "", "Error: nothing of anymamba's\nNext: anymamba install\n"),
        "verify": Answer(1, json.dumps(VERIFY), ""),
    }
    return lambda words: (usual | other)[words[0]]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "build.log"
    path.write_text(LOG, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "cache"))


def test_every_section_is_there_and_says_what_its_command_says(log: Path) -> None:
    text = to_text(gather(Quiet(), log=log, run=answers()))
    assert "It contains: doctor, versions, backends, provenance, verify, last build, benchmark." in text
    assert "warn torch.version.cuda (torch-cuda-build, both): CPU only, beside NVIDIA GeForce RTX 3060" in text
    assert "port on CPU: works" in text
    assert "torch: 2.1.1+cpu" in text
    assert "cuda: built without CUDA" in text
    assert "Next: anymamba install" in text
    assert "FAILED: 3 passed, 1 failed" in text
    assert "failed: swiglu as in GatedMLP cpu bf16 cpu: out is wrong" in text
    assert "(link-library), line 2" in text
    assert "none was run on this machine" in text


def test_names_paths_and_passwords_are_taken_out(log: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = tmp_path / "a_secret_project"
    secret.mkdir()
    monkeypatch.chdir(secret)
    doctor = examine(machines.windows_laptop(folders=machines.windows_folders(working=str(secret)))).to_json()
    sections = gather(Quiet(), log=log, run=answers(doctor=Answer(0, json.dumps(doctor), "")))
    for text in (to_text(sections), to_html(sections), json.dumps(report.to_json(sections))):
        for word in ("/wei", "hunter2", "a_secret_project", r"Users\li", r"Users\\li"):
            assert word not in text, word
    assert "WORKING_FOLDER" in json.dumps(report.to_json(sections))


def test_with_show_paths_only_secrets_go(log: Path) -> None:
    text = to_text(gather(Quiet(), log=log, show_paths=True, run=answers()))
    assert "/home/wei/Documents" in text
    assert "hunter2" not in text


def test_a_command_that_dies_takes_only_its_section_along(log: Path) -> None:
    broken = Answer(-11, "", "Fatal Python error: Segmentation fault\n")
    text = to_text(gather(Quiet(), log=log, run=answers(doctor=broken, verify=Answer(None, "", "no answer in 180 s"))))
    assert "ended with -11" in text
    assert "Segmentation fault" in text
    assert "no answer in 180 s" in text
    assert "cpu: available" in text


def test_the_last_benchmark_and_the_last_build_are_found_by_themselves(log: Path) -> None:
    row = Row("ssd", "B1 L4 d8", 1, 4, 8, "forward", "float32", "cpu", "yes", "measured", rounds_ms=(1.25, 1.5))
    result = Result((row,), {"processor": "a processor"}, {"torch": "2.1"})
    keep(result)
    assert json.loads(last_result().read_text(encoding="utf-8")) == to_json(result)
    logs = last_result().parent / "native" / "logs"
    logs.mkdir(parents=True)
    for age, name in ((100, "old"), (0, "new")):
        file = logs / f"{name}.log"
        file.write_text("fatal error: cusparse.h: No such file or directory\n", encoding="utf-8")
        os.utime(file, (1e9 - age, 1e9 - age))
    text = to_text(gather(Quiet(), verify=False, run=answers()))
    assert "ssd, forward, B1 L4 d8, float32" in text
    assert "new.log: explained" in text
    assert "== verify" not in text


def test_the_page_needs_nothing_from_outside(log: Path) -> None:
    page = to_html(
        gather(Quiet(), log=log, run=answers(backends=Answer(0, json.dumps(BACKENDS | {"device": "<b>"}), "")))
    )
    assert "<b>" not in page
    assert "<script" not in page
    assert 'src="' not in page
    assert "<h2>last build</h2>" in page


def test_on_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_run", answers())
    terminal.cache_clear()
    file = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["report", "--to", str(file)])
    assert done.exit_code == 0, done.output
    assert file.read_text(encoding="utf-8").startswith("<!doctype html>")
    terminal.cache_clear()
    again = CliRunner().invoke(app, ["report", "--to", str(file)])
    assert "exists" in str(again.exception)
    terminal.cache_clear()
    assert CliRunner().invoke(app, ["report", "--to", str(file), "--force", "--no-verify"]).exit_code == 0


@needs_browser
def test_a_browser_shows_the_page_in_both_themes_on_a_phone_and_a_desk(log: Path, tmp_path: Path) -> None:
    page = to_html(gather(Quiet(), log=log, run=answers()))
    seen = look(page, tmp_path)
    readable(seen)
