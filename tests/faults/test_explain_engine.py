"""The engine: first cause before its consequences, honest about the unknown, unharmed by any bytes."""

from __future__ import annotations

import io
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anymamba.faults import Outcome, brief, explain
from anymamba.faults.reading import WHOLE, decode, read_log, unwrapped

CAUSE = "csrc\\causal_conv1d.cpp(159): error C2146: 语法错误: 缺少“)”(在标识符“and”的前面)\r\n"
MISSING = "ModuleNotFoundError: No module named 'selective_scan_cuda'\n"
ABI = "ImportError: /x/selective_scan_cuda.cpython-310-x86_64-linux-gnu.so: undefined symbol: _ZN3c105ErrorC2E\n"
SWALLOWED = "AttributeError: 'NoneType' object has no attribute 'causal_conv1d_fwd'\n"


@pytest.mark.parametrize(
    "raw",
    [
        CAUSE.encode("utf-8"),
        b"\xef\xbb\xbf" + CAUSE.encode("utf-8"),
        CAUSE.encode("gbk"),
        b"\xff\xfe" + CAUSE.encode("utf-16-le"),
        b"\xfe\xff" + CAUSE.encode("utf-16-be"),
        CAUSE.encode("utf-16-le"),
        ("构建开始\r\n" * 3).encode("utf-8") + CAUSE.encode("gbk"),
        b"plain\r\n" + "error C2146: x 'and'\r\n".encode("utf-16-le"),
        b"\x1b[31m" + CAUSE.encode("utf-8") + b"\x1b[0m",
        b"  5%|#    |\r 10%|##   |\r" + CAUSE.encode("utf-8"),
    ],
)
def test_every_encoding_is_read(raw: bytes) -> None:
    cause = explain(raw).cause
    assert cause is not None
    assert cause.fault.id == "alternative-operators"


def test_the_root_comes_before_what_follows_from_it_wherever_they_stand() -> None:
    for text in (ABI + "x\n" * 20 + SWALLOWED, SWALLOWED + "x\n" * 20 + ABI):
        explanation = explain(text)
        assert [one.fault.id for one in explanation.findings] == ["abi-mismatch"]
        assert explanation.findings[0].consequences == ("swallowed-import",)


def test_of_independent_causes_the_first_in_the_log_leads() -> None:
    first = explain("KeyError: 'HOME'\n" + "x\n" * 9 + MISSING)
    assert [one.fault.id for one in first.findings] == ["home-missing", "extension-missing"]
    assert first.findings[0].line == 1
    assert [one.fault.id for one in explain(MISSING + "x\n" * 9 + "KeyError: 'HOME'\n").findings] == [
        "extension-missing",
        "home-missing",
    ]


def test_what_may_be_harmless_never_leads_before_a_sure_cause() -> None:
    found = explain("step 3 loss: nan\n" + "x\n" * 9 + MISSING).findings
    assert [one.fault.id for one in found] == ["extension-missing", "nan"]


def test_a_harmless_warning_is_no_answer_to_an_error_that_nothing_explains() -> None:
    explanation = explain("The fast path is not available because x is None\nValueError: bad config\n" + "\n" * 9)
    assert explanation.outcome is Outcome.EXPLAINED or explanation.unexplained
    far = explain("The fast path is not available because x is None\n" + "ok\n" * 9 + "ValueError: bad config\n")
    assert far.outcome is Outcome.UNKNOWN
    assert far.unexplained[0][1] == "ValueError: bad config"


def test_an_earlier_error_that_nothing_explains_is_owned_up_to() -> None:
    explanation = explain("ValueError: bad config\n" + "ok\n" * 9 + MISSING)
    assert explanation.outcome is Outcome.EXPLAINED
    assert explanation.unexplained == ((1, "ValueError: bad config"),)


def test_captures_fill_the_texts() -> None:
    cause = explain(MISSING).cause
    assert cause is not None
    assert "selective_scan_cuda" in cause.title("en")
    assert "selective_scan_cuda" in cause.title("zh")
    assert "{" not in cause.title("en")


