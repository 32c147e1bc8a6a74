"""`anymamba export`: shows, writes, and never overwrites where nobody can be asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from anymamba.cli import app
from anymamba.cli.terminal import terminal
from anymamba.errors import OptionError
from anymamba.routes import ROUTES


def invoke(*arguments: str) -> Result:
    terminal.cache_clear()  # the runner closes the streams of each call
    return CliRunner().invoke(app, ["export", *arguments], env={"COLUMNS": "200"})


@pytest.mark.parametrize("route", list(ROUTES))
def test_a_dry_run_shows_the_files_and_writes_nothing(route: str, tmp_path: Path) -> None:
    done = invoke(route, "--dry-run", "--to", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "--- " in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_files_are_written_and_kept(tmp_path: Path) -> None:
    command = ["environment", "--to", str(tmp_path)]
    assert invoke(*command).exit_code == 0
    (tmp_path / "environment.yml").write_text("mine", encoding="utf-8")
    done = invoke(*command)
    assert isinstance(done.exception, OptionError)
    assert (tmp_path / "environment.yml").read_text(encoding="utf-8") == "mine"
    assert invoke(*command, "--force").exit_code == 0
    assert "torch==2.1.1+cu118" in (tmp_path / "environment.yml").read_text(encoding="utf-8")


def test_every_route_is_named_in_the_help() -> None:
    help_text = invoke("--help").output
    assert all(route in help_text for route in ROUTES)


def test_json_has_the_files_or_what_became_of_them(tmp_path: Path) -> None:
    shown = json.loads(invoke("slurm", "--json", "--dry-run").stdout)
    assert shown["schema"] == "anymamba-export/1"
    assert shown["files"][0]["text"].startswith("#!/bin/bash")
    written = json.loads(invoke("slurm", "--json", "--to", str(tmp_path)).stdout)
    assert {one["what"] for one in written["files"]} == {"written"}
