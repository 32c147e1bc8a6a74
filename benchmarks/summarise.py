"""Put the measured figures into the READMEs and documents: `python benchmarks/summarise.py [--check]`.

Reads the JSON files in `benchmarks/results/` (written by gpu.py, cpu_reference.py, consumer_models.py, tools.upstream_tests and
tools.windows_lab) and rewrites what stands between the two `results` markers. No figure in the READMEs comes from elsewhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- results -->\n", "<!-- /results -->"
WORDS: dict[str, dict[str, str]] = {
    "README.md": {
        "gpu": "### Speed on a GPU",
        "gpu about": "{gpu}, PyTorch {torch}, {date}; bf16; milliseconds, median of interleaved rounds in one process, beside "
        "upstream's own compiled extension or Triton kernels; kernels alone (a replayed CUDA graph) where that was timed, else an "
        "eager call. The JSON files in benchmarks/results hold every row, fp16 and fp32 and eager too. Below 1: faster, or less memory. Norms and gates at 1: both run as fast as "
        "a copy of as many bytes. Above 1 in Mamba-2's block: measured before its norms and gates had CUDA kernels. `python benchmarks/gpu.py --upstream DIR`",
        "gpu head": "| operator | size | pass | anymamba | upstream | time ratio | memory ratio |",
        "cpu": "### Speed on a CPU",
        "cpu about": "{processor}, PyTorch {torch}, {threads} threads, {date}; float32; milliseconds, median of interleaved rounds in one process. "
        "Upstream: the loop that its own packages run without a GPU (for Mamba blocks: around its own reference functions). mamba.py: mambapy {mamba_py}; "
        "transformers {transformers}: its PyTorch path. In brackets: times faster than upstream's loop, or than the faster of the peers where that has none. "
        "Memory: peak MB of PyTorch's allocator in one call. Projections alone: the block's matrix products and nothing else. `python benchmarks/cpu.py --upstream DIR`",
        "cpu head": "| operator | size | pass | upstream | mamba.py | transformers | torch backend | cpu backend | memory: cpu backend | upstream | best peer |",
        "cpu after": "Times faster on all threads than on one: {scaling}. First call of a process, with nothing compiled yet and later: {first}.",
        "guide": "### The guide's table",
        "guide about": "{where}, PyTorch {torch}, {date}; {size}, {dtype}: a Mamba block by every implementation on the machine, each checked against the float64 "
        "reference before it was timed. Milliseconds, median of {rounds} interleaved rounds. `anymamba bench --preset guide`{note}",
        "guide head": "| implementation | pass | ms | spread | memory MB | tokens/s | Windows |",
        "tests": "### Upstream's own tests",
        "tests about": "Run unchanged through the port by `python -m tools.upstream_tests CHECKOUT`, but for the adaptations that it "
        "prints (device, sizes that take a CPU hours).",
        "tests head": "| package | device | passed | failed | skip themselves | missed ([why](docs/trust.md#upstreams-own-tests)) |",
        "windows": "### The same tests on Linux and in Windows Python",
        "windows about": "Windows Python under wine: `python -m tools.windows_lab test`. [docs/windows.md](docs/windows.md) lists the skips.",
        "windows head": "| | passed | failed | skipped |",
    },
    "README.zh-CN.md": {
        "gpu": "### GPU 上的速度",
        "gpu about": "{gpu}，PyTorch {torch}，{date}；bf16；单位毫秒，同一进程内交替测量取中位数，与上游自己的编译扩展或 Triton 内核并列；有 CUDA graph 重放计时的取纯内核时间，否则为 eager 调用。benchmarks/results 中的 JSON 含全部行（fp16、fp32、eager）。"
        "比值小于 1 表示更快或更省显存。归一化与门控接近 1 之处：双方都已达到复制同样字节数的速度。Mamba-2 模块大于 1 之处：测量早于其归一化与门控的 CUDA 内核。`python benchmarks/gpu.py --upstream DIR`",
        "gpu head": "| 算子 | 规模 | 阶段 | anymamba | 上游 | 时间比 | 显存比 |",
        "cpu": "### CPU 上的速度",
        "cpu about": "{processor}，PyTorch {torch}，{threads} 线程，{date}；float32；单位毫秒，同一进程内交替测量取中位数。上游：其软件包在没有 GPU 时运行的循环"
        "（Mamba 块：围绕其参考函数）。mamba.py：mambapy {mamba_py}；transformers {transformers}：其 PyTorch 路径。括号内：比上游循环快的倍数；无上游循环时与较快的同类相比。"
        "内存：一次调用中 PyTorch 分配器的峰值（MB）。Projections alone：仅该块的矩阵乘法。`python benchmarks/cpu.py --upstream DIR`",
        "cpu head": "| 算子 | 规模 | 阶段 | 上游 | mamba.py | transformers | torch 后端 | cpu 后端 | 内存：cpu 后端 | 上游 | 最佳同类 |",
        "cpu after": "全部线程相对单线程的加速：{scaling}。进程首次调用（无编译缓存时，及之后）：{first}。",
        "guide": "### 指南中的表格",
        "guide about": "{where}，PyTorch {torch}，{date}；{size}，{dtype}：本机上每种实现各跑一个 Mamba 块，计时之前先与 float64 参考核对。单位毫秒，{rounds} 轮交替测量取中位数。`anymamba bench --preset guide`{note}",
        "guide head": "| 实现 | 阶段 | 毫秒 | 波动 | 内存 MB | token/s | Windows |",
        "tests": "### 上游自己的测试",
        "tests about": "通过移植包原样运行（`python -m tools.upstream_tests CHECKOUT`），仅做该命令打印出的调整（设备、CPU 上需数小时的规模）。",
        "tests head": "| 软件包 | 设备 | 通过 | 失败 | 自行跳过 | 未过者（[原因](docs/trust.md#upstreams-own-tests)） |",
        "windows": "### 同样的测试：Linux 与 Windows 版 Python",
        "windows about": "Windows 版 Python 在 wine 下运行：`python -m tools.windows_lab test`。跳过的测试列在 [docs/windows.md](docs/windows.md)。",
        "windows head": "| | 通过 | 失败 | 跳过 |",
    },
}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a README is out of date")
    options = parser.parse_args()
    stale = []
    texts = {name: "\n".join(summary(words)) for name, words in WORDS.items()}
    texts["docs/windows.md"] = "\n".join(skips())
    texts["docs/consumers.md"] = "\n".join(consumers())
    texts["docs/native.md"] = "\n".join(native())
    for name, text in texts.items():
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        head, _, rest = before.partition(BEGIN)
        _, _, tail = rest.partition(END)
        after = head + BEGIN + text + "\n" + END + tail
        if after != before:
            stale.append(name)
            if not options.check:
                path.write_text(after, encoding="utf-8", newline="\n")
    if stale:
        print(("out of date: " if options.check else "written: ") + ", ".join(stale))
    return 1 if stale and options.check else 0


def summary(words: dict[str, str]) -> Iterator[str]:
    """Yield the lines between the markers."""
    for kind, rows in (("tests", test_rows), ("windows", windows_rows), ("gpu", gpu_rows), ("cpu", cpu_rows)):
        files = sorted(RESULTS.glob(f"{kind}.json" if kind != "gpu" else "h200-*.json"))
        if not files:
            continue
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in files]
        data = {**parts[0], "rows": [row for part in parts for row in part.get("rows", [])]}
        head = words[f"{kind} head"]
        yield from ("", words[kind], "", words[f"{kind} about"].format(**about(data)), "", head)
        yield "|" + "---|" * (head.count("|") - 1)
        yield from rows(data)
        if f"{kind} after" in words:
            yield from ("", words[f"{kind} after"].format(**about(data)))
    yield from guide(words)


def guide(words: dict[str, str]) -> Iterator[str]:
    """Yield a table for each result of `anymamba bench --preset guide --json`, guide-*.json."""
    for number, path in enumerate(sorted(RESULTS.glob("guide-*.json"))):
        data = json.loads(path.read_text(encoding="utf-8"))
        rows, machine = data["rows"], data["machine"]
        note = f" ({'; '.join(data['notes'])})" if data["notes"] else ""
        yield from ("",) if number else ("", words["guide"], "")
        yield words["guide about"].format(
            where=machine.get("gpu") or machine["processor"], torch=data["versions"]["torch"], date=machine["date"][:10],
            size=rows[0]["size"], dtype=rows[0]["dtype"], rounds=max(len(row["rounds_ms"]) for row in rows), note=note,
        )  # fmt: skip
        yield from ("", words["guide head"], "|" + "---|" * (words["guide head"].count("|") - 1))
        for row in rows:
            if row["status"] == "refused":
                continue
            cells = [row["message"] or row["status"], "-", "-", "-"]
            if row["rounds_ms"]:
                middle = median(row["rounds_ms"])
                spread = (max(row["rounds_ms"]) - min(row["rounds_ms"])) / middle
                peak = row["peak_mb"]
                cells = [
                    f"{middle:.4g}", f"{spread:.0%}", "-" if peak is None else f"{peak:.1f}", f"{row['tokens_per_s']:,.0f}"
                ]  # fmt: skip
            kind = "fwd+bwd" if "+" in row["direction"] else "fwd"
            yield f"| {row['implementation']} | {kind} | {' | '.join(cells)} | {row['windows']} |"


def about(data: Any) -> dict[str, Any]:
    """Return what the texts quote of a result file's head."""
    if not isinstance(data, dict):
        return {}
    peers = data.get("peers", {})
    short = {"forward": "fwd", "forward + backward": "fwd+bwd"}
    return {
        **data.get("machine", {}),
        **data,
        "mamba_py": peers.get("mamba.py", "-"),
        "transformers": peers.get("transformers", "-"),
        "scaling": ", ".join(
            f"{row['operator']} {row['size']} {short[row['pass']]} {row['ratio']:.2f}x"
            for row in data.get("scaling", [])
        ),
        "first": ", ".join(
            f"{row['operator']} {row['cold_s']:.1f} s, {row['warm_s']:.2f} s" for row in data.get("first_call", [])
        ),
    }


