"""`anymamba doctor` on the terminal: readable on any code page, clean JSON, honest exit code, no torch needed."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import anymamba
import machines
from anymamba.cli import app
from anymamba.cli.commands import doctor as command
from anymamba.cli.terminal import Terminal, terminal
from anymamba.doctor import Way, examine
from anymamba.machine import Machine


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], None]:
    def put(machine: Machine) -> None:
        monkeypatch.setattr(command, "read_machine", lambda **options: machine)

    return put


@pytest.mark.parametrize(
    ("make", "arguments", "code"),
    [
        (machines.windows_laptop, [], 0),
        (machines.windows_laptop, ["--for", "port"], 0),
        (machines.windows_laptop, ["--for", "native"], 1),
        (machines.reference_workstation, ["--for", "native"], 0),
        (machines.no_torch, [], 1),
        (machines.broken_torch, [], 1),
        (machines.locked_server, ["--json"], 1),
    ],
)
def test_the_exit_code_says_whether_the_way_asked_for_will_work(
    make: Callable[[], Machine], arguments: list[str], code: int, on: Callable[[Machine], None]
) -> None:
    on(make())
    done = CliRunner().invoke(app, ["doctor", *arguments])
    assert isinstance(done.exception, SystemExit | None), done.exception
    assert done.exit_code == code


def test_json_is_versioned_and_complete(on: Callable[[Machine], None]) -> None:
    on(machines.broken_torch())
    answer = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)
    assert answer["schema"] == "anymamba-doctor/1"
    assert answer["healthy"] == {"port": False, "native": False}
    assert {"id", "title", "status", "way", "seen", "wanted", "why", "fix"} == set(answer["results"][0])
    assert answer["machine"]["torch"]["imports"] is False
    assert answer["machine"]["windows"]["ansi_code_page"] == 936
    assert [verdict["route"] for verdict in answer["verdicts"]] == ["port on GPU", "port on CPU", "native"]


def run(*arguments: str) -> str:
    terminal.cache_clear()  # it holds the streams of the process; each of these runs has its own
    return CliRunner().invoke(app, ["doctor", *arguments]).output


def test_it_answers_in_chinese_when_asked_or_when_the_system_speaks_it(
    on: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(machines.windows_laptop())
    asked = run("--lang", "zh")
    assert "教程的参考环境" in asked
    assert "显卡闲置" in asked
    assert "移植版（CPU）: 可用" in asked
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert run() == asked
    assert "wanted" in run("--lang", "en")
    answer = json.loads(run("--json", "--lang", "zh"))
    assert answer["language"] == "zh"
    assert answer["results"][0]["title"] == "Python 版本"
    assert answer["results"][0]["status"] == "ok"


def test_nothing_goes_on_the_network_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    wishes: list[object] = []

    def read(**options: object) -> Machine:
        wishes.append(options["network"])
        return machines.cpu_ci()

    monkeypatch.setattr(command, "read_machine", read)
    assert "not tried (anymamba doctor --network tries)" in " ".join(run().split())
    run("--network")
    assert wishes == [False, True]


@pytest.mark.parametrize("make", machines.ALL)
@pytest.mark.parametrize("encoding", ["ascii", "gbk", "cp437"])
def test_everything_shown_exists_on_old_consoles(make: Callable[[], Machine], encoding: str) -> None:
    raw = io.BytesIO()
    screen = Terminal()
    screen.out = Console(file=io.TextIOWrapper(raw, encoding=encoding, errors="strict"), width=100, highlight=False)
    command.show(screen, examine(make()), Way.BOTH)
    screen.out.file.flush()
    assert b"wanted" in raw.getvalue()


def test_a_fix_is_one_line_however_narrow_the_console() -> None:
    raw = io.StringIO()
    screen = Terminal()
    screen.out = Console(file=raw, width=40, highlight=False)
    command.show(screen, examine(machines.no_torch()), Way.PORT)
    assert "python -m pip install torch --index-url https://download.pytorch.org/whl/cu126\n" in raw.getvalue()


def test_it_runs_without_torch(tmp_path: Path) -> None:
    """In a real process in which no torch can be found."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "sys.argv = ['anymamba', 'doctor', '--json']\n"
        "from anymamba.cli import main; main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(anymamba.__file__).parent.parent), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    assert answer["machine"]["torch"] is None
    assert [one["id"] for one in answer["results"] if one["status"] == "fail" and one["way"] != "native"] == [
        "torch-installed"
    ]
