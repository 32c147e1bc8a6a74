"""`anymamba build`, `source`, `patch`, `install --mode native`, as typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from anymamba.cli import app
from anymamba.cli.terminal import terminal
from anymamba.errors import MachineError, OptionError, VerificationFailedError
from anymamba.machine.driver import Driver
from anymamba.upstream.native import torch_paths
from anymamba.upstream.native.build import Built
from anymamba.upstream.transaction import Installation


def invoke(*arguments: str) -> Result:
    terminal.cache_clear()  # the runner closes the streams of each call
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which nothing can be built, whatever this one is; torch is not asked (seconds)."""

    def none(python: Path = Path(sys.executable)) -> torch_paths.TorchPaths:
        raise MachineError("no torch here")

    monkeypatch.setattr(torch_paths, "read_torch_paths", none)
    monkeypatch.setattr("anymamba.machine.facts.read_torch", lambda operators: (None, ()))
    monkeypatch.setattr("anymamba.machine.facts.read_driver", Driver)
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


def test_install_hands_on_what_compiling_takes() -> None:
    words = ["install", "--mode", "native", "--arch", "8.6,9.0", "--jobs", "3", "--mirror", "https://m.example/"]
    plan = json.loads(invoke(*words, "--dry-run", "--json").stdout)
    assert plan["architectures"] == ["8.6", "9.0"] and plan["jobs"] == 3


@pytest.mark.parametrize("option", [["--arch", "8.6"], ["--jobs", "2"], ["--mirror", "https://m.example/"]])
def test_the_port_compiles_nothing_and_says_so(option: list[str]) -> None:
    refused = invoke("install", *option, "--dry-run").exception
    assert isinstance(refused, OptionError) and "--mode native" in str(refused)


@pytest.mark.parametrize("works", [True, False])
def test_what_was_compiled_stays_until_it_is_installed(
    works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    wheel = tmp_path / "mamba_ssm-2.2.2-py3-none-any.whl"
    built = Built("mamba_ssm", "2.2.2", wheel, tmp_path / "log", seconds=1.0, peak_bytes=1)
    kept: list[bool] = []

    def build(*_: object, keep: bool, **__: object) -> list[Built]:
        kept.append(keep)
        return [built]

    def install_wheels(*_: object) -> Installation:
        assert folder.is_dir()
        if not works:
            raise VerificationFailedError("it does not work here", next_step="anymamba doctor")
        return Installation({"mamba_ssm": "2.2.2"}, {})

    monkeypatch.setattr("anymamba.upstream.native.build.build", build)
    monkeypatch.setattr("anymamba.upstream.transaction.install_wheels", install_wheels)
    monkeypatch.setattr(
        "anymamba.upstream.native.plan.make_native_plan",
        lambda *_, **__: SimpleNamespace(
            packages=[SimpleNamespace(folder=str(folder), name="mamba_ssm")], obstacles=()
        ),
    )
    done = invoke("build", "mamba_ssm==2.2.2", "--install")
    assert kept == [True] and folder.is_dir() is not works
    if not works:
        assert isinstance(done.exception, VerificationFailedError)
        assert "build --resume --install mamba_ssm==2.2.2" in done.stderr


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
