"""`anymamba warmup`: compiles what is asked for, and says why not without a card."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from anymamba.backends import cuda
from anymamba.backends.cuda.runtime import Variant
from anymamba.cli import app
from anymamba.errors import MachineError


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA")
def test_without_a_card_it_is_an_error_that_says_why() -> None:
    result = CliRunner().invoke(app, ["warmup"])
    assert isinstance(result.exception, MachineError)
    assert "without CUDA" in result.exception.why


def test_it_passes_the_families_on_and_says_how_many_kernels_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def warmup(wanted: list[str], **options: object) -> tuple[int, float]:
        asked.update(options, wanted=wanted)
        options["progress"](1, 1, Variant.of("a.cu", "scale"))  # type: ignore[operator]
        return 1, 0.25

    monkeypatch.setattr(cuda, "warmup", warmup)
    result = CliRunner().invoke(app, ["warmup", "causal_conv1d", "--device", "1"])
    assert result.exit_code == 0, result.output
    assert asked["wanted"] == ["causal_conv1d"]
    assert asked["device"] == 1
    assert not asked["every"]
