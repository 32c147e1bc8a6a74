"""Other compilers in cl.exe's place, where they really have the same fault: g++, and clang in its Microsoft mode.

What cl.exe and nvcc.exe themselves say is in benchmarks/results/windows-compile.json. No stand-in was found for `knrows-static`
(clang captures a constexpr as the standard says), for CUDA's own checks, or for what only setup.py does.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from anymamba.upstream.native.rules import rule

GXX = shutil.which("g++") or ""
needs_gxx = pytest.mark.skipif(not GXX or sys.platform == "win32", reason="needs g++")


def clang() -> list[str]:
    """The command of a clang: on PATH, or that of the package ziglang; empty without one."""
    found = shutil.which("clang")
    if found:
        return [found]
    return [sys.executable, "-m", "ziglang", "clang"] if importlib.util.find_spec("ziglang") else []


needs_clang = pytest.mark.skipif(not clang(), reason="needs clang on PATH, or `pip install ziglang`")

OPERATORS = """\
bool both(bool a, bool b, bool c) {
    if (a and b) { return not c; }  // here `and` is prose: "and"
    return a or c;
}
"""
MACROS = """\
#define BOOL_SWITCH(COND, NAME, ...) [&] { if (COND) { constexpr bool NAME = true; return __VA_ARGS__(); } \\
                                           else { constexpr bool NAME = false; return __VA_ARGS__(); } }()
int run(bool even) {
    return BOOL_SWITCH(even, kEven, [&] {
        int smem = 1;
        #ifndef USE_ROCM
        if (kEven) { smem = 2; }
        #else
        smem = 3;
        #endif
        return smem;
    });
}
"""
LOGARITHM = """\
#include <math.h>
float scale(float x) { return x * M_LOG2E; }
"""


def run(command: list[str], source: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, str(source)],
        cwd=source.parent,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )


def edited(rule_id: str, text: str) -> str:
    edit = rule(rule_id).edit
    assert edit is not None
    return edit(text, {})


def before_and_after(folder: Path, rule_id: str, text: str, command: list[str]) -> tuple[str, str]:
    """Compile a text before the edit and after it; the errors of both."""
    source = folder / "unit.cpp"
    errors = []
    for version in (text, edited(rule_id, text)):
        source.write_text(version, encoding="utf-8")
        done = run(command, source)
        assert (done.returncode == 0) is not bool("error" in done.stderr), done.stderr
        errors.append(done.stderr if done.returncode else "")
    return errors[0], errors[1]


@needs_gxx
def test_gcc_without_operator_names_wants_the_same_edit(tmp_path: Path) -> None:
    command = [GXX, "-std=c++17", "-fno-operator-names", "-fsyntax-only"]
    before, after = before_and_after(tmp_path, "alternative-operators", OPERATORS, command)
    assert "unit.cpp:2" in before and "and" in before and after == ""


@needs_gxx
def test_pedantic_gcc_names_the_lines_that_cl_names(tmp_path: Path) -> None:
    command = [GXX, "-std=c++17", "-pedantic-errors", "-fsyntax-only"]
    before, after = before_and_after(tmp_path, "rocm-in-macro", MACROS, command)
    for line in (6, 8, 10):
        assert f"unit.cpp:{line}:9: error: embedding a directive within macro arguments is not portable" in before
    assert after == ""


@needs_gxx
def test_a_strict_gcc_hides_the_constant_as_microsofts_headers_do(tmp_path: Path) -> None:
    probe = tmp_path / "probe.cpp"
    probe.write_text("#include <math.h>\n#ifdef M_LOG2E\n#error shown\n#endif\n", encoding="utf-8")
    strict = [GXX, "-std=c++17", "-U_GNU_SOURCE", "-fsyntax-only"]
    if run(strict, probe).returncode != 0:
        pytest.skip("this C library shows M_LOG2E always")
    before, after = before_and_after(tmp_path, "m-log2e", LOGARITHM, strict)
    assert "M_LOG2E" in before and after == ""


@needs_clang
def test_clang_as_cl_wants_the_same_edit_and_takes_the_same_flag(tmp_path: Path) -> None:
    command = [*clang(), "--target=x86_64-pc-windows-msvc", "--driver-mode=cl", "/std:c++17", "/Zs"]
    before, after = before_and_after(tmp_path, "alternative-operators", OPERATORS, [*command, "/permissive"])
    assert "unit.cpp(2," in before and after == ""
    source = tmp_path / "flag.cpp"
    source.write_text(OPERATORS, encoding="utf-8")
    assert run([*command, "/permissive"], source).returncode != 0
    assert run([*command, "/permissive-"], source).returncode == 0


@needs_clang
def test_clang_as_cl_names_the_directives_in_macros(tmp_path: Path) -> None:
    command = [*clang(), "--target=x86_64-pc-windows-msvc", "-std=c++17", "-fms-compatibility", "-fsyntax-only",
               "-Werror=embedded-directive"]  # fmt: skip
    before, after = before_and_after(tmp_path, "rocm-in-macro", MACROS, command)
    assert "unit.cpp:6:" in before and "-Wembedded-directive" in before and after == ""
