"""Train a small byte-level Mamba-2 language model on Python's own documentation, on one process or on many.

Needs `anymamba install` (upstream's model, as it comes) and NumPy, with which PyTorch writes its checkpoints; the text is in
every Python (`pydoc_data.topics`).

    python examples/train_on_python_docs.py
    torchrun --standalone --nproc-per-node 2 examples/train_on_python_docs.py --parallel ddp
    torchrun --standalone --nproc-per-node 2 examples/train_on_python_docs.py --parallel fsdp2
    torchrun --standalone --nproc-per-node 2 examples/train_on_python_docs.py --parallel context
    python examples/train_on_python_docs.py --plot runs/losses.png          (pip install matplotlib)

Each writes its losses and checkpoints to runs/<parallel>. The batch of a step depends on the step alone, and every way computes
the same function, so the four curves are one. A run that was stopped continues from its last checkpoint when started again,
on any number of ranks; `torchrun --max-restarts 3 ...` does that by itself when a rank dies (try it: --die-once-at 60).
On several machines: `torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 ...`.
On Windows torchrun may want USE_LIBUV=0 in the environment; the backend is gloo there and on CPUs, nccl on Linux with cards.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.rendezvous import rendezvous

from anymamba.distributed import parallelize, shard_sequence

WAYS = ("none", "ddp", "fsdp2", "context")


def main() -> int:
    """Train, or plot what was trained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=WAYS, default="none")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, over all ranks")
    parser.add_argument("--length", type=int, default=256, help="bytes a sequence, over all ranks")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument(
        "--die-once-at", type=int, help="the last rank ends itself at this step, unless the run was continued"
    )
    parser.add_argument("--plot", type=Path, help="draw the losses of all runs in the folder, and train nothing")
    options = parser.parse_args()
    if options.plot is not None:
        return plot(options.folder, options.plot)
    if importlib.util.find_spec("numpy") is None:
        parser.error("PyTorch's distributed checkpoints need NumPy, which is not installed here: pip install numpy")
    device = start()
    try:
        train(options, device)
    finally:
        dist.destroy_process_group()
    return 0


def start() -> torch.device:
    """Join the process group that torchrun describes, or make one of this process alone."""
    cards = torch.cuda.is_available() and dist.is_nccl_available()
    backend = "nccl" if cards else "gloo"
    if "RANK" in os.environ:
        store, rank, size = next(rendezvous("env://"))
        # Started again by torchrun, the ranks meet at the same store (torch 2.13), where the addresses of the dead still are.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        dist.init_process_group(
            backend, store=dist.PrefixStore(f"attempt {attempt}", store), rank=rank, world_size=size
        )
    else:
        store = dist.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)  # Windows has no HashStore
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if not cards:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Run the steps that are not done yet."""
    folder = options.folder / options.parallel
    folder.mkdir(parents=True, exist_ok=True)
    model, run = build(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = restore(folder, model, optimizer)
    from_scratch = not losses
    text = torch.frombuffer(bytearray("\n\n".join(topics.values()).encode()), dtype=torch.uint8)
    for step in range(len(losses), options.steps):
        if step == options.die_once_at and from_scratch and dist.get_rank() == dist.get_world_size() - 1:
            os._exit(1)
        inputs, labels = (part.to(device) for part in share(batch(text, step, options), options.parallel))
        loss = F.cross_entropy(run(inputs).logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # every rank holds as many tokens, so the mean of their means is the mean
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
        if dist.get_rank() == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"{options.parallel}: step {step}, loss {losses[-1]:.4f}", flush=True)
        if (step + 1) % options.save_every == 0 or step == options.steps - 1:
            save(folder, model, optimizer, losses)


def build(options: argparse.Namespace, device: torch.device) -> tuple[Any, Any]:
    """Return the model, the same on every rank, and what to call in its place."""
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    torch.manual_seed(0)
    layer = {"layer": "Mamba2", "d_state": 32, "headdim": 32, "chunk_size": 64}
    config = MambaConfig(d_model=options.width, n_layer=options.layers, vocab_size=256, ssm_cfg=layer)
    model = MambaLMHeadModel(config, device=device)
    if options.parallel == "context":
        parallelize(model)
    if options.parallel == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in model.backbone.layers:
            fully_shard(block, mesh=mesh)
        return model, fully_shard(model, mesh=mesh)
    if options.parallel in ("ddp", "context"):
        return model, torch.nn.parallel.DistributedDataParallel(model)
    return model, model


def batch(text: torch.Tensor, step: int, options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and labels of a step, (batch, length) each: the same on every rank and in every run."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - options.length - 1, (options.batch,), generator=generator)
    tokens = torch.stack([text[start : start + options.length + 1] for start in starts]).long()
    return tokens[:, :-1], tokens[:, 1:]  # shifted here: a rank's last label is the next rank's first input


def share(whole: tuple[torch.Tensor, torch.Tensor], parallel: str) -> list[torch.Tensor]:
    """Return this rank's part: of each sequence (context), else of the batch."""
    dim = 1 if parallel == "context" else 0
    if whole[0].shape[dim] % dist.get_world_size():
        raise SystemExit(f"the ranks must divide the {'length' if dim else 'batch'}, {whole[0].shape[dim]}, evenly")
    return [shard_sequence(tensor, dim=dim).contiguous() for tensor in whole]


def save(folder: Path, model: Any, optimizer: Any, losses: list[float]) -> None:
    """Write a checkpoint and then, at one blow, the note that it is the last."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=str(folder / f"step-{len(losses)}"))
    if dist.get_rank() == 0:
        note = folder / "losses.json.new"
        note.write_text(json.dumps(losses), encoding="utf-8")
        os.replace(note, folder / "losses.json")  # noqa: PTH105 - over an existing file, on Windows too
    dist.barrier()


def restore(folder: Path, model: Any, optimizer: Any) -> list[float]:
    """Load the last checkpoint, if there is one; return the losses up to it."""
    note = folder / "losses.json"
    if not note.is_file():
        return []
    losses: list[float] = json.loads(note.read_text(encoding="utf-8"))
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=str(folder / f"step-{len(losses)}"))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if dist.get_rank() == 0:
        print(f"continuing after step {len(losses) - 1}", flush=True)
    return losses


def plot(folder: Path, file: Path) -> int:
    """Draw the loss curves of all runs into one picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    runs = [way for way in WAYS if (folder / way / "losses.json").is_file()]
    for index, way in enumerate(runs):
        losses = json.loads((folder / way / "losses.json").read_text(encoding="utf-8"))
        # they lie on each other: wide ones below, narrow ones above
        axes.plot(losses, label={"none": "one process"}.get(way, way), linewidth=1 + 2.5 * (len(runs) - 1 - index))
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a byte")
    axes.set_title("Byte-level Mamba-2 on Python's documentation")
    axes.legend()
    figure.savefig(file, dpi=120)
    print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
