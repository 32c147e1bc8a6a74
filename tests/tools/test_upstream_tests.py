"""The adaptations change what they say and nothing else (on lines of the same shape as upstream's, written here)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tools.upstream_tests.adapt import adapt

ROOT = Path(__file__).parents[2]


def test_the_device_is_mapped_on_cpu_only() -> None:
    text = 'device = "cuda"\nother = \'cuda\'\nname = "cuda_thing"\n'
    assert adapt("test_x.py", text, "cpu") == ('device = "cpu"\nother = \'cpu\'\nname = "cuda_thing"\n', ["device"])
    assert adapt("test_x.py", text, "cuda") == (text, [])


def test_channels_shrink_together() -> None:
    text = "dims = [64, 4096 + 32]\nbig = f(b, 4096 + dim + 64)[:, 4096:4096 + dim]\nlengths = [2048, 4096]\n"
    adapted, applied = adapt("test_causal_conv1d.py", text, "cpu")
    assert adapted == "dims = [64, 256 + 32]\nbig = f(b, 256 + dim + 64)[:, 256:256 + dim]\nlengths = [2048, 4096]\n"
    assert applied == ["channels"]


def test_the_missing_import_is_added_on_every_device() -> None:
    text = "from einops import rearrange\n"
    assert adapt("test_selective_state_update.py", text, "cuda")[0] == "from einops import rearrange, repeat\n"


def test_a_checkout_without_tests_is_named(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tools.upstream_tests", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert "is not there" in run.stderr


def test_failing_tests_of_a_checkout_fail_the_run(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text('def test_a():\n    assert "cuda" == "cpu"\n', encoding="utf-8")
    counts = tmp_path / "counts.json"
    run = [sys.executable, "-m", "tools.upstream_tests", str(tmp_path), "--record", str(counts), "--name", "small 1.0"]
    assert subprocess.run(run, cwd=ROOT, capture_output=True, check=False).returncode == 0
    assert subprocess.run([*run, "--device", "cuda"], cwd=ROOT, capture_output=True, check=False).returncode == 1
    runs = json.loads(counts.read_text(encoding="utf-8"))["runs"]
    assert [(r["package"], r["device"], r["passed"], r["failed"], r["missed"]) for r in runs] == [
        ("small 1.0", "cpu", 1, 0, []),
        ("small 1.0", "cuda", 0, 1, ["test_a"]),
    ]
