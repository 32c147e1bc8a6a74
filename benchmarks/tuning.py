"""What tuning brings, in other processes: `python benchmarks/tuning.py --seconds 60 --output FILE`.

Tunes for the calls of tuned_shapes.py in one process. Then fresh processes measure the same calls, in turn with what was kept
and without (ANYMAMBA_TUNED=0); the figures are theirs, not those that the search chose by.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
SHAPES = ROOT / "benchmarks" / "tuned_shapes.py"
TURNS = ("0", "1")  # of ANYMAMBA_TUNED


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for the search")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--measure", action="store_true", help="only measure, in this process; prints JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure()))
        return 0
    search = [
        sys.executable,
        "-m",
        "anymamba",
        "tune",
        "--record",
        str(SHAPES),
        "--seconds",
        str(options.seconds),
        "--json",
    ]
    found = json.loads(_run(search))["found"]
    seen: list[dict[str, Any]] = [json.loads(_run([sys.executable, __file__, "--measure"], tuned)) for tuned in TURNS]
    rows = []
    for one in found:
        name = f"{one['kernel']} | {one['shape']}"
        usual = [run["ms"][name] for run, tuned in zip(seen, TURNS) if tuned == "0"]
        with_tuned = [run["ms"][name] for run, tuned in zip(seen, TURNS) if tuned == "1"]
        rows.append({**one, "fresh_usual_ms": usual, "fresh_tuned_ms": with_tuned})
        print(
            f"{one['kernel']:32} {one['size']:18} {one['dtype']:9} {min(usual):9.4f} {min(with_tuned):9.4f}"
            f" {min(with_tuned) / min(usual):6.2f}  {one['tried']}+{one['pruned']}/{one['offered']} {one['parameters']}"
        )
    if options.output:
        text = json.dumps({"machine": seen[0]["machine"], "seconds": options.seconds, "tuning": rows}, indent=1)
        options.output.write_text(text + "\n", encoding="utf-8", newline="\n")
    return 0


def measure() -> dict[str, Any]:
    """Return the milliseconds of each call, kernels alone, by the place of its parameters."""
    import torch

    from anymamba.measure.bench.timing import calls_a_round, replays, stopwatch
    from anymamba.measure.tune.shapes import record
    from anymamba.measure.tune.works import tasks

    found = {}
    for task in tasks(record(SHAPES)):
        call = task.call.ready()
        watch = replays if task.call.device.type == "cuda" else stopwatch(task.call.device)
        with torch.no_grad():
            count = calls_a_round(watch(call, 1))
            times = [watch(call, count) for _ in range(7)]
        found[f"{task.place.kernel} | {task.place.shape}"] = round(median(times) * 1e3, 5)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"ms": found, "machine": {"gpu": card, "torch": torch.__version__, "date": date.today().isoformat()}}


def _run(command: list[str], tuned: str = "1") -> str:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "ANYMAMBA_TUNED": tuned, "PYTHONPATH": path}
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8", check=True
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
