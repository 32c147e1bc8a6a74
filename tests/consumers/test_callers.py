"""Projects that import mamba_ssm as it is installed: stand-ins of how each calls (docs/consumers.md: the originals)."""

from __future__ import annotations

import pickle
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.backends import use_backend
from anymamba.errors import DeviceError
from anymamba.ops import causal_conv1d_fn, layer_norm_fn, selective_scan_fn
from oracle import relative_error


class FourDirections(nn.Module):
    """An image block (MambaIR, VMamba v0): four directions as groups of one scan, all its inputs cast to float32."""

    def __init__(self, channels: int = 6, states: int = 4, rank: int = 2) -> None:
        super().__init__()
        self.states, self.rank = states, rank
        self.x_proj_weight = nn.Parameter(torch.randn(4, rank + 2 * states, channels) * channels**-0.5)
        self.dt_projs_weight = nn.Parameter(torch.randn(4, channels, rank) * rank**-0.5)
        self.dt_projs_bias = nn.Parameter(torch.randn(4, channels))
        self.A_logs = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(4 * channels, 1))
        self.Ds = nn.Parameter(torch.ones(4 * channels))

    def forward(self, image: Tensor) -> Tensor:
        batch, length = image.shape[0], image.shape[2] * image.shape[3]
        along = torch.stack([image.flatten(2), image.transpose(2, 3).flatten(2)], dim=1)
        xs = torch.cat([along, along.flip(-1)], dim=1)
        dts, B, C = (self.x_proj_weight @ xs).split([self.rank, self.states, self.states], dim=2)
        precise = self.Ds.dtype if self.Ds.dtype == torch.float64 else torch.float32
        out = selective_scan_fn(
            xs.to(precise).reshape(batch, -1, length),
            (self.dt_projs_weight @ dts).to(precise).reshape(batch, -1, length),
            -self.A_logs.to(precise).exp(), B.to(precise), C.to(precise), self.Ds.to(precise), z=None,
            delta_bias=self.dt_projs_bias.to(precise).flatten(), delta_softplus=True, return_last_state=False,
        )  # fmt: skip
        assert out.dtype == precise
        return out.view(batch, 4, -1, length).sum(1)


