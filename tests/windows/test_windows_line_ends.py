"""CRLF: what git makes of a checkout on Windows, and what Windows editors save, is read like any other text."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from anymamba.backends.cuda.runtime import sources
from anymamba.upstream import patches
from small_upstream import VERSION, write_tree
from windows_helpers import Run


def _with_crlf(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))


def test_kernels_with_crlf_have_the_same_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted(path.name for path in sources.FOLDER.glob("*.cu"))
    assert files

    def layouts() -> dict[str, sources.Layout]:
        read, layout = (getattr(sources, name) for name in ("read", "layout"))
        for function in (read, layout):
            getattr(function, "cache_clear", lambda: None)()
        found = {}
        for file in files:
            kernels = re.findall(r"(\w+)\(const \w+ p\)", read(file).text)
            assert kernels, file
            found.update({kernel: layout(file, kernel) for kernel in kernels})
        return found

    before = layouts()
    copy = tmp_path / "kernels"
    shutil.copytree(sources.FOLDER, copy)
    for path in copy.glob("*.cu*"):
        _with_crlf(path)
    monkeypatch.setattr(sources, "FOLDER", copy)
    try:
        assert layouts() == before
    finally:
        monkeypatch.undo()
        layouts()


def test_a_source_tree_with_crlf_is_patched_as_one_without(tmp_path: Path) -> None:
    trees = []
    for name in ("lf", "crlf"):
        tree = write_tree(tmp_path / name, "mamba_ssm") / "mamba_ssm"
        if name == "crlf":
            for path in tree.rglob("*.py"):
                _with_crlf(path)
        done = patches.apply(tree, "mamba_ssm", VERSION)
        trees.append(({rule.rule: rule.outcome for rule in done}, tree))
    (plain, plain_tree), (crlf, crlf_tree) = trees
    assert plain == crlf
    for path in plain_tree.rglob("*.py"):
        other = crlf_tree / path.relative_to(plain_tree)
        assert other.read_text(encoding="utf-8") == path.read_text(encoding="utf-8")


def test_a_script_with_crlf_and_a_byte_order_mark_runs(tmp_path: Path, python: Run) -> None:
    script = tmp_path / "script.py"
    script.write_bytes(b"\xef\xbb\xbfimport anymamba.ops\r\nprint('done')\r\n")
    result = python([str(script)])
    assert result.returncode == 0, result.stderr.decode(errors="replace")
    assert result.stdout.strip() == b"done"
