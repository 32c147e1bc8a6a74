"""Projects that import the installed mamba_ssm: U-Mamba, MambaIR, MambaVision, Zonos, on upstream's text in a port."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anymamba.backends import recording
from oracle import relative_error
from ported_upstream import port_on_path

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    *([] if importlib.util.find_spec("mamba_ssm") is not None else [pytest.mark.network]),
]


@pytest.fixture(scope="module", autouse=True)
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with port_on_path(tmp_path_factory.mktemp("upstream")):
        yield


def trained(module: nn.Module, start: torch.Tensor, steps: int = 12) -> list[float]:
    target = torch.randn_like(module(start))
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    losses = []
    for _ in range(steps):
        loss = (module(start) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in module.parameters())
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_network_that_imports_the_mixer_trains() -> None:
    """U-Mamba and many more: `from mamba_ssm import Mamba` inside a norm, a flattening and a residual."""
    from mamba_ssm import Mamba

    class Layer(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.norm, self.mamba = nn.LayerNorm(dim), Mamba(d_model=dim, d_state=16, d_conv=4, expand=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens = x.flatten(2).transpose(1, 2)
            return self.mamba(self.norm(tokens)).transpose(1, 2).reshape(x.shape) + x

    torch.manual_seed(0)
    with recording() as calls:
        losses = trained(Layer(8), torch.randn(2, 8, 4, 5))
    assert losses[-1] < 0.95 * losses[0]
    assert {operator.name for operator, _ in calls} >= {"causal_conv1d", "selective_scan"}


def test_the_mixers_checkpoints_have_upstreams_keys_and_shapes() -> None:
    from mamba_ssm import Mamba, Mamba2

    assert {key: tuple(value.shape) for key, value in Mamba(16).state_dict().items()} == {
        "A_log": (32, 16), "D": (32,), "in_proj.weight": (64, 16), "conv1d.weight": (32, 1, 4), "conv1d.bias": (32,),
        "x_proj.weight": (33, 32), "dt_proj.weight": (32, 1), "dt_proj.bias": (32,), "out_proj.weight": (16, 32),
    }  # fmt: skip
    assert {key: tuple(value.shape) for key, value in Mamba2(16, d_state=8, headdim=8).state_dict().items()} == {
        "dt_bias": (4,), "A_log": (4,), "D": (4,), "in_proj.weight": (84, 16), "conv1d.weight": (48, 1, 4),
        "conv1d.bias": (48,), "norm.weight": (32,), "out_proj.weight": (16, 32),
    }  # fmt: skip


def test_the_scan_and_its_reference_agree_as_image_restorers_call_them() -> None:
    """MambaIR: both names, float32 alone, four groups."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, selective_scan_ref

    torch.manual_seed(0)
    xs, dts, Bs, Cs = torch.randn(2, 24, 15), torch.randn(2, 24, 15), torch.randn(2, 4, 3, 15), torch.randn(2, 4, 3, 15)
    arguments = SimpleNamespace(A=-torch.rand(24, 3), D=torch.randn(24), bias=torch.randn(24))
    outs = [
        scan(xs, dts, arguments.A, Bs, Cs, arguments.D, z=None, delta_bias=arguments.bias, delta_softplus=True,
             return_last_state=False)
        for scan in (selective_scan_fn, selective_scan_ref)
    ]  # fmt: skip
    assert outs[0].dtype == torch.float32
    assert relative_error(*outs) < 1e-5


def test_no_gate_and_no_wish_for_the_last_state() -> None:
    """MambaVision: `return_last_state=None` is no."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    x, dt = torch.randn(2, 8, 9), torch.randn(2, 8, 9)
    B, C = torch.randn(2, 4, 9), torch.randn(2, 4, 9)
    out = selective_scan_fn(x, dt, -torch.rand(8, 4), B, C, None, z=None, delta_softplus=True, return_last_state=None)
    assert isinstance(out, torch.Tensor)


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2"])
def test_a_backbone_of_blocks_gives_step_by_step_what_it_gives_at_once(layer: str) -> None:
    """Zonos: blocks made by `create_block`, their caches, a final norm that takes the residual."""
    from mamba_ssm.models.mixer_seq_simple import create_block
    from mamba_ssm.ops.triton.layer_norm import layer_norm_fn
    from mamba_ssm.utils.generation import InferenceParams

    torch.manual_seed(0)
    given = {"layer": layer, "d_state": 8} | ({"headdim": 8} if layer == "Mamba2" else {})
    blocks = nn.ModuleList(
        create_block(16, 0, ssm_cfg=given, residual_in_fp32=True, fused_add_norm=True, layer_idx=i) for i in range(2)
    ).eval()
    norm = nn.LayerNorm(16)

    def run(hidden: torch.Tensor, cache: InferenceParams | None = None) -> torch.Tensor:
        residual = None
        for block in blocks:
            hidden, residual = block(hidden, residual, cache)
        return layer_norm_fn(
            hidden, norm.weight, norm.bias, residual, eps=norm.eps, residual_in_fp32=True, is_rms_norm=False
        )

    tokens = torch.randn(2, 9, 16)
    with torch.no_grad():
        whole = run(tokens)
        cache = InferenceParams(max_seqlen=9, max_batch_size=2)
        cache.key_value_memory_dict = {
            i: block.allocate_inference_cache(2, 9, dtype=torch.float32) for i, block in enumerate(blocks)
        }
        parts = [run(tokens[:, :5], cache)]
        cache.seqlen_offset = 5
        for t in range(5, 9):
            parts.append(run(tokens[:, t : t + 1], cache))
            cache.seqlen_offset += 1
    assert relative_error(torch.cat(parts, 1), whole) < 1e-5
    assert F.mse_loss(torch.cat(parts, 1), whole).item() < 1e-8
