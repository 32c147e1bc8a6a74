"""`anymamba verify`: right operators pass, a wrong one is named and fails the run, nothing hides the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from anymamba.backends.table import operators
from anymamba.backends.torch import swiglu as torch_swiglu
from anymamba.cli import app
from anymamba.cli.terminal import terminal
from anymamba.errors import UnknownBackendError
from anymamba.measure import models, verify
from anymamba.measure.cases import Case, Draw, all_cases
from anymamba.measure.verify import Plan, Row, Status, make_plan, passed

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _only_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest takes seconds and is what `anymamba verify` itself is for."""
    monkeypatch.setattr(verify, "all_cases", lambda: [case for case in all_cases() if case.operator.name == "swiglu"])
    terminal.cache_clear()


def operator_rows(plan: Plan) -> list[Row]:
    """Return the rows about operators."""
    return [row for row in verify.verify(plan) if row.part == "operators"]


def test_every_row_is_foretold_by_the_plan() -> None:
    plan = make_plan(quick=True, names=["torch", "reference"], devices=[CPU])
    assert len(list(verify.verify(plan))) == len(plan)


def test_a_right_operator_passes_with_its_error_beside_its_bound() -> None:
    rows = operator_rows(make_plan(quick=False, names=["torch"], devices=[CPU]))
    assert {row.dtype for row in rows} == {"fp32", "fp16", "bf16", "fp64"}
    for row in rows:
        assert row.status is Status.PASSED
        assert row.error is not None and row.bound is not None
        assert row.error <= row.bound


def wrong_by_a_thousandth(xy: torch.Tensor) -> torch.Tensor:
    """Compute SwiGLU with a fault that no eye would see."""
    x, y = xy.float().chunk(2, dim=1)
    return (torch.nn.functional.silu(x) * y * 1.001).to(xy.dtype)


def raising(*_: Any) -> torch.Tensor:
    """Fail as a broken kernel would."""
    raise RuntimeError("illegal memory access\nat line 7")


def not_a_number(xy: torch.Tensor) -> torch.Tensor:
    """Return what an uninitialised buffer may hold."""
    return xy.new_full((xy.shape[0], xy.shape[1] // 2), float("nan"))


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (wrong_by_a_thousandth, "output 0 is wrong"),
        (not_a_number, "output 0 is wrong"),
        (raising, "RuntimeError: illegal memory access at line 7"),
    ],
)
def test_a_broken_function_is_one_failed_row_that_names_it(
    monkeypatch: pytest.MonkeyPatch, broken: Any, words: str
) -> None:
    monkeypatch.setattr(torch_swiglu, "swiglu_forward", broken)
    rows = operator_rows(make_plan(quick=True, names=["torch", "reference"], devices=[CPU]))
    failed = [row for row in rows if row.status is Status.FAILED]
    assert {(row.name, row.backend) for row in failed} == {("swiglu", "torch")}
    assert "fp32" in {row.dtype for row in failed}
    assert words in failed[0].message
    assert {row.status for row in rows if row.backend == "reference"} == {Status.PASSED}
    assert not passed(rows)


def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch_swiglu.swiglu_backward

    def wrong(xy: torch.Tensor, dout: torch.Tensor, recompute_out: bool) -> Any:
        dxy, out = right(xy, dout, recompute_out)
        return dxy.neg(), out

    monkeypatch.setattr(torch_swiglu, "swiglu_backward", wrong)
    (row,) = [row for row in operator_rows(make_plan(True, ["torch"], [CPU])) if row.dtype == "fp32"]
    assert (row.status, row.tensor) == (Status.FAILED, "gradient of xy")
    assert row.error == pytest.approx(2.0)


def test_a_broken_function_makes_the_command_exit_with_1_and_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_swiglu, "swiglu_forward", wrong_by_a_thousandth)
    done = CliRunner().invoke(app, ["verify", "--quick", "--device", "cpu"])
    assert done.exit_code == 1
    assert "swiglu, as in a gated MLP, torch, fp32, cpu: output 0 is wrong (error 1e-3" in " ".join(done.output.split())


def test_the_command_exits_with_0_and_prints_json_with_its_schema() -> None:
    done = CliRunner().invoke(app, ["verify", "--quick", "--device", "cpu", "--backend", "torch", "--json"])
    answer = json.loads(done.output)
    assert done.exit_code == 0
    assert answer["schema"] == "anymamba-verify/1"
    assert answer["passed"] is True
    assert {row["backend"] for row in answer["rows"] if row["part"] == "operators"} == {"torch"}
    assert sum(answer["counts"].values()) == len(answer["rows"])


def test_infinite_errors_stay_valid_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_swiglu, "swiglu_forward", not_a_number)
    done = CliRunner().invoke(app, ["verify", "--quick", "--device", "cpu", "--json"])

    def forbidden(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    answer = json.loads(done.output, parse_constant=forbidden)
    assert "inf" in {row["error"] for row in answer["rows"]}


def test_a_refusal_is_no_failure_but_proves_nothing() -> None:
    refused = Row("operators", "swiglu", "", "cuda", "fp32", "cpu", Status.REFUSED)
    assert not passed([refused])
    assert passed([refused, Row("operators", "swiglu", "", "torch", "fp32", "cpu", Status.PASSED)])


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(UnknownBackendError):
        make_plan(quick=True, names=["abacus"])


def test_a_model_that_raises_is_one_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_device: torch.device) -> models.Outcome:
        raise KeyError("HOME")

    monkeypatch.setattr(models, "CHECKS", (models.Check("Mamba trains", broken),))
    *_, last = verify.verify(make_plan(quick=True, names=["torch"], devices=[CPU]))
    assert (last.status, last.name, last.message) == (Status.FAILED, "Mamba trains", "KeyError: 'HOME'")


def test_an_absent_package_is_skipped_and_a_broken_one_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    check = models.guide_script
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    assert verify._model_row("guide", check, CPU).status is Status.SKIPPED
    monkeypatch.undo()
    (tmp_path / "mamba_ssm.py").write_text("raise ImportError('no triton')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(models.importlib.sys.modules, "mamba_ssm", raising=False)
    row = verify._model_row("guide", check, CPU)
    assert (row.status, row.message) == (Status.FAILED, "ImportError: no triton")


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: f"{case.operator.name}: {case.name}")
def test_every_case_draws_the_same_values_again_and_differentiates_what_it_can(case: Case) -> None:
    first, second = (case.arguments(Draw(torch.float32, CPU)) for _ in range(2))
    assert first.keys() == second.keys()
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, second[name])
            assert value.is_leaf


def test_every_operator_has_a_quick_case() -> None:
    assert {operator.name for operator in operators()} <= {case.operator.name for case in all_cases() if case.quick}