class HalfGated(nn.Module):
    """A token mixer (MambaVision): no gate inside the scan, `return_last_state=None`, B and C transposed copies."""

    def __init__(self, width: int = 8, states: int = 4, rank: int = 2) -> None:
        super().__init__()
        self.split = [rank, states, states]
        self.in_proj = nn.Linear(width, width, bias=False)
        self.conv = nn.Conv1d(width // 2, width // 2, 3, padding="same", groups=width // 2)
        self.x_proj = nn.Linear(width // 2, sum(self.split), bias=False)
        self.dt_proj = nn.Linear(rank, width // 2)
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width // 2, 1))
        self.D = nn.Parameter(torch.ones(width // 2))
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        x, z = self.in_proj(hidden).transpose(1, 2).chunk(2, dim=1)
        x, z = F.silu(self.conv(x)), F.silu(self.conv(z))
        dt, B, C = self.x_proj(x.transpose(1, 2)).split(self.split, dim=-1)
        y = selective_scan_fn(
            x, self.dt_proj(dt).transpose(1, 2), -self.A_log.exp(), B.transpose(1, 2).contiguous(),
            C.transpose(1, 2).contiguous(), self.D, z=None, delta_bias=self.dt_proj.bias, delta_softplus=True,
            return_last_state=None,
        )  # fmt: skip
        return self.out_proj(torch.cat([y, z], dim=1).transpose(1, 2))


class VolumeBlock(nn.Module):
    """A segmentation network's block (U-Mamba): voxels as a sequence through one Mamba-1 mixer, between two norms."""

    def __init__(self, channels: int = 4, states: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.in_proj = nn.Linear(channels, 4 * channels, bias=False)
        self.conv1d = nn.Conv1d(2 * channels, 2 * channels, 4, groups=2 * channels, padding=3)
        self.x_proj = nn.Linear(2 * channels, 1 + 2 * states, bias=False)
        self.dt_proj = nn.Linear(1, 2 * channels)
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(2 * channels, 1))
        self.D = nn.Parameter(torch.ones(2 * channels))
        self.out_proj = nn.Linear(2 * channels, channels, bias=False)
        self.split = [1, states, states]

    def forward(self, volume: Tensor) -> Tensor:
        hidden = self.norm(volume.flatten(2).transpose(1, 2))
        x, z = self.in_proj(hidden).transpose(1, 2).chunk(2, dim=1)
        x = causal_conv1d_fn(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu")
        dt, B, C = self.x_proj(x.transpose(1, 2)).transpose(1, 2).split(self.split, dim=1)
        delta = self.dt_proj.weight @ dt
        y = selective_scan_fn(
            x, delta, -self.A_log.exp(), B, C, self.D, z, self.dt_proj.bias, delta_softplus=True
        )  # fmt: skip
        return self.out_proj(y.transpose(1, 2)).transpose(1, 2).reshape(volume.shape) + volume


CALLERS = {
    "four directions": (FourDirections, (2, 6, 5, 3)),
    "half gated": (HalfGated, (2, 7, 8)),
    "volume": (VolumeBlock, (2, 4, 3, 2, 5)),
}


@pytest.fixture(params=CALLERS)
def caller(request: pytest.FixtureRequest) -> SimpleNamespace:
    torch.manual_seed(0)
    block, shape = CALLERS[request.param]
    return SimpleNamespace(block=block(), input=torch.randn(shape))


def test_outputs_and_gradients_are_those_of_the_formula(caller: SimpleNamespace) -> None:
    precise, point = deepcopy(caller.block).double(), caller.input.double().requires_grad_()
    with use_backend("reference"):
        exact = precise(point)
        exact.square().sum().backward()
    start = caller.input.clone().requires_grad_()
    out = caller.block(start)
    out.square().sum().backward()
    assert relative_error(out, exact) < 1e-5
    assert relative_error(start.grad, point.grad) < 1e-5
    for (name, parameter), wanted in zip(caller.block.named_parameters(), precise.parameters()):
        assert relative_error(parameter.grad, wanted.grad) < 1e-5, name


def test_a_block_trains(caller: SimpleNamespace) -> None:
    target = torch.randn_like(caller.block(caller.input))
    optimizer = torch.optim.Adam(caller.block.parameters(), 1e-2)
    losses = []
    for _ in range(20):
        loss = (caller.block(caller.input) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


def test_bf16_autocast_gives_finite_gradients(caller: SimpleNamespace) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out = caller.block(caller.input)
    out.float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in caller.block.parameters())


def test_copies_and_pickles_compute_the_same(caller: SimpleNamespace) -> None:
    out = caller.block(caller.input)
    assert torch.equal(deepcopy(caller.block)(caller.input), out)
    assert torch.equal(pickle.loads(pickle.dumps(caller.block))(caller.input), out)


def test_checkpointing_changes_no_gradient(caller: SimpleNamespace) -> None:
    from torch.utils.checkpoint import checkpoint

    def gradients(through: bool) -> list[Tensor]:
        block = deepcopy(caller.block)
        out = checkpoint(block, caller.input, use_reentrant=False) if through else block(caller.input)
        out.square().sum().backward()
        return [parameter.grad for parameter in block.parameters()]

    assert all(map(torch.equal, gradients(True), gradients(False)))


def offload(module: nn.Module, inside: bool) -> None:
    """Keep a module's weights away until it runs, as accelerate's hooks do: its own, or those of all modules inside."""
    owners = [part for part in module.modules() if inside or part is module]
    kept = [(part, name, p) for part in owners for name, p in part.named_parameters(recurse=False)]

    def place(device: str) -> None:
        for part, name, parameter in kept:
            value = parameter if device == "cpu" else nn.Parameter(torch.empty_like(parameter, device=device))
            setattr(part, name, value)

    place("meta")
    module.register_forward_pre_hook(lambda *_: place("cpu"))
    module.register_forward_hook(lambda *_: place("meta"))


def test_weights_that_a_hook_of_the_block_loads_are_there() -> None:
    torch.manual_seed(0)
    block, volume = VolumeBlock(), torch.randn(2, 4, 3, 2, 5)
    out = block(volume)
    offload(block, inside=True)
    assert block.conv1d.weight.is_meta
    assert torch.equal(block(volume), out)
    assert block.conv1d.weight.is_meta


def test_a_weight_that_only_its_own_modules_hook_would_load_is_named() -> None:
    """The convolution's module is never called where its weight goes to an operator: upstream's kernels fail there too."""
    block = VolumeBlock()
    offload(block.conv1d, inside=False)
    with pytest.raises(DeviceError, match="weight is on meta") as caught:
        block(torch.randn(2, 4, 3, 2, 5))
    assert "preload_module_classes" in caught.value.next_step


@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 4),
    reason="dynamo of older releases cannot ask a tensor whether it is complex",
)
def test_an_exported_block_computes_the_same(caller: SimpleNamespace) -> None:
    exported = torch.export.export(caller.block, (caller.input,))
    nodes = [node for node in exported.graph.nodes if str(node.target).startswith("anymamba.")]
    assert nodes, "the operators were traced through"
    assert relative_error(exported.module()(caller.input), caller.block(caller.input)) < 1e-6


@pytest.mark.gpu
def test_a_captured_block_replays_forward_and_backward(caller: SimpleNamespace) -> None:
    block, start = caller.block.cuda(), caller.input.cuda().requires_grad_()
    graphed = torch.cuda.make_graphed_callables(deepcopy(block), (start.detach().clone().requires_grad_(),))
    for _ in range(2):
        fresh = torch.randn_like(start)
        results = []
        for module in (block, graphed):
            point = fresh.clone().requires_grad_()
            module.zero_grad()
            out = module(point)
            out.square().sum().backward()
            results.append([out.detach().clone(), point.grad, *(p.grad.clone() for p in module.parameters())])
        for seen, wanted in zip(results[1], results[0]):
            assert relative_error(seen, wanted) < 1e-5


def test_a_final_norm_takes_the_residual_as_text_to_speech_backbones_do() -> None:
    hidden, residual = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    norm = nn.LayerNorm(8)
    out = layer_norm_fn(
        hidden.bfloat16(), norm.weight, norm.bias, residual, eps=norm.eps, residual_in_fp32=True, is_rms_norm=False
    )
    assert out.dtype == torch.bfloat16
    assert relative_error(out, norm(hidden.bfloat16() + residual)) < 5e-3
