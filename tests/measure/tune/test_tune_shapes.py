"""Shapes to tune for come from a model's configuration or from a run of the user's script; results travel as a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("numba", reason="the CPU's kernels need numba")

from anymamba import backends
from anymamba.backends import tuned
from anymamba.cli import app
from anymamba.cli.terminal import terminal
from anymamba.errors import OptionError
from anymamba.measure.tune.shapes import record, width_of_model
from anymamba.measure.tune.works import tasks


@pytest.fixture(autouse=True)
def _own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "cache"))
    tuned.forget()
    yield
    monkeypatch.undo()
    tuned.forget()


def run(*words: str) -> str:
    terminal.cache_clear()
    done = CliRunner().invoke(app, ["tune", *words])
    assert done.exit_code == 0, done.output or done.exception
    return done.stdout


@pytest.mark.parametrize(
    ("config", "width"),
    [
        ({"d_model": 768, "ssm_cfg": {"layer": "Mamba2"}}, 768),
        ({"d_model": 768, "ssm_cfg": {"expand": 4}}, 1536),
        ({"model_type": "mamba", "hidden_size": 1024, "expand": 2, "intermediate_size": 2048}, 1024),
        ({"model_type": "jamba", "hidden_size": 512, "mamba_expand": 1, "intermediate_size": 9999}, 256),
        ({"model_type": "falcon_h1", "hidden_size": 512, "mamba_d_ssm": 768}, 384),
        ({"text_config": {"hidden_size": 64}}, 64),
    ],
)
def test_a_configuration_says_the_width(tmp_path: Path, config: dict[str, object], width: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert width_of_model(tmp_path) == width
    assert width_of_model(tmp_path / "config.json") == width


@pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"d_model": "wide"}'])
def test_what_describes_no_mamba_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(OptionError):
        width_of_model(file)
    with pytest.raises(OptionError, match="cannot be read"):
        width_of_model(tmp_path / "absent.json")


SCRIPT = """
import sys
import torch
from anymamba.ops import causal_conv1d_fn
from beside import LENGTH
for length in (LENGTH, LENGTH, int(sys.argv[1])):
    causal_conv1d_fn(torch.ones(3, 16, length, dtype=torch.bfloat16), torch.ones(16, 4, dtype=torch.bfloat16))
sys.exit(0)
"""


def test_a_run_says_its_calls_the_most_frequent_first_and_leaves_no_trace(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "beside.py").write_text("LENGTH = 32\n", encoding="utf-8")
    seen = record(script, ["8"])
    assert [(call.operator, call.size, call.dtype) for call in seen] == [
        ("causal_conv1d", "3x16x32", torch.bfloat16), ("causal_conv1d", "3x16x8", torch.bfloat16)
    ]  # fmt: skip
    assert not backends.is_recording()


def test_a_blocks_training_step_counts_forward_and_backward(tmp_path: Path) -> None:
    script = tmp_path / "model.py"
    script.write_text(
        "import torch\nfrom anymamba.measure.bench import blocks\nfrom anymamba.measure.cases import Draw\n"
        "from anymamba.ops import mamba_inner_fn\n"
        "given = blocks.mamba_arguments(Draw(torch.float32, torch.device('cpu')), 2, 6, 16)\n"
        "blocks.mamba_block(mamba_inner_fn)(**given).sum().backward()\n",
        encoding="utf-8",
    )
    seen = record(script)
    assert {call.function for call in seen} == {
        "causal_conv1d_forward", "causal_conv1d_backward", "selective_scan_forward", "selective_scan_backward"
    }  # fmt: skip
    assert {call.size for call in seen} == {"2x32x6"}
    assert {task.place.kernel.partition(" ")[0] for task in tasks(seen)} == {"cpu"}


def test_a_script_without_calls_or_that_is_not_there_says_so(tmp_path: Path) -> None:
    script = tmp_path / "empty.py"
    script.write_text("pass\n", encoding="utf-8")
    with pytest.raises(OptionError, match="made no call that can be tuned"):
        record(script)
    with pytest.raises(OptionError, match="is no file"):
        record(tmp_path / "absent.py")


def test_calls_on_a_backend_without_kernels_of_its_own_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "import torch\nfrom anymamba.ops import causal_conv1d_fn\n"
        "causal_conv1d_fn(torch.ones(1, 2, 3), torch.ones(2, 4))\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("ANYMAMBA_BACKEND", "torch")
    with pytest.raises(OptionError) as refused:
        record(script)
    assert "torch" in refused.value.why


def test_what_is_kept_travels_as_a_file(tmp_path: Path) -> None:
    entry = tuned.Entry({"block": 32}, "s", 2.0, 1.0)
    tuned.keep({"card | kernel | shape": entry})
    file = tmp_path / "tuned.json"
    assert "1 written" in run("export", str(file))
    assert tuned.reset() == 1
    tuned.keep({"another | kernel | shape": entry})
    assert json.loads(run("import", str(file), "--json"))["imported"] == 1
    assert set(tuned.entries()) == {"card | kernel | shape", "another | kernel | shape"}
    terminal.cache_clear()
    file.write_text("{}", encoding="utf-8")
    refused = CliRunner().invoke(app, ["tune", "import", str(file)])
    assert isinstance(refused.exception, OptionError)
