"""`anymamba explain`: files and standard input, two languages, JSON, honest exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from anymamba.cli import app
from anymamba.cli.commands import explain as command
from anymamba.cli.terminal import Terminal
from anymamba.errors import OptionError
from anymamba.faults import catalogue, explain

MISSING = "ModuleNotFoundError: No module named 'selective_scan_cuda'\n"


def run(*arguments: str, text: str | bytes = "") -> tuple[int, str]:
    done = CliRunner().invoke(app, ["explain", *arguments], input=text)
    assert isinstance(done.exception, SystemExit | None), done.exception
    return done.exit_code, done.stdout


def test_a_file_is_explained(tmp_path: Path) -> None:
    log = tmp_path / "构建.log"
    log.write_text(MISSING, encoding="utf-16")
    code, answer = run(str(log), "--lang", "en")
    assert code == 0
    assert "selective_scan_cuda is not there" in answer
    assert "Do: anymamba install\n" in answer


def test_standard_input_is_explained_in_chinese() -> None:
    code, answer = run("--lang", "zh", text=MISSING)
    assert code == 0
    assert "缺少编译模块 selective_scan_cuda" in answer


@pytest.mark.parametrize(("system", "word"), [("zh_CN.UTF-8", "原因"), ("en_US.UTF-8", "Cause")])
def test_the_language_is_the_systems(system: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", system)
    assert run(text=MISSING)[1].startswith(word)


@pytest.mark.parametrize(
    ("text", "code", "outcome"),
    [(MISSING, 0, "explained"), ("ValueError: bad config\n", 1, "unknown"), ("all fine\n", 0, "clean")],
)
def test_json_and_exit_code_tell_the_outcome(text: str, code: int, outcome: str) -> None:
    exit_code, answer = run("--json", text=text)
    assert exit_code == code
    value = json.loads(answer)
    assert (value["schema"], value["outcome"]) == ("anymamba-explain/1", outcome)


def test_an_unknown_log_is_called_unknown_and_says_what_to_attach() -> None:
    code, answer = run("--lang", "en", text="ok\nValueError: bad config\n")
    assert code == 1
    assert answer.startswith("Unknown.")
    assert "The first error, line 2: ValueError: bad config" in answer
    assert "--make-report" in answer


def test_the_cures_are_those_of_the_machine_the_log_is_from() -> None:
    log = "C:\\b\\causal_conv1d.cpp(159): error C2146: syntax error: missing ')' before identifier 'and'\n"
    assert "set CL=/permissive-" in run("--lang", "en", text=log)[1]


def test_another_system_may_be_asked_for() -> None:
    assert (
        "set MAX_JOBS=1"
        in run("--lang", "en", "--on", "windows", text="g++: Killed signal terminated program cc1plus\n")[1]
    )


def test_a_log_that_is_not_there_is_an_argument_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["explain", str(tmp_path / "no.log")])
    assert isinstance(done.exception, OptionError)
    assert done.exception.exit_code == 2


@pytest.mark.parametrize("encoding", ["ascii", "gbk"])
def test_every_answer_exists_on_old_consoles(encoding: str) -> None:
    """English is ASCII; Chinese is GBK."""
    raw = io.BytesIO()
    screen = Terminal()
    screen.out = Console(file=io.TextIOWrapper(raw, encoding=encoding, errors="strict"), width=100, highlight=False)
    language = "en" if encoding == "ascii" else "zh"
    for fault in catalogue():
        for system in ("windows", "linux", "mac", "wsl"):
            texts = [fault.title[language], fault.cause[language], *(fix.text[language] for fix in fault.fixes)]
            "".join(texts).encode(encoding)
            assert system
    command.show(screen, explain(MISSING), language, "windows")
    command.show(screen, explain("ValueError: x"), language, "windows")
    screen.out.file.flush()
    assert raw.getvalue()


def test_a_report_is_written_beside_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anymamba.faults.report._diagnose", dict)
    code, _ = run("--make-report", str(tmp_path / "r.zip"), text=MISSING)
    assert code == 0
    assert (tmp_path / "r.zip").stat().st_size > 300
