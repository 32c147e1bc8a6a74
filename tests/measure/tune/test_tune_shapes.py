"""Shapes to tune for come from a model's configuration or from a run of the user's script; results travel as a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from anymamba import ops
from anymamba.backends import tuned
from anymamba.cli import app
from anymamba.cli.terminal import terminal
from anymamba.errors import OptionError
from anymamba.measure.bench.subjects import Size
from anymamba.measure.tune.shapes import record, width_of_model


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
from anymamba.ops.causal_conv1d import causal_conv1d_fn
from beside import LENGTH
for length in (LENGTH, LENGTH, int(sys.argv[1])):
    causal_conv1d_fn(torch.ones(3, 16, length, dtype=torch.bfloat16), weight=torch.ones(16, 4, dtype=torch.bfloat16))
sys.exit(0)
"""


def test_a_run_says_sizes_and_dtypes_the_most_frequent_first_and_leaves_no_trace(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "beside.py").write_text("LENGTH = 32\n", encoding="utf-8")
    before = ops.causal_conv1d_fn
    seen = record(script, ["8"])
    assert seen == [(Size(3, 32, 8), torch.bfloat16), (Size(3, 8, 8), torch.bfloat16)]
    assert ops.causal_conv1d_fn is before
    assert ops.causal_conv1d.causal_conv1d_fn is before  # type: ignore[attr-defined]


def test_mambas_inner_function_counts_by_the_width_of_its_block(tmp_path: Path) -> None:
    script = tmp_path / "model.py"
    script.write_text(
        "import torch\nfrom anymamba.measure.bench import blocks\nfrom anymamba.measure.cases import Draw\n"
        "from anymamba.ops import mamba_inner_fn\n"
        "given = blocks.mamba_arguments(Draw(torch.float32, torch.device('cpu')), 2, 6, 16)\n"
        "blocks.mamba_block(mamba_inner_fn)(**given)\n",
        encoding="utf-8",
    )
    assert record(script) == [(Size(2, 6, 16), torch.float32)]


def test_a_script_without_calls_or_that_is_not_there_says_so(tmp_path: Path) -> None:
    script = tmp_path / "empty.py"
    script.write_text("pass\n", encoding="utf-8")
    with pytest.raises(OptionError, match="neither the scan nor the convolution"):
        record(script)
    with pytest.raises(OptionError, match="is no file"):
        record(tmp_path / "absent.py")


def test_what_is_kept_travels_as_a_file(tmp_path: Path) -> None:
    entry = tuned.Entry({"block": 32}, "s", 2.0, 1.0)
    tuned.keep({"card | kernel | shape": entry})
    file = tmp_path / "tuned.json"
    assert "1 written" in run("--export", str(file))
    assert tuned.reset() == 1
    tuned.keep({"another | kernel | shape": entry})
    assert json.loads(run("--import", str(file), "--json"))["imported"] == 1
    assert set(tuned.entries()) == {"card | kernel | shape", "another | kernel | shape"}
    terminal.cache_clear()
    file.write_text("{}", encoding="utf-8")
    refused = CliRunner().invoke(app, ["tune", "--import", str(file)])
    assert isinstance(refused.exception, OptionError)
