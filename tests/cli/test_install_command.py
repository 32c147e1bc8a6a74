"""`anymamba install` and `anymamba uninstall` as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import anymamba
from index_server import IndexServer, serve_index
from small_upstream import make_environment, site_packages, write_sdist

WANTED = ["mamba_ssm==99.0", "causal_conv1d==99.0"]


def _anymamba(*arguments: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(Path(anymamba.__file__).parents[1]), **variables}
    return subprocess.run(
        [sys.executable, "-m", "anymamba", *arguments], env=environment, capture_output=True, check=False
    )


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("mamba_ssm", "causal_conv1d"):
        write_sdist(tmp_path, name)
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("ANYMAMBA_BACKEND", "torch")  # the proof need not compile kernels for this
    return make_environment(tmp_path / "e n v 环境")


def test_a_dry_run_prints_the_plan_as_json_and_changes_nothing(python: Path) -> None:
    result = _anymamba("install", *WANTED, "--dry-run", "--json", "--python", str(python))
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)["plan"]
    assert [(p["name"], p["installs"]) for p in plan["packages"]] == [
        ("causal_conv1d", "99.0+anymamba.1"),
        ("mamba_ssm", "99.0+anymamba.1"),
    ]
    assert Path(plan["site_packages"]) == site_packages(python)
    assert sorted(path.name for path in site_packages(python).iterdir()) == ["outside.pth"]


@pytest.mark.parametrize("code_page", ["cp936", "ascii"])
def test_the_table_survives_every_code_page(python: Path, code_page: str) -> None:
    result = _anymamba("install", *WANTED, "--dry-run", "--python", str(python), PYTHONIOENCODING=code_page)
    assert result.returncode == 0, result.stderr
    shown = result.stdout.decode(code_page).replace("\r", "").replace("\n", "")
    assert "99.0+anymamba.1" in shown and "Nothing was changed" in shown
    assert ("环境" in shown) is (code_page != "ascii")


def test_a_failed_proof_ends_with_its_exit_code_and_the_reason(python: Path) -> None:
    # the stand-ins import, but have no Mamba: the proof refuses them
    result = _anymamba("install", *WANTED, "--python", str(python))
    assert result.returncode == 7
    assert b"put back" in result.stderr and b"Mamba" in result.stderr
    assert not (site_packages(python) / "mamba_ssm").exists()


def test_what_is_not_ours_is_refused_with_its_exit_code(python: Path) -> None:
    assert _anymamba("install", "numpy").returncode == 2
    result = _anymamba("uninstall", "--python", str(python))
    assert result.returncode == 7 and b"anymamba install" in result.stderr


def test_an_environment_without_torch_is_told_how_to_get_it(tmp_path: Path) -> None:
    import venv

    venv.EnvBuilder(with_pip=False).create(tmp_path / "bare")
    python = next(p for p in (tmp_path / "bare/bin/python", tmp_path / "bare/Scripts/python.exe") if p.exists())
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()  # something that looks like pip, so that torch is what is missing
    result = _anymamba("install", "--dry-run", "--python", str(python), PYTHONPATH=os.pathsep.join(
        [str(Path(anymamba.__file__).parents[1]), str(tmp_path)]
    ))  # fmt: skip
    assert result.returncode == 8
    assert b"-m pip install torch" in result.stderr.replace(b"\n", b" ")


@pytest.mark.skipif(os.name == "nt", reason="a console's Ctrl-C is tested on Windows itself (tests/windows)")
def test_ctrl_c_while_a_slow_index_is_waited_for(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(path.name for path in site_packages(python).iterdir())
    with serve_index(IndexServer(delay=3)) as server:
        environment = {
            key: value for key, value in os.environ.items() if key.lower() not in ("http_proxy", "all_proxy")
        }
        environment |= {"PIP_INDEX_URL": f"{server.url}/simple", "PIP_NO_INDEX": "", "PIP_FIND_LINKS": ""}
        environment["PYTHONPATH"] = str(Path(anymamba.__file__).parents[1])
        command = [sys.executable, "-m", "anymamba", "install", *WANTED, "--python", str(python)]
        # Tests that run in the background have Ctrl-C switched off and hand that down: switch it on for the child.
        inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        finally:
            signal.signal(signal.SIGINT, inherited)
        until = time.monotonic() + 60
        while not server.requests and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.decode().rstrip().endswith("Stopped; nothing was left half done.")
    assert sorted(path.name for path in site_packages(python).iterdir()) == before
