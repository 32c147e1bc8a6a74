"""The measured rows as a Markdown table, for the README: `python benchmarks/summary.py benchmarks/results/FILE.json ...`.

Times are medians of rounds in milliseconds: kernels alone where a graph was timed, else as an eager caller sees them. The ratio
is ours to upstream's; the floor is the time that a copy of the same bytes takes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any


def lines(document: dict[str, Any]) -> list[str]:
    machine = document["machine"]
    bandwidth = document["copy_bytes_per_second"]
    result = [
        f"{machine['gpu']}, torch {machine['torch']}, driver {machine['driver']}, {machine['date']};"
        f" device copy {bandwidth / 1e12:.2f} TB/s",
        "",
        "| operator | shape | dtype | | ours ms | upstream ms | ratio | of floor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        times = row["graph"] or row["eager"]
        ours, theirs = median(times["anymamba"]), median(times["upstream"]) if "upstream" in times else None
        floor = row["floor_bytes"] / bandwidth * 1e3 / ours
        result.append(
            f"| {row['operator']} | {row['shape']} | {row['dtype']} | {row['direction']}{'' if row['graph'] else ', eager'} |"
            f" {ours:.4f} | {'' if theirs is None else f'{theirs:.4f}'} |"
            f" {'' if theirs is None else f'{ours / theirs:.2f}'} | {floor:.0%} |"
        )
    return result


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print("\n".join(lines(json.loads(Path(name).read_text(encoding="utf-8")))))
