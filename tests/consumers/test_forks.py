"""Projects that bring their own mamba_ssm: it wins on the path, and our two extension modules serve it, whatever its age."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from anymamba.extensions import _forks
from anymamba.ops import causal_conv1d_fn, layer_norm_fn, selective_scan_fn
from consumers.vendored import GENERATIONS, NORMS, write_extension_modules, write_fork
from oracle import relative_error

OURS = ("mamba_ssm", "causal_conv1d_cuda", "selective_scan_cuda", "triton")


@pytest.fixture
def fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Import the fork of a project as Python would there: the project's folder before site-packages."""
    site = write_extension_modules(tmp_path / "site-packages")
    (site / "mamba_ssm").mkdir()
    (site / "mamba_ssm" / "__init__.py").write_text("raise RuntimeError('the port was imported')", encoding="utf-8")
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in OURS}
    finders = list(sys.meta_path)

    def arrive(generation: int = 7, name: str = "mamba_ssm") -> Any:
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.syspath_prepend(str(write_fork(tmp_path / "project", generation)))
        return importlib.import_module(name)

    for module in before:
        del sys.modules[module]
    yield arrive
    for module in [module for module in sys.modules if module.partition(".")[0] in OURS]:
        del sys.modules[module]
    sys.modules.update(before)
    sys.meta_path[:] = finders


def direct(block: Any, hidden: torch.Tensor, kind: str) -> torch.Tensor:
    """The block's formula through anymamba.ops, for autograd to differentiate."""

    def inner(xz: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        weight, bias, x_proj, dt_proj, A, D, delta_bias = (part.double() for part in parts)
        x, z = xz.chunk(2, dim=1)
        x = causal_conv1d_fn(x, weight.squeeze(1), bias, activation="silu")
        rank, states = dt_proj.shape[1], A.shape[1]
        delta, B, C = F.linear(x.transpose(1, 2), x_proj).transpose(1, 2).split([rank, states, states], dim=1)
        return selective_scan_fn(x, dt_proj @ delta, A, B, C, D, z, delta_bias, delta_softplus=True)

    xz = F.linear(hidden.double(), block.in_proj.weight.double()).transpose(1, 2)
    parts = [direction.parts() for direction in block.directions]
    out = inner(xz, parts[0])
    if kind == "v1":
        back = (*parts[0][:4], -block.A_b_log.double().exp(), *parts[0][5:])
        out = out + inner(xz.flip([-1]), back).flip([-1])
    if kind in ("v2", "v3"):
        out = out + inner(xz.flip([-1]), parts[1]).flip([-1])
    if kind == "v3":
        length = xz.shape[-1]
        order = torch.arange(length).view(block.nslices, -1).t().flatten()
        across = torch.empty_like(out)
        across[..., order] = inner(xz[..., order], parts[2])
        out = out + across
    return F.linear(out.transpose(1, 2), block.out_proj.weight.double())


@pytest.mark.parametrize("kind", ["none", "v1", "v2", "v3"])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_forks_block_gives_the_outputs_and_gradients_of_its_formula(
    fork: Callable[..., Any], tmp_path: Path, generation: int, kind: str
) -> None:
    package = fork(generation)
    assert Path(package.__file__).is_relative_to(tmp_path / "project")
    torch.manual_seed(0)
    block = package.Mamba(8, bimamba_type=kind)
    hidden = torch.randn(2, 12, 8, requires_grad=True)
    seen, wanted = block(hidden), direct(block, hidden, kind)
    assert relative_error(seen, wanted) <= 1e-5
    weights = torch.randn_like(wanted)
    leaves = [hidden, *(p for name, p in block.named_parameters() if kind == "v1" or name != "A_b_log")]
    gradients = torch.autograd.grad(seen, leaves, weights.float())
    for gradient, other in zip(gradients, torch.autograd.grad(wanted, leaves, weights)):
        assert relative_error(gradient, other) <= 1e-4


def test_a_fork_trains(fork: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    block = fork().Mamba(8, bimamba_type="v2")
    hidden, target = torch.randn(2, 12, 8), torch.randn(2, 12, 8)
    optimiser, losses = torch.optim.SGD(block.parameters(), lr=0.3), []
    for _ in range(8):
        optimiser.zero_grad()
        loss = F.mse_loss(block(hidden), target)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", NORMS)
def test_without_triton_a_forks_norms_are_ours_under_every_name(
    fork: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # type: ignore[arg-type]
    fork()
    module = importlib.import_module(f"mamba_ssm.ops.triton.{name}")
    assert module.layer_norm_fn is layer_norm_fn
    assert module.rms_norm_fn and module.RMSNorm(8).weight.shape == (8,)
    assert "project" in (module.__doc__ or "")


def test_where_triton_is_a_forks_kernels_stay_its_own(
    fork: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    language: Any = ModuleType("triton.language")
    language.constexpr = int
    triton: Any = ModuleType("triton")
    triton.language, triton.jit = language, lambda function: SimpleNamespace(kernel=function)
    fork()
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    module = importlib.import_module("mamba_ssm.ops.triton.layernorm")
    assert module.layer_norm_fn(None, None, None) == "the fork's own kernel"


def test_what_a_fork_lacks_or_needs_no_triton_for_is_not_invented(
    fork: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # type: ignore[arg-type]
    fork()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    plain = tmp_path / "project" / "mamba_ssm" / "ops" / "triton" / "selective_state_update.py"
    plain.write_text("selective_state_update = 'without triton'\n", encoding="utf-8")
    importlib.invalidate_caches()
    module = importlib.import_module("mamba_ssm.ops.triton.selective_state_update")
    assert module.selective_state_update == "without triton"


def test_serving_twice_is_serving_once(fork: Callable[..., Any]) -> None:
    fork()
    _forks.serve_forks()
    _forks.serve_forks()
    assert sum(isinstance(finder, _forks._Finder) for finder in sys.meta_path) == 1
