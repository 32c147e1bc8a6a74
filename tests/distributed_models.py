"""Training of upstream's models in every way that PyTorch distributes one; a spawned process can import these by name."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from anymamba.backends import use_backend
from anymamba.distributed import context_parallel, gather_sequence, parallelize, shard_sequence

__all__ = ["evaluate_packed", "language_model", "train", "train_in_stages", "train_on_a_mesh", "train_tensor_parallel"]

VOCABULARY = 48


def language_model(port: str, layer: str, tie: bool = True) -> Any:
    """Build upstream's small language model, the same in every process."""
    if port not in sys.path:
        sys.path.insert(0, port)
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    sizes = {"headdim": 8, "d_state": 8, "chunk_size": 16} if layer == "Mamba2" else {"d_state": 4}
    config = MambaConfig(
        d_model=16, n_layer=2, vocab_size=VOCABULARY, ssm_cfg={"layer": layer, **sizes}, rms_norm=True,
        fused_add_norm=True, pad_vocab_size_multiple=8, tie_embeddings=tie,
    )  # fmt: skip
    torch.manual_seed(0)
    return MambaLMHeadModel(config)


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, VOCABULARY, (4, 25), generator=generator) for _ in range(steps)]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn]


def train(group: Any, port: str, layer: str, how: str, steps: int = 3) -> list[float]:
    """Train a few steps and return the losses over the whole batch.

    how: words of "single", "ddp", "fsdp", "checkpoint", "compile", "autocast", "untied", "cp" (the sequence is split, not the
    batch), and "any backend" (the first that can; else PyTorch's, which needs no compiling).
    """
    words = set(how.split())
    model = language_model(port, layer, tie="untied" not in words)
    whole = model
    if "cp" in words:
        parallelize(model, group, check="always")
    if "checkpoint" in words:
        for block in model.backbone.layers:
            block.forward = _checkpointed(block.forward)
    if "fsdp" in words:
        model = _fully_sharded(model, group)
    elif "ddp" in words:
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    run = torch.compile(model, backend="aot_eager") if "compile" in words else model
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    losses = []
    with contextlib.nullcontext() if "any" in words else use_backend("torch"):
        for inputs, labels in batches(steps):
            if "single" not in words:
                dim = 1 if "cp" in words else 0
                inputs, labels = (shard_sequence(tensor, group, dim=dim) for tensor in (inputs, labels))
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in words):
                logits = run(inputs.contiguous()).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            if "single" not in words:
                dist.all_reduce(total, group=group)
                total /= dist.get_world_size(group)
            losses.append(float(total))
    return losses


def train_on_a_mesh(group: Any, port: str, layer: str, steps: int = 3) -> list[float]:
    """Train on all four ranks as two by two: the batch split over one dimension of the mesh, the sequence over the other."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    whole = parallelize(language_model(port, layer), mesh["cp"])
    model = torch.nn.parallel.DistributedDataParallel(whole, process_group=group)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    losses = []
    with use_backend("torch"):
        for pair in batches(steps):
            inputs, labels = (
                shard_sequence(shard_sequence(tensor, mesh["dp"], dim=0), mesh["cp"]).contiguous() for tensor in pair
            )
            loss = F.cross_entropy(model(inputs).logits.flatten(0, 1), labels.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total, group=group)
            losses.append(float(total) / 4)
    return losses


class _Stage(torch.nn.Module):
    """One half of a language model: the embedding and the first layer, or the second layer and the head."""

    def __init__(self, model: Any, first: bool) -> None:
        super().__init__()
        backbone = model.backbone
        self.first = first
        self.layer = backbone.layers[0 if first else 1]
        self.ends = torch.nn.ModuleList([backbone.embedding] if first else [backbone.norm_f, model.lm_head])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            hidden, residual = self.layer(self.ends[0](x), None)
            return torch.stack([hidden, residual])
        hidden, residual = self.layer(x[0], x[1])
        norm, head = self.ends
        return head(norm(hidden + residual))


def train_in_stages(group: Any, port: str, layer: str, steps: int = 3) -> list[float]:
    """Train with the two layers on two ranks as the stages of a pipeline, four micro-batches each; losses on the last."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank(group)
    model = language_model(port, layer, tie=False)
    part = _Stage(model, first=rank == 0)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"), group=group)

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.01)
    losses = []
    with use_backend("torch"):
        for inputs, labels in batches(steps):
            found: list[torch.Tensor] = []
            if rank == 0:
                schedule.step(inputs.contiguous())
            else:
                schedule.step(target=labels.contiguous(), losses=found)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(torch.stack(found).mean()) if found else 0.0)
    return losses


