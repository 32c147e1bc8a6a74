"""The table of choices: every registered operator, asked with a typical call."""

from __future__ import annotations

import json
import pkgutil

import pytest
import torch
from typer.testing import CliRunner

import anymamba.ops
from anymamba import backends
from anymamba.backends.table import calls_asked, operators, table
from anymamba.cli import app
from anymamba.cli.terminal import terminal

CPU = torch.device("cpu")


def test_real_backends_are_ordered_by_priority_and_describe_themselves() -> None:
    names = backends.names()
    assert names[-1] == "reference"
    assert names.index("torch") < names.index("reference")
    assert all(backends.summary(name) for name in names)
    assert backends.unavailable("torch") is None


def test_every_operator_is_found_once_without_a_list_kept_by_hand() -> None:
    found = operators()
    assert len({operator.name for operator in found}) == len(found)
    families = {module.name for module in pkgutil.iter_modules(anymamba.ops.__path__) if module.name[0] != "_"}
    assert {"causal_conv1d", "causal_conv1d_update", "layer_norm", "layernorm_gated", "swiglu", "selective_scan"} <= {
        operator.name for operator in found
    }
    assert {operator.family for operator in found} <= families


def test_a_typical_call_tells_what_backends_are_asked() -> None:
    call = calls_asked(CPU, torch.bfloat16)["causal_conv1d"]
    assert (call.device, call.dtype, call.width) == (CPU, torch.bfloat16, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_operator_can_run_on_the_cpu(dtype: torch.dtype) -> None:
    rows = {row.operator: row for row in table(CPU, dtype)}
    assert rows.keys() == {operator.name for operator in operators()}
    for row in rows.values():
        assert row.chosen is not None, f"no case of {row.operator} in anymamba.measure.cases, or no backend"
        assert [choice.backend for choice in row.choices] == list(backends.names())


def test_asking_for_one_by_name_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backends.ENVIRONMENT_VARIABLE, "reference")
    assert {row.chosen for row in table(CPU, torch.float32)} == {"reference"}


def test_the_command_prints_the_table() -> None:
    terminal.cache_clear()
    done = CliRunner().invoke(app, ["backends", "--device", "cpu"])
    assert done.exit_code == 0
    assert "causal_conv1d" in done.output
    assert "chosen" in done.output


def test_the_command_prints_json_with_its_schema() -> None:
    terminal.cache_clear()
    answer = json.loads(CliRunner().invoke(app, ["backends", "--device", "cpu", "--dtype", "float64", "--json"]).output)
    assert answer["schema"] == "anymamba-backends/1"
    assert (answer["device"], answer["dtype"]) == ("cpu", "float64")
    by_name = {row["operator"]: row for row in answer["operators"]}
    assert by_name["swiglu"]["refusals"]["torch"] is None
    assert [one["name"] for one in answer["backends"]] == list(backends.names())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dtype", "float8"], "--dtype is 'float8'"),
        (["--device", "toaster"], "--device is 'toaster'"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["backends", *arguments])
    assert words in str(done.exception)
