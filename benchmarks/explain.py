"""How well and how fast does `anymamba explain` answer?

    python benchmarks/explain.py
    python benchmarks/explain.py --megabytes 200

Answers: the single messages of `explain_messages.toml` (the kinds that people report in public) and all logs of
`tests/faults/logs`. Recall: how many logs with a known cause got it; precision: how many answers were right. The logs were
written together with the catalogue, so their figures say that nothing was broken, not how a stranger's log fares.
Speed: big logs of several shapes, best of three.

No test: times are for people to read.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from anymamba.faults import Outcome, catalogue, explain

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
MISSING = b"ModuleNotFoundError: No module named 'selective_scan_cuda'\r\n"


def answer(raw: bytes | str) -> str:
    """Return the id of the cause, or unknown, or clean."""
    explanation = explain(raw)
    if explanation.outcome is Outcome.EXPLAINED and explanation.cause is not None:
        return explanation.cause.fault.id
    return explanation.outcome.value


def messages() -> Iterator[tuple[str, str]]:
    """Yield (right answer, given answer) for single messages."""
    table = tomllib.loads((HERE / "explain_messages.toml").read_text(encoding="utf-8"))
    for message in table["message"]:
        yield message["answer"], answer(message["text"] + "\n")


def logs() -> Iterator[tuple[str, str]]:
    """Yield (right answer, given answer) for whole logs."""
    for path in sorted((HERE.parent / "tests" / "faults" / "logs").rglob("*.log")):
        yield path.parent.name, answer(path.read_bytes())


def report(name: str, pairs: list[tuple[str, str]]) -> None:
    """Print recall and precision."""
    nothing = ("unknown", "clean")
    known = [pair for pair in pairs if pair[0] not in nothing]
    given = [pair for pair in pairs if pair[1] not in nothing]
    recall = sum(right == got for right, got in known)
    precision = sum(right == got for right, got in given)
    print(f"{name:10} recall {recall}/{len(known)}   precision {precision}/{len(given)}   of {len(pairs)}")
    for right, got in pairs:
        if right != got:
            print(f"           {right} was answered with {got}")


def big_logs(size: int) -> Iterator[tuple[str, bytes]]:
    """Yield logs of about `size` bytes with the cause in a bad place."""
    same = b"C:/m/csrc/a.cuh(499): warning C4068: unknown pragma 'unroll', kept for the other compilers\r\n"
    half = same * (size // len(same) // 2)
    yield "one warning over and over", half + MISSING + half
    line = b'a.cu(%d): error: identifier "x%d" is undefined, failed to find it, cannot go on\r\n'
    different = b"".join(line % (number, number) for number in range(size // 90))
    yield "different errors, cause last", different + MISSING
    yield "no line end at all", b"x" * size
    chinese = "C:/m/a.cu(1): warning C4819: 该文件包含不能在当前代码页(936)中表示的字符\r\n".encode("gbk")
    yield "GBK", chinese * (size // len(chinese)) + MISSING
    wide = "C:/m/a.cu(1): warning C4068: unknown\r\n".encode("utf-16-le")
    yield "UTF-16", b"\xff\xfe" + wide * (size // len(wide)) + MISSING.decode().encode("utf-16-le")


def main() -> None:
    """Print the answers' figures and the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200)
    arguments = parser.parse_args()
    print(f"{len(catalogue())} entries")
    report("messages", list(messages()))
    report("logs", list(logs()))
    for name, raw in big_logs(arguments.megabytes * 2**20):
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            got = answer_stream(raw)
            best = min(best, time.perf_counter() - start)
        print(f"{name:30} {len(raw) / 2**20:5.0f} MB  {best:5.2f} s  {got}")


def answer_stream(raw: bytes) -> str:
    """Answer from a file, not from memory."""
    explanation = explain(io.BytesIO(raw))
    return explanation.cause.fault.id if explanation.cause else explanation.outcome.value


if __name__ == "__main__":
    main()
