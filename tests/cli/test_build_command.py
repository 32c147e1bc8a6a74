"""`anymamba build`, `source`, `patch`, `install --mode native`, as typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from anymamba.cli import app
from anymamba.cli.terminal import terminal
from anymamba.errors import MachineError, OptionError
from anymamba.machine.driver import Driver
from anymamba.upstream.native import torch_paths


def invoke(*arguments: str) -> Result:
    terminal.cache_clear()  # the runner closes the streams of each call
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which nothing can be built, whatever this one is; torch is not asked (seconds)."""

    def none(python: Path = Path(sys.executable)) -> torch_paths.TorchPaths:
        raise MachineError("no torch here")

    monkeypatch.setattr(torch_paths, "read_torch_paths", none)
    monkeypatch.setattr("anymamba.machine.read_torch", lambda operators: (None, ()))
    monkeypatch.setattr("anymamba.machine.read_driver", Driver)
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "cache"))


def small(folder: Path) -> Path:
    (folder / "csrc").mkdir(parents=True)
    (folder / "csrc" / "causal_conv1d.cpp").write_text("bool f(bool a) { return a and a; }\n", encoding="utf-8")
    (folder / "causal_conv1d").mkdir()
    (folder / "causal_conv1d" / "__init__.py").write_text('__version__ = "1.2.1"\n', encoding="utf-8")
    (folder / "setup.py").write_text(
        'FORCE_BUILD = False\ncc_flag.append("-gencode")\nx = parse(torch.version.cuda)\n'
        "if CUDA_HOME is not None:\n    _, bare_metal_version = f()\n", encoding="utf-8",
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("command", [["build"], ["install", "--mode", "native"]])
def test_a_dry_run_says_what_is_missing_and_changes_nothing(command: list[str], tmp_path: Path) -> None:
    done = invoke(*command, "--dry-run")
    assert done.exit_code == 0, done.output
    assert "causal_conv1d 1.4.0" in done.stdout and "git tag v2.2.2" in done.stdout
    assert "Missing" in done.stdout and "fix" in done.stdout and "could not be built" in done.stdout
    assert not (tmp_path / "cache").exists()
    plan = json.loads(invoke(*command, "--dry-run", "--json").stdout)
    assert plan["schema"] == "anymamba-build/1" and any(problem["fatal"] for problem in plan["problems"])


def test_a_build_stops_before_anything_is_fetched(tmp_path: Path) -> None:
    done = invoke("build", "causal_conv1d==1.4.0", "--wheel-dir", str(tmp_path / "out"))
    assert isinstance(done.exception, MachineError) and "Nothing was compiled" in str(done.exception)
    assert not (tmp_path / "cache").exists() and not (tmp_path / "out").exists()


def test_wrong_wishes_are_refused() -> None:
    assert isinstance(invoke("build", "numpy", "--dry-run").exception, OptionError)
    assert isinstance(invoke("build", "--rule", "x", "--dry-run").exception, OptionError)
    assert isinstance(invoke("install", "--mode", "native", "--with", "fork", "--dry-run").exception, OptionError)


def test_patch_shows_then_writes_then_has_nothing_to_do(tmp_path: Path) -> None:
    source = small(tmp_path / "s")
    shown = invoke("patch", str(source), "--diff")
    assert "+bool f(bool a) { return a && a; }" in shown.stdout and "+FORCE_BUILD = True" in shown.stdout
    assert "a and a" in (source / "csrc" / "causal_conv1d.cpp").read_text(encoding="utf-8")
    done = invoke("patch", str(source))
    assert done.exit_code == 0 and "alternative-operators" in done.stdout and "edited" in done.stdout
    assert "a && a" in (source / "csrc" / "causal_conv1d.cpp").read_text(encoding="utf-8")
    again = json.loads(invoke("patch", str(source), "--json").stdout)
    assert {row["outcome"] for row in again} == {"already there"}
    assert isinstance(invoke("patch", str(tmp_path)).exception, OptionError)


def test_source_takes_what_the_user_has(tmp_path: Path) -> None:
    done = invoke(
        "source",
        "causal_conv1d==1.2.1",
        "--source",
        str(small(tmp_path / "s")),
        "--dir",
        str(tmp_path / "out"),
        "--json",
    )
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["proved"] is False and (tmp_path / "out" / "csrc").is_dir()