def gpu_rows(data: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each row measured beside upstream."""
    for row in data["rows"]:
        times = row["graph"] or row["eager"]
        ours, theirs = times.get("anymamba"), times.get("upstream")
        if not ours or not theirs or row["dtype"] != "bfloat16":
            continue
        memory = row["peak_mb"]
        saved = f"{memory['anymamba'] / memory['upstream']:.2f}" if len(memory) == 2 and memory["upstream"] else "-"
        yield (
            f"| {row['operator']} | {row['shape']} | {row['direction']} | {median(ours):.3f} | {median(theirs):.3f} | {median(ours) / median(theirs):.2f} | {saved} |"
        )


PEERS = ("mamba.py", "transformers")


def cpu_rows(data: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each row, and one for the matrix products of a block."""
    for row in data["rows"]:
        times, memory = row["milliseconds"], row.get("peak_mb", {})
        base = times.get("upstream") or times.get("loop") or min((times[p] for p in PEERS if p in times), default=None)
        cells = [f"{base:.2f}" if base and ("upstream" in times or "loop" in times) else "-"]
        cells += [f"{times[peer]:.2f}" if peer in times else "-" for peer in PEERS]
        for backend in ("torch", "cpu"):
            value = times.get(backend)
            cells.append("-" if value is None else f"{value:.2f} ({base / value:.1f}x)" if base else f"{value:.2f}")
        of_peers = [memory[peer] for peer in PEERS if peer in memory]
        for peak in (memory.get("cpu"), memory.get("upstream", memory.get("loop")), min(of_peers, default=None)):
            cells.append("-" if peak is None else f"{peak:.1f}")
        kind = "fwd+bwd" if "+" in row["pass"] else "fwd"
        yield f"| {row['operator']} | {row['size']} | {kind} | {' | '.join(cells)} |"
        alone = times.get("projections alone")
        if alone:
            yield f"| {row['operator']}: projections alone | {row['size']} | {kind} | {alone:.2f} | | | | | | | |"


def test_rows(data: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each run of upstream's tests."""
    for run in data["runs"]:
        missed = ", ".join(f"`{name}`" for name in run.get("missed", []))
        yield f"| {run['package']} | {run['device']} | {run['passed']} | {run['failed']} | {run['skipped']} | {missed} |"


def windows_rows(data: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each Python."""
    for run in data["runs"]:
        yield f"| {run['python']} | {run['passed']} | {run['failed']} | {run['skipped']} |"


def native() -> Iterator[str]:
    """Yield what was built on a card's machine, and how far each release came there."""
    data = json.loads((RESULTS / "native-h200.json").read_text(encoding="utf-8"))
    machine = data["machine"]
    yield (
        f"{machine['card']}, {machine['cores']} cores, nvcc {machine['nvcc']}, gcc {machine['gcc']}, torch {machine['torch']}, "
        f"Python {machine['python']}; {data['date']}; `{data['command']}`, {data['how']}."
    )
    yield from ("", "| release | built | installed and proved | upstream's own tests |", "|---|---|---|---|")
    for one in data["builds"]:
        built = f"{one['seconds']} s, beside {one['beside']}" if one["built"] else f"no: {one['why_not']}"
        if one.get("peak_gib"):
            built += f"; {one['peak_gib']} GiB at most"
        proved = "-" if not one["built"] else "yes" if one["proved"] else f"no: {one['why_not']}"
        if one.get("proof"):
            proved += f": {one['proof']}"
        tests = one["upstream_tests"]
        counts = (
            f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skip themselves"
            if tests
            else "not run"
        )
        yield f"| {one['package']} {one['version']} | {built} | {proved} | {counts} |"
    unit, one, many = (
        data["one_unit"][key] for key in ("unit", "one_architecture", "nine_architectures_of_the_newest_setup_py")
    )
    yield ""
    yield (
        f"One architecture against upstream's own list, on {unit}: {one['seconds']} s for 9.0 alone, {many['seconds']} s "
        f"({many['seconds'] / one['seconds']:.1f} times as long, {many['bytes'] / one['bytes']:.1f} times the bytes) for the nine that the "
        "newest setup.py lists for CUDA 13 (the list of 1.4.0 and 2.2.2 begins with sm_53, which nvcc 13 refuses)."
    )


def skips() -> Iterator[str]:
    """Yield the lines of docs/windows.md that tell what the recorded runs came to, what they left out, and a capture."""
    path = RESULTS / "windows.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"runs": []}
    runs = record["runs"]
    if runs:
        yield from ("", f"{record['date']}, commit {record['commit']}: `{record['command']}`.", "")
        yield from ("| | " + " | ".join(run["python"] for run in runs) + " |", "|---" * (len(runs) + 1) + "|")
        for row in ("passed", "failed", "skipped", "seconds"):
            yield f"| {row} | {' | '.join(str(run[row]) for run in runs)} |"
        reasons = sorted({reason for run in runs for reason in run["skips"]}, key=str.lower)
        yield from (
            "",
            "| skipped because | " + " | ".join(run["python"] for run in runs) + " |",
            "|---" * (len(runs) + 1) + "|",
        )
        for reason in reasons:
            cells = [str(run["skips"].get(reason, "")) for run in runs]
            yield f"| {reason.replace('|', '/')} | {' | '.join(cells)} |"
    capture = RESULTS / "windows-install.txt"
    if capture.is_file():
        yield from ("", "## What a console shows", "", "Written by `python -m tools.windows_lab capture`:", "")
        yield from ("```text", *capture.read_text(encoding="utf-8").splitlines(), "```")


def consumers() -> Iterator[str]:
    """Yield the lines of docs/consumers.md that tell how fast transformers' models are on the port."""
    for path in sorted(RESULTS.glob("consumers-*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        how = "" if data["device"] == "cuda" else f", threads: {data['threads']}"
        how += "" if data["clock"] == "wall" else ", processor time"
        yield from (
            "",
            f"{data['machine']}{how}, PyTorch {data['torch']}, "
            f"transformers {data['transformers']}, {data['date']}; {data['dtype']}; width {data['width']}, {data['layers']} layers, "
            f"batch {data['batch']}, {data['length']} tokens; generation: {data['new_tokens']} tokens after {data['prompt']}, with the cache.",
            "",
            "| model | forward, ms: fast path | slow path | | forward + backward, ms: fast path | slow path | | tokens/s: fast path | slow path | |",
            "|---|---|---|---|---|---|---|---|---|---|",
        )
        for row in data["rows"]:
            if "error" in row:
                yield f"| {row['model']} | {row['error']} | | | | | | | | |"
                continue
            cells = []
            for what in ("forward", "forward + backward"):
                fast, slow = (median(row["milliseconds"][what][path]) for path in ("fast", "slow"))
                cells += [f"{fast:.1f}", f"{slow:.1f}", f"{slow / fast:.1f}x"]
            fast, slow = (row["tokens_per_s"][path] for path in ("fast", "slow"))
            cells += [f"{fast:.0f}", f"{slow:.0f}", f"{fast / slow:.1f}x"]
            yield f"| {row['model']} | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
