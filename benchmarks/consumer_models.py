"""transformers' own models on the port, its fast path beside its slow path, in one process: forward, training, generation.

    python benchmarks/consumer_models.py [--device cuda --dtype bfloat16] [--only Mamba2] [--output FILE]

Needs an environment with transformers and a port in it (`pip install transformers`, `anymamba install`). Random weights, random
tokens; each of transformers' models with Mamba layers, at one width and number of layers. Both paths are transformers' own text
(tests/consumers/transformers_paths.py tells how each is taken): the fast path is what it does where it finds mamba_ssm and
causal_conv1d, the slow path what it does where it finds neither. Interleaved rounds, medians. About two minutes on two cores.

No test: times are for people to read.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402

from anymamba import __version__  # noqa: E402
from anymamba.machine.system import processor_name  # noqa: E402
from consumers.small_models import MODELS, draw_model  # noqa: E402
from consumers.transformers_paths import import_models, slow_path, take_fast_path  # noqa: E402

SCHEMA = "anymamba-consumers/1"
SIZES = {  # width, layers, batch, length, prompt, new tokens
    "cpu": (256, 2, 1, 128, 32, 32),
    "cuda": (1024, 4, 2, 512, 64, 32),
}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(SIZES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--only", choices=list(MODELS), action="append", help="only this model (again for another)")
    parser.add_argument("--rounds", type=int, default=9, help="at most this many rounds of the fast path (default 9)")
    parser.add_argument("--seconds", type=float, default=1.0, help="about this long a path and pass (default 1)")
    parser.add_argument(
        "--processor-time", action="store_true",
        help="on one thread of a CPU, by its processor time: for a machine that others use meanwhile",
    )  # fmt: skip
    parser.add_argument("--output", metavar="FILE", type=Path)
    options = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity_error()
    if options.processor_time:
        torch.set_num_threads(1)
    started = time.perf_counter()
    width, layers, batch, length, prompt, new = SIZES[options.device]
    rows: list[dict[str, Any]] = []
    about = {
        "schema": SCHEMA,
        "anymamba": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": options.device,
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else processor_name(),
        "threads": torch.get_num_threads(),
        "dtype": options.dtype,
        "clock": "processor time" if options.processor_time else "wall",
        "date": time.strftime("%Y-%m-%d"),
        "width": width, "layers": layers, "batch": batch, "length": length, "prompt": prompt, "new_tokens": new,
        "rows": rows,
    }  # fmt: skip
    output = options.output or ROOT / "benchmarks" / "results" / f"consumers-{options.device}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    for name in import_models():
        if options.only and name not in options.only:
            continue
        try:
            rows.append(measure(name, options))
        except Exception as error:  # one model that cannot run must not cost the others' figures
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            rows.append({"model": name, "error": f"{type(error).__name__}: {str(error)[:200]}"})
        print(show(rows[-1]), flush=True)
        output.write_text(
            json.dumps(about, indent=1) + "\n", encoding="utf-8", newline="\n"
        )  # a run that is ended keeps it
    print(f"written: {output} ({time.perf_counter() - started:.0f} s)")
    return 0


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return one model's times in milliseconds by pass and path, and on a card the peak memory of training."""
    width, layers, batch, length, prompt, new = SIZES[options.device]
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    with torch.device(device):
        model = draw_model(name, **sizes(name, width, layers))
    model = take_fast_path(model.to(device, dtype))
    tokens = torch.randint(3, 512, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)

    def forward() -> None:
        model.eval()
        with torch.no_grad():
            model(input_ids=tokens, use_cache=False)

    def train() -> None:
        model.train()
        model.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    def generate() -> None:
        model.eval()
        model.generate(
            input_ids=tokens[:, :prompt], attention_mask=torch.ones_like(tokens[:, :prompt]), max_new_tokens=new,
            min_new_tokens=new, do_sample=False,
        )  # fmt: skip

    row: dict[str, Any] = {"model": name, "milliseconds": {}, "parameters": sum(p.numel() for p in model.parameters())}
    for what, call in (("forward", forward), ("forward + backward", train), ("generate", generate)):
        times: dict[str, list[float]] = {"fast": [], "slow": []}
        spent = dict.fromkeys(times, 0.0)
        with path_of(model, "fast")():
            once(call, options)  # compiles what is compiled at first use
        if device.type == "cuda":
            with path_of(model, "slow")():
                once(call, options)
        for _ in range(options.rounds):
            for path, taken in times.items():
                if taken and spent[path] > options.seconds:
                    continue
                with path_of(model, path)():
                    if device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                    taken.append(round(once(call, options), 4))
                    if device.type == "cuda" and call is train:
                        peak = round(torch.cuda.max_memory_allocated() / 2**20, 1)
                        row.setdefault("peak_mb", {})[path] = peak
                spent[path] += taken[-1] / 1e3
        row["milliseconds"][what] = times
    row["tokens_per_s"] = {
        path: round(batch * new / median(taken) * 1e3, 1) for path, taken in row["milliseconds"]["generate"].items()
    }
    return row


