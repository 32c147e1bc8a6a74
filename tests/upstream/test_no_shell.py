"""Subprocesses get argument lists, and nothing from a source archive is executed to make a port."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import anymamba

SOURCES = sorted(Path(anymamba.__file__).parent.rglob("*.py"))
_SHELLS = {("os", "system"), ("os", "popen"), ("subprocess", "getoutput"), ("subprocess", "getstatusoutput")}
_STARTERS = {"run", "Popen", "call", "check_call", "check_output"}


def _offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        if any(
            k.arg == "shell" and not (isinstance(k.value, ast.Constant) and not k.value.value) for k in node.keywords
        ):
            found.append(f"line {node.lineno}: shell=")
        function = node.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            called = (function.value.id, function.attr)
            if called in _SHELLS:
                found.append(f"line {node.lineno}: {'.'.join(called)}")
            starts = called[0] == "subprocess" and called[1] in _STARTERS
            if starts and node.args and isinstance(node.args[0], (ast.JoinedStr, ast.Constant)):
                found.append(f"line {node.lineno}: a string instead of an argument list")
        if isinstance(function, ast.Name) and function.id in ("exec", "eval"):
            found.append(f"line {node.lineno}: {function.id}")
    return found


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if "upstream" in p.parts or "cli" in p.parts], ids=lambda p: p.name
)
def test_no_shell_string_and_no_executed_text(path: Path) -> None:
    assert _offences(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "bad",
    ["subprocess.run('ls', shell=True)", "os.system(x)", "subprocess.run(f'pip {x}')", "exec(text)"],
)
def test_the_check_sees_what_it_is_for(bad: str) -> None:
    assert len(_offences(bad)) >= 1
