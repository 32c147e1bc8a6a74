"""`anymamba cache`, `anymamba bundle`, `anymamba provenance` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from anymamba.cli import app
from anymamba.cli.terminal import terminal
from anymamba.errors import AnymambaError
from anymamba.upstream import provenance
from anymamba.upstream.provenance import Traced, TracedFile


def _anymamba(*arguments: str) -> Result:
    terminal.cache_clear()  # each command is a process of its own
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "ca che 缓存"
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(folder))
    for file in ("sources/ab/x.tar.gz", "cuda/k.cubin", "somebody's.txt"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(bytes(1000))
    return folder


def test_cache_path_is_the_folder_alone(cache: Path) -> None:
    assert _anymamba("cache", "path").stdout.strip() == str(cache)


def test_cache_info_counts_and_clear_deletes_what_is_ours(cache: Path) -> None:
    told = json.loads(_anymamba("cache", "info", "--json").stdout)
    assert told["parts"] == {"sources": {"files": 1, "bytes": 1000}, "cuda": {"files": 1, "bytes": 1000}}
    assert "2 files" in _anymamba("cache", "clear").stdout
    assert [path.name for path in cache.iterdir()] == ["somebody's.txt"]
    assert _anymamba("cache", "info").exit_code == 0


def test_an_empty_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "absent"))
    assert _anymamba("cache", "info").exit_code == _anymamba("cache", "clear").exit_code == 0


def _traced(state: str) -> Traced:
    file = TracedFile("mamba_ssm/a.py", "adapted", "mamba_ssm/a.py", ("some-rule",), state, "ab" * 32)
    reasons = {"some-rule": "[because]"}
    return Traced(
        "mamba_ssm", "2.2.2+anymamba.1", "2.2.2", "m.tar.gz", "cd" * 32, "0.1", "/s", "source", "", reasons, (file,)
    )


@pytest.mark.parametrize(("state", "code"), [("intact", 0), ("altered", 1), ("missing", 1), ("added", 1)])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_provenance_ends_with_1_when_something_was_altered(
    monkeypatch: pytest.MonkeyPatch, state: str, code: int, form: list[str]
) -> None:
    monkeypatch.setattr(provenance, "trace", lambda *_: [_traced(state)])
    result = _anymamba("provenance", *form)
    assert result.exit_code == code
    assert "some-rule" in result.stdout and "[because]" in result.stdout
    assert ("anymamba install" in result.stderr) is (code == 1)


def test_only_one_output_can_be_asked_for() -> None:
    assert isinstance(_anymamba("provenance", "--diff", "--sbom").exception, AnymambaError)
    assert isinstance(_anymamba("install", "mamba_ssm", "--latest").exception, AnymambaError)
    assert isinstance(_anymamba("bundle", "d", "--platform", "amiga").exception, AnymambaError)