def _checkpointed(forward: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    def twice(*arguments: Any, **options: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, **options)

    return twice


def _fully_sharded(model: Any, group: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.backbone.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def evaluate_packed(group: Any, port: str, layer: str, seq_idx: torch.Tensor | None, sharded: bool) -> torch.Tensor:
    """Return the logits of a batch without gradients, packed if told so."""
    model = language_model(port, layer).eval()
    inputs = batches(1)[0][0]
    packing = {} if seq_idx is None else {"seq_idx": seq_idx.expand(len(inputs), -1).contiguous()}
    with torch.no_grad(), use_backend("torch"):
        if not sharded:
            return model(inputs, **packing).logits
        parts = {key: shard_sequence(tensor, group).contiguous() for key, tensor in packing.items()}
        with context_parallel(group):
            logits = model(shard_sequence(inputs, group), **parts).logits
        return gather_sequence(logits, group)


def train_tensor_parallel(group: Any, port: str, sequence_parallel: bool, steps: int = 3) -> tuple[list[float], Any]:
    """Train Mamba2 layers split over the group's ranks by upstream's own parallel layers, and the same layers whole."""
    if port not in sys.path:
        sys.path.insert(0, port)
    from mamba_ssm import Mamba2
    from mamba_ssm.distributed.distributed_utils import all_gather, reduce_scatter

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sizes = {"d_model": 16, "headdim": 4, "d_state": 8, "ngroups": 2, "chunk_size": 16}
    torch.manual_seed(0)
    whole = torch.nn.ModuleList(Mamba2(**sizes) for _ in range(2))
    split = torch.nn.ModuleList(
        Mamba2(**sizes, process_group=group, sequence_parallel=sequence_parallel) for _ in range(2)
    )
    for one, part in zip(whole, split):
        _take_share(one, part, rank, size)
    losses: list[tuple[float, float]] = []
    optimizers = [torch.optim.SGD(layers.parameters(), lr=0.1) for layers in (whole, split)]
    generator = torch.Generator().manual_seed(2)
    with use_backend("torch"):
        for _ in range(steps):
            x, target = torch.randn(2, 2, 12, 16, generator=generator)
            found = []
            for layers, optimizer in zip((whole, split), optimizers):
                y = x
                if layers is split and sequence_parallel:
                    y = y.reshape(-1, 16).chunk(size)[rank]
                    for layer in layers:
                        y = y + layer(y, seqlen=12)
                    y = all_gather(y, group).view(x.shape)
                else:
                    for layer in layers:
                        y = y + layer(y)
                loss = F.mse_loss(y, target)
                # every rank computes the whole loss after the gather, whose backward adds the ranks' gradients up
                (loss / size if layers is split and sequence_parallel else loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(float(loss.detach()))
            losses.append((found[0], found[1]))
    assert reduce_scatter is not None
    return [a for a, _ in losses], [b for _, b in losses]


def _take_share(whole: Any, part: Any, rank: int, size: int) -> None:
    """Copy the rank's rows or columns of a whole Mamba2's weights into its part of the layer."""
    inner, states, heads = whole.d_inner, whole.ngroups * whole.d_state, whole.nheads

    def share(tensor: torch.Tensor, sections: list[int]) -> torch.Tensor:
        return torch.cat([section.chunk(size)[rank] for section in tensor.split(sections)])

    with torch.no_grad():
        part.in_proj.weight.copy_(share(whole.in_proj.weight, [inner, inner, states, states, heads]))
        part.conv1d.weight.copy_(share(whole.conv1d.weight, [inner, states, states]))
        part.conv1d.bias.copy_(share(whole.conv1d.bias, [inner, states, states]))
        for name in ("dt_bias", "A_log", "D"):
            getattr(part, name).copy_(getattr(whole, name).chunk(size)[rank])
        part.norm.weight.copy_(whole.norm.weight.chunk(size)[rank])
        part.out_proj.weight.copy_(whole.out_proj.weight.chunk(size, dim=1)[rank])
