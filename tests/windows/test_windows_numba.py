"""The machine code of CPU kernels is kept on disk: a second process compiles nothing, wherever the user's folder lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from windows_helpers import Run

pytest.importorskip("numba")

SCRIPT = """
import sys, torch
from anymamba.ops import selective_scan_fn
torch.manual_seed(0)
u = torch.randn(1, 4, 8)
y = selective_scan_fn(u, torch.rand(1, 4, 8), -torch.rand(4, 2), torch.randn(1, 2, 8), torch.randn(1, 2, 8))
print(float(y.double().sum()))
print("numba" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize("name", ["plain", "缓存 one"])
def test_a_second_process_compiles_nothing(name: str, tmp_path: Path, python: Run) -> None:
    cache = tmp_path / name
    variables = {"ANYMAMBA_BACKEND": "cpu", "ANYMAMBA_CACHE_DIR": str(cache)}
    first = python(["-c", SCRIPT], variables)
    assert first.returncode == 0, first.stderr.decode(errors="replace")
    written = {path: path.read_bytes() for path in cache.rglob("*.kernel")}
    assert written
    second = python(["-c", SCRIPT], variables)
    assert second.returncode == 0, second.stderr.decode(errors="replace")
    assert second.stdout == first.stdout
    assert second.stderr.split()[-1:] == [b"False"]
    assert {path: path.read_bytes() for path in cache.rglob("*.kernel")} == written


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path, python: Run) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("", encoding="utf-8")
    result = python(["-c", SCRIPT], {"ANYMAMBA_BACKEND": "cpu", "ANYMAMBA_CACHE_DIR": str(in_the_way)})
    assert result.returncode == 0, result.stderr.decode(errors="replace")