def path_of(model: Any, path: str) -> Callable[[], Any]:
    return nullcontext if path == "fast" else lambda: slow_path(model)


def once(call: Callable[[], None], options: argparse.Namespace) -> float:
    clock = time.process_time if options.processor_time else time.perf_counter
    if options.device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    call()
    if options.device == "cuda":
        torch.cuda.synchronize()
    return (clock() - start) * 1e3


def sizes(name: str, width: int, layers: int) -> dict[str, Any]:
    """Return the configuration of this model at this width: the block of Mamba's papers, one layer of attention if any."""
    heads, chunk = 2 * width // 64, 256
    common: dict[str, Any] = {"hidden_size": width, "vocab_size": 512, "num_hidden_layers": layers}
    common |= {"initializer_range": 0.02}
    wide = {"intermediate_size": 2 * width, "num_attention_heads": 8, "num_key_value_heads": 4}
    second = {
        "mamba_n_heads": heads, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_chunk_size": chunk,
    }  # fmt: skip
    mixed = ["mamba"] * (layers - 1) + ["attention"]
    return common | {
        "Mamba": {"state_size": 16, "time_step_rank": width // 16},
        "FalconMamba": {"state_size": 16, "time_step_rank": width // 16},
        "Mamba2": {"state_size": 64, "num_heads": heads, "head_dim": 64, "n_groups": 1, "chunk_size": chunk},
        "Jamba": {
            **wide, "attn_layer_period": layers, "attn_layer_offset": layers - 1, "mamba_d_state": 16,
            "mamba_dt_rank": width // 16, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2,
        },
        "Zamba": {
            **wide, "num_key_value_heads": 8, "attention_head_dim": width // 4, "num_hidden_layers": layers + 1,
            "mamba_d_state": 16, "mamba_dt_rank": width // 16,
            "layers_block_type": ["linear_attention"] * (layers - 1) + ["hybrid", "hybrid"],
        },
        "Zamba2": {
            "intermediate_size": 2 * width, "num_attention_heads": 8, "mamba_d_state": 64, "n_mamba_heads": heads,
            "mamba_headdim": 64, "chunk_size": chunk, "layers_block_type": ["mamba"] * (layers - 1) + ["hybrid"],
        },
        "Bamba": {**wide, **second, "attn_layer_indices": [layers - 1]},
        "FalconH1": {**wide, **second, "head_dim": width // 8, "mamba_d_ssm": 2 * width},
        "GraniteMoeHybrid": {**wide, **second, "shared_intermediate_size": 2 * width, "layer_types": mixed},
        "NemotronH": {
            **wide, "layers_block_type": mixed, "head_dim": width // 8, "mamba_num_heads": heads, "mamba_head_dim": 64,
            "ssm_state_size": 64, "chunk_size": chunk,
        },
    }[name]  # fmt: skip


def show(row: dict[str, Any]) -> str:
    """Return a line for people."""
    if "error" in row:
        return f"{row['model']}: {row['error']}"
    parts = [
        f"{what} {median(times['fast']):.1f} / {median(times['slow']):.1f} ms"
        for what, times in row["milliseconds"].items()
    ]
    return f"{row['model']} ({row['parameters'] / 1e6:.1f} M): " + ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