def test_fixes_are_those_of_the_system() -> None:
    cause = explain("g++: fatal error: Killed signal terminated program cc1plus\n").cause
    assert cause is not None
    assert [run for run, _ in cause.fixes("windows")] == ["set MAX_JOBS=1", "anymamba install"]
    assert [run for run, _ in cause.fixes("linux")] == ["export MAX_JOBS=1", "anymamba install"]


@pytest.mark.parametrize(
    ("text", "system"),
    [
        ("C:\\build\\a.cpp(1): error C2146: x", "windows"),
        ("FileNotFoundError: [WinError 2] x", "windows"),
        ("/usr/bin/ld: cannot find -lcuda", "linux"),
        ("/home/li/envs/m/lib/x.so: undefined symbol: y", "linux"),
        ("/sbin/ldconfig.real: /usr/lib/wsl/lib/libcuda.so.1 is not a symbolic link", "wsl"),
        ("Initializing libomp.dylib", "mac"),
        ("KeyError: 'HOME'", None),
    ],
)
def test_a_log_shows_the_system_it_is_from(text: str, system: str | None) -> None:
    assert explain(text).system == system


def test_in_brief_a_cause_is_three_lines_and_a_guess_is_none() -> None:
    known = brief("nvcc fatal   : Unsupported gpu architecture 'compute_53'\n", system="windows")
    assert known is not None
    assert known.id == "arch-unsupported"
    assert "compute_53" in known.what
    assert known.next_step == "anymamba install"
    assert brief("step 1 loss: nan\n") is None
    assert brief("ValueError: bad config\n") is None


def test_lines_broken_by_a_console_are_joined_and_keep_the_number_of_their_first_part() -> None:
    log = read_log(b"a" * 80 + b"\n" + b"b" * 80 + b"\nend\n" + b"c" * 80 + b"\nend\nshort\n")
    joined = unwrapped(log)
    assert joined is not None
    assert joined.lines == ("a" * 80 + "b" * 80 + "end", "c" * 80 + "end", "short")
    assert joined.numbers == (1, 4, 6)
    assert unwrapped(read_log(b"one\ntwo\n")) is None


def big_log(size: int, needle: str) -> bytes:
    noise = (
        b"C:/m/csrc/a.cuh(499): warning C4068: unknown pragma 'unroll', kept for the other compilers of this file\r\n"
    )
    count = size // len(noise)
    return noise * (count // 2) + needle.encode("utf-8") + noise * (count // 2)


def test_a_big_log_is_condensed_and_its_cause_still_found() -> None:
    raw = big_log(8 * WHOLE, CAUSE)
    log = read_log(io.BytesIO(raw))
    assert len(log.text) < 2 * WHOLE
    assert log.total_bytes == len(raw)
    assert log.total_lines == raw.count(b"\n")
    explanation = explain(raw)
    assert explanation.cause is not None
    assert explanation.cause.fault.id == "alternative-operators"
    assert explanation.cause.line == raw[: raw.index(b"C2146")].count(b"\n") + 1


def test_memory_stays_bounded_on_a_big_log() -> None:
    raw = big_log(24 * WHOLE, MISSING)
    tracemalloc.start()
    try:
        explain(io.BytesIO(raw))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20  # a few blocks of 4 MiB as bytes and text; not the log


def test_thousands_of_different_errors_are_survived() -> None:
    raw = b"".join(b"error C%04d: thing %d went wrong in module m%d\n" % (i % 9999, i, i) for i in range(60_000))
    assert explain(raw + MISSING.encode()).outcome is Outcome.EXPLAINED or len(raw) > WHOLE


@given(st.binary(max_size=4000))
def test_any_bytes_are_survived(raw: bytes) -> None:
    explanation = explain(raw)
    assert explanation.log.total_bytes == len(raw)
    decode(raw)


@given(
    st.lists(
        st.tuples(st.text(max_size=40), st.sampled_from(["utf-8", "utf-16-le", "utf-16-be", "gb18030", "cp1252"])),
        max_size=8,
    )
)
def test_mixed_encodings_never_crash_it_nor_hide_an_ascii_cause_at_the_end(parts: list[tuple[str, str]]) -> None:
    raw = b"".join(text.encode(encoding, errors="replace") for text, encoding in parts)
    found = explain(b"start of the log\n" * 80 + raw + b"\n" + MISSING.encode())
    assert any(one.fault.id == "extension-missing" for one in found.findings)
