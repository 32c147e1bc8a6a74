"""A torch is described by its files and by a process; however badly it dies, the description stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anymamba.machine._programs import Answer
from anymamba.machine.torch_build import read_torch

VERSION_FILE = """\
from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']
__version__ = '2.1.1+cu118'
debug = False
cuda: Optional[str] = '11.8'
git_version = '4c55dc50355d5e923642c59ad2a23d6ad54711e7'
hip: Optional[str] = None
"""
ALIVE = {
    "imports": True, "version": "2.1.1+cu118", "cuda": "11.8", "hip": None, "cuda_available": True, "mps": False,
    "xpu": False, "cards": [{"name": "RTX 3060", "capability": [8, 6], "works": True, "problem": ""}],
    "architectures": ["sm_86"], "numpy_works": True, "new_abi": False, "warnings": [], "seconds": 2.5,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(VERSION_FILE, encoding="utf-8")
    return tmp_path / "torch"


def line(message: object) -> str:
    return f"anymamba-probe {json.dumps(message)}\n"


def test_no_torch_is_none() -> None:
    assert read_torch(locate=lambda: None) == (None, ())


def test_a_living_torch_tells_everything(folder: Path) -> None:
    run = {"operator": "selective_scan_fn", "device": "cuda", "ok": True, "backend": "cuda", "seconds": 0.1}
    said = "some library's banner\n" + line({"torch": ALIVE}) + line({"operator": run})
    torch, runs = read_torch(locate=lambda: folder, probe=lambda operators: Answer(0, said, ""))
    assert torch is not None
    assert (torch.version, torch.release, torch.cuda, torch.cuda_available) == ("2.1.1+cu118", (2, 1), "11.8", True)
    assert torch.cards[0].capability == (8, 6)
    assert [(one.operator, one.ok, one.backend) for one in runs] == [("selective_scan_fn", True, "cuda")]


def test_a_torch_that_cannot_be_imported_is_known_by_its_files(folder: Path) -> None:
    problem = "ImportError: DLL load failed while importing _C"
    said = line({"torch": {"imports": False, "problem": problem}})
    torch, _ = read_torch(locate=lambda: folder, probe=lambda operators: Answer(0, said, ""))
    assert torch is not None
    assert (torch.version, torch.cuda, torch.imports, torch.problem) == ("2.1.1+cu118", "11.8", False, problem)


def test_a_process_that_dies_without_a_word_is_reported_with_its_code(folder: Path) -> None:
    torch, _ = read_torch(locate=lambda: folder, probe=lambda operators: Answer(-11, "", ""))
    assert torch is not None
    assert not torch.imports
    assert torch.problem == "exit code -11: no message"


def test_a_crash_in_an_operator_does_not_lose_what_was_learnt_before(folder: Path) -> None:
    torch, _ = read_torch(
        locate=lambda: folder, probe=lambda operators: Answer(None, line({"torch": ALIVE}), "no answer in 60 s")
    )
    assert torch is not None
    assert torch.imports
    assert torch.problem == "the process ended early: no answer in 60 s"


def test_the_real_probe_survives_a_torch_that_raises(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "__init__.py").write_text('raise OSError("[WinError 126] fbgemm.dll")\n', encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    torch, runs = read_torch(locate=lambda: folder)
    assert torch is not None
    assert torch.problem == "OSError: [WinError 126] fbgemm.dll"
    assert runs == ()


def test_the_real_probe_runs_operators_on_the_cpu() -> None:
    torch, runs = read_torch()
    assert torch is not None
    assert torch.imports, torch.problem
    on_cpu = {run.operator: run for run in runs if run.device == "cpu"}
    assert on_cpu["causal_conv1d_fn"].ok, on_cpu["causal_conv1d_fn"].problem
    assert on_cpu["causal_conv1d_fn"].backend
    assert [run for run in runs if run.ok is False] == []
