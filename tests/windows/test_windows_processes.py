"""Ctrl-C in a console, and the processes below ours."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from small_upstream import make_environment, site_packages, write_sdist

# A console of its own, so that Ctrl-C reaches the command and not the tests; the command hangs in its proof.
CONSOLE = r"""
import ctypes, subprocess, sys, time
from pathlib import Path
kernel = ctypes.windll.kernel32
kernel.FreeConsole()
if not kernel.AllocConsole():
    sys.exit(77)
kernel.SetConsoleCtrlHandler(None, False)
log = open(sys.argv[2], "wb")
command = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
ready = Path(sys.argv[3])
for _ in range(1200):
    if ready.exists() or command.poll() is not None:
        break
    time.sleep(0.1)
kernel.SetConsoleCtrlHandler(None, True)
kernel.GenerateConsoleCtrlEvent(0, 0)
try:
    code = command.wait(60)
except subprocess.TimeoutExpired:
    command.kill()
    sys.exit(78)
sys.exit(0 if code in (130, 1, 0xC000013A) else 79)
"""

INSTALL = r"""
import sys, time
from pathlib import Path
from anymamba.cli.exits import exit_with_errors_explained
from anymamba.upstream.index import Index
from anymamba.upstream.pip_settings import PipSettings
from anymamba.upstream.plan import make_plan
from anymamba.upstream.transaction import install

def hangs(python, versions):
    Path({ready!r}).write_text("", encoding="utf-8")
    time.sleep(120)
    return {{}}

with exit_with_errors_explained():
    with Index(PipSettings(no_index=True, find_links=({archives!r},))) as index:
        plan = make_plan(["causal_conv1d==99.0", "mamba_ssm==99.0"], Path({python!r}), index=index)
    install(plan, prove=hangs)
"""


def test_ctrl_c_in_a_console_takes_an_install_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    for name in ("mamba_ssm", "causal_conv1d"):
        write_sdist(tmp_path, name)
    python = make_environment(tmp_path / "environment")
    site = site_packages(python)
    before = sorted(path.name for path in site.iterdir())
    ready, log = tmp_path / "ready", tmp_path / "log.txt"
    script = INSTALL.format(ready=str(ready), archives=str(tmp_path), python=str(python))
    result = subprocess.run(
        [sys.executable, "-c", CONSOLE, script, str(log), str(ready)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=240,
    )
    said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if result.returncode == 77:
        pytest.skip("no console can be had here (wine without a display)")
    assert ready.exists(), said
    assert result.returncode == 0, (result.returncode, said)
    after = sorted(path.name for path in site.iterdir() if path.name != ".anymamba")
    assert after == before, said


def test_no_process_of_ours_is_left_behind(tmp_path: Path) -> None:
    """A command that ends by an error leaves no helper running."""
    own = psutil.Process(os.getpid())
    before = {child.pid for child in own.children(recursive=True)}
    environment = {**os.environ, "ANYMAMBA_CACHE_DIR": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    subprocess.run(
        [sys.executable, "-m", "anymamba", "install", "mamba_ssm==2.2.2"],
        env=environment,
        capture_output=True,
        check=False,
        timeout=240,
    )
    for _ in range(50):
        left = {child.pid for child in own.children(recursive=True)} - before
        if not left:
            break
        time.sleep(0.1)
    assert not left
