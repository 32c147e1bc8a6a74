"""The quick proof of an installation, on stand-in packages."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from anymamba.upstream import proof


class Layer(torch.nn.Linear):
    def __init__(self, d_model: int, **_: int) -> None:
        super().__init__(d_model, d_model)


def no_convolution(**_: int) -> Layer:
    raise AttributeError("'NoneType' object has no attribute 'causal_conv1d_fwd'")


@pytest.mark.parametrize("convolution", [True, False])
def test_a_mamba_ssm_alone_is_proved_by_what_runs_without_causal_conv1d(
    convolution: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, extension = ModuleType("mamba_ssm"), ModuleType("selective_scan_cuda")
    package.Mamba = Layer  # type: ignore[attr-defined]
    package.Mamba2 = no_convolution  # type: ignore[attr-defined]
    extension.fwd, extension.__file__ = (lambda: None), "selective_scan_cuda.py"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mamba_ssm", package)
    monkeypatch.setitem(sys.modules, "selective_scan_cuda", extension)
    spec = ModuleSpec("causal_conv1d", None) if convolution else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    if convolution:
        with pytest.raises(AttributeError):
            proof._guide()
    else:
        assert proof._guide() == [2, 64, 16]
