"""What is printed reaches the reader: in the code pages of Chinese and of UTF-8 consoles, through pipes and without one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from windows_helpers import Run

# One process for all commands: under wine, most of a command's time is the import of torch.
ALL = """
import sys
from anymamba.cli import main
from anymamba.cli.terminal import terminal
for words in (command.split("|") for command in sys.argv[1:]):
    terminal.cache_clear()
    sys.argv = ["anymamba", *words]
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    print(f"<{words[0]} ended with {code}>", flush=True)
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "构建 日志.txt"
    # cl.exe on a Chinese Windows writes its messages in code page 936
    path.write_bytes("causal_conv1d.cpp(159): error C2146: 语法错误: 缺少“)”(在标识符“and”的前面)\r\n".encode("gbk"))
    return path


# ascii: the least that a console can show. The long commands once: one code page says as much as two.
@pytest.mark.parametrize(
    ("encoding", "commands"), [("cp936", ["--help", "backends", "doctor", "explain"]), ("ascii", ["--help", "explain"])]
)
def test_every_command_can_be_read_in_the_consoles_code_page(
    encoding: str, commands: list[str], log: Path, python: Run
) -> None:
    words = [f"{command}|{log}" if command == "explain" else command for command in commands]
    result = python(["-c", ALL, *words], {"PYTHONIOENCODING": encoding, "PYTHONUTF8": None})
    text = result.stdout.decode(encoding)  # strict: a byte that the code page lacks is an error
    said = text + result.stderr.decode(encoding, "replace")
    assert result.returncode == 0, said
    assert "Traceback" not in said
    ended = dict(re.findall(r"<(\S+) ended with (\d+)>", text))
    assert list(ended) == commands
    assert {code for command, code in ended.items() if command != "doctor"} == {"0"}
    assert ended.get("doctor", "0") in {"0", "1"}  # a finding about this machine is no failure


def test_a_log_in_code_page_936_is_understood(log: Path, python: Run) -> None:
    result = python(["-m", "anymamba", "explain", "--json", str(log)], {"PYTHONIOENCODING": "cp936"})
    report = json.loads(result.stdout.decode("ascii"))
    assert "C2146" in json.dumps(report)


@pytest.mark.parametrize("code_page", [936, 65001])
def test_a_console_of_that_code_page_is_written_to(code_page: int, tmp_path: Path) -> None:
    """In a console of its own: its code page is set as `chcp` does, then the command runs with no pipe between."""
    script = (
        "import ctypes, subprocess, sys\n"
        "kernel = ctypes.windll.kernel32\n"
        "kernel.FreeConsole()\n"
        "kernel.AllocConsole()\n"
        "if not kernel.GetConsoleOutputCP(): sys.exit(76)\n"
        f"if not kernel.SetConsoleOutputCP({code_page}): sys.exit(77)\n"
        f"kernel.SetConsoleCP({code_page})\n"
        "console = open('CONOUT$', 'w')\n"
        "sys.exit(subprocess.run([sys.executable, '-m', 'anymamba', 'backends'], stdout=console, stderr=console).returncode)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=False, timeout=240, stdin=subprocess.DEVNULL
    )
    if result.returncode == 76:
        pytest.skip("no console can be had here (wine without a display)")
    if result.returncode == 77:
        pytest.skip(f"this Windows has no code page {code_page}")
    assert result.returncode == 0, result.stderr.decode(errors="replace")
    assert b"Traceback" not in result.stderr


def test_there_may_be_no_console_at_all(tmp_path: Path) -> None:
    """pythonw.exe, a service or a notebook kernel: sys.stdout is None."""
    script = (
        "import sys\nsys.stdout = sys.stderr = None\n"
        "import torch\nfrom anymamba.ops import causal_conv1d_fn\n"
        "y = causal_conv1d_fn(torch.randn(1, 4, 6), torch.randn(4, 3))\n"
        f"open({str(tmp_path / 'done')!r}, 'w').write(str(tuple(y.shape)))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=240)
    assert result.returncode == 0
    assert (tmp_path / "done").read_text(encoding="utf-8") == "(1, 4, 6)"
