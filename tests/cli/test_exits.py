"""How commands end: known faults are explained below the traceback, unknown ones keep it bare."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from anymamba.cli import app
from anymamba.cli.exits import exit_with_errors_explained
from anymamba.errors import OptionError


def test_a_deliberate_error_ends_in_its_words_and_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, exit_with_errors_explained():
        raise OptionError("no such thing", next_step="look elsewhere")
    assert ended.value.code == 2
    assert "Next:  look elsewhere" in capsys.readouterr().err


def test_a_known_fault_is_explained_below_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, exit_with_errors_explained():
        raise OSError(
            r'[WinError 126] The specified module could not be found. Error loading "C:\e\torch\lib\fbgemm.dll" or one of '
            "its dependencies."
        )
    assert ended.value.code == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.index("fbgemm.dll") < shown.index("torch itself cannot load its DLLs")


def test_a_bug_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), exit_with_errors_explained():
        raise ZeroDivisionError


def test_ctrl_c_during_a_command_says_that_nothing_is_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("anymamba.upstream.plan.make_plan", interrupted)
    ended = CliRunner().invoke(app, ["install", "--dry-run"])
    assert ended.exit_code == 130
    assert "Stopped; nothing was left half done." in ended.output
    assert "Abort" not in ended.output
