"""The worked example: one process, many ranks, a rank that dies and is started again; the losses are always the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ported_upstream import build_upstream

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6), reason="fully_shard is public from torch 2.6 on"
    ),
]
ROOT = Path(__file__).parents[2]
SMALL = ["--steps", "9", "--batch", "2", "--length", "32", "--width", "32", "--layers", "1", "--save-every", "4"]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_upstream(tmp_path_factory.mktemp("upstream"))


def run(port: Path, folder: Path, *options: str, ranks: int = 1) -> list[float]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1"]
    script = [str(ROOT / "examples" / "train_on_python_docs.py"), "--folder", str(folder), *SMALL, *options]
    done = subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else []), *script], capture_output=True, text=True, encoding="utf-8",
        errors="replace", check=False, timeout=300,
        env={
            **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(port)]), "OMP_NUM_THREADS": "1",
            "ANYMAMBA_BACKEND": "torch", **({"USE_LIBUV": "0"} if os.name == "nt" else {}),
        },
    )  # fmt: skip
    if ranks > 1 and "PyTorch was built without libuv support" in done.stderr:  # whatever USE_LIBUV says
        pytest.skip(f"torchrun of torch {torch.__version__} asks for libuv, which PyTorch's Windows builds have not")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    way = options[options.index("--parallel") + 1] if "--parallel" in options else "none"
    losses: list[float] = json.loads((folder / way / "losses.json").read_text(encoding="utf-8"))
    return losses


@pytest.fixture(scope="module")
def alone(port: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return run(port, tmp_path_factory.mktemp("alone"))


def test_one_process_needs_no_launcher(alone: list[float]) -> None:
    assert len(alone) == 9
    assert alone[-1] < alone[0]


def test_a_rank_that_dies_is_started_again_and_the_losses_are_those_of_one_process(
    port: Path, alone: list[float], tmp_path: Path
) -> None:
    found = run(port, tmp_path, "--parallel", "context", "--die-once-at", "6", ranks=2)
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp2", "context"])
def test_every_way_gives_the_losses_of_one_process(port: Path, alone: list[float], tmp_path: Path, way: str) -> None:
    torch.testing.assert_close(run(port, tmp_path, "--parallel", way, ranks=2), alone, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_run_continues_on_another_number_of_ranks(port: Path, alone: list[float], tmp_path: Path) -> None:
    run(port, tmp_path, "--parallel", "fsdp2", "--steps", "4", ranks=2)
    (tmp_path / "fsdp2").rename(tmp_path / "none")
    torch.testing.assert_close(run(port, tmp_path), alone, rtol=1e-5, atol=1e-5)
