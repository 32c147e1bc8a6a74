"""Reading a log: any encoding, any size, bounded memory.

Bytes come as they come: UTF-8, UTF-16 (what `>` writes in Windows PowerShell), GBK (a Chinese cl.exe into a pipe), all mixed
in one file when several programs wrote it; with colour codes, progress bars redrawn by carriage returns, and warnings by the
hundred megabyte. A small log is kept whole. Of a big one only its beginning, its end and the surroundings of lines that
look like trouble are kept, and of lines that differ in numbers only the first. Lines stay bytes until it is known that they
are kept: decoding 200 MB to throw it away was most of the time.
"""

from __future__ import annotations

import codecs
import io
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

__all__ = ["WHOLE", "Log", "decode", "read_log", "unwrapped"]

BLOCK = 4 * 2**20
# Below this a log is kept whole; above it, condensed to about as much.
WHOLE = 2**20
_LONGEST_LINE = 4000
_HEAD, _TAIL = 200, 400
_BEFORE, _AFTER = 12, 4
_MOST_SEEN = 300_000

_COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = dict.fromkeys((*range(9), 11, *range(14, 27), *range(28, 32)), None)
_DIGITS = b"0123456789"
# Words without which no line is trouble. Chinese ones in both encodings.
_WORDS = (
    "rror", "RROR", "xception", "atal", "ailed", "AILED", "No module named", "annot ", "undefined", "illed", "not found",
    "nable to", "not supported", "missing", "not available", "nan", "HINT", "no kernel image", "mismatch", "denied",
    "multiples of 8", "divisible by 8", "still running", "not a symbolic link", "DISTUTILS_USE_SDK", "too long",
    "错误", "不支持", "拒绝访问", "找不到", "无法", "太长", "未声明",
)  # fmt: skip
_TROUBLE = re.compile(
    b"|".join(
        re.escape(raw) for raw in dict.fromkeys(word.encode(code) for word in _WORDS for code in ("utf-8", "gb18030"))
    )
)


@dataclass(frozen=True)
class Log:
    """What was kept of a log. `numbers[i]` is the line number in the original of the i-th kept line."""

    lines: tuple[str, ...]
    numbers: tuple[int, ...]
    total_lines: int
    total_bytes: int

    @property
    def text(self) -> str:
        """All kept lines, joined."""
        return "\n".join(self.lines)


def unwrapped(log: Log) -> Log | None:
    """Return `log` with the lines joined that a console broke at its right edge; None if it shows no such edge.

    PowerShell's redirection does that: many lines then have exactly the same, greatest length.
    """
    width = max(map(len, log.lines), default=0)
    if not 60 <= width <= 300 or sum(len(line) == width for line in log.lines) < 3:
        return None
    lines: list[str] = []
    numbers: list[int] = []
    broken = False
    for line, number in zip(log.lines, log.numbers):
        if broken:
            lines[-1] += line
        else:
            lines.append(line)
            numbers.append(number)
        broken = len(line) == width
    return Log(tuple(lines), tuple(numbers), log.total_lines, log.total_bytes)


def read_log(source: BinaryIO | bytes) -> Log:
    """Read a log.

    Parameters
    ----------
    source : binary file or bytes
        Read once, from where it stands to its end, in blocks.
    """
    counter = _Counted(io.BytesIO(source) if isinstance(source, bytes) else source)
    keeper = _Keeper()
    for piece in _pieces(counter):
        keeper.add(piece)
    return keeper.log(counter.size)


def decode(raw: bytes) -> str:
    """Return the text of bytes in any encoding or mixture; never fails."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(_decode_line(line) for line in raw.splitlines(keepends=True))


def _decode_line(raw: bytes) -> str:
    for encoding in ("utf-8", "gb18030", "cp1252"):
        try:
            return raw.decode(encoding)
        except UnicodeDecodeError:
            continue
    return raw.decode("latin-1")


class _Counted:
    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.size = stream, 0

    def read(self) -> bytes:
        raw = self.stream.read(BLOCK)
        self.size += len(raw)
        return raw


def _pieces(source: _Counted) -> Iterator[bytes]:
    r"""Yield the log in pieces that end at line ends, lines ended by \n alone, UTF-16 turned into UTF-8."""
    first = source.read()
    encoding = _utf16(first)
    if encoding is None:
        blocks = _plain_blocks(first.removeprefix(codecs.BOM_UTF8), source)
    else:
        blocks = _utf16_blocks(first, source, encoding)
    rest = b""
    for block in blocks:
        block = rest + block
        # A carriage return at the very end may be the first half of a line end.
        cut = block.rfind(b"\n") + 1 or (len(block) if len(block) >= 2 * BLOCK else 0)
        rest = block[cut:]
        if cut:
            yield _line_ends(block[:cut])
    if rest:
        yield _line_ends(rest)


def _plain_blocks(first: bytes, source: _Counted) -> Iterator[bytes]:
    block = first
    while block:
        # UTF-16 appended to something else: at least its Latin letters.
        yield block.replace(b"\0", b"") if b"\0" in block else block
        block = source.read()


def _utf16_blocks(first: bytes, source: _Counted, encoding: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    block = first
    while block:
        yield decoder.decode(block).replace("\ufeff", "").encode("utf-8", errors="replace")
        block = source.read()
    yield decoder.decode(b"", final=True).encode("utf-8", errors="replace")


def _utf16(head: bytes) -> str | None:
    if head.startswith(codecs.BOM_UTF16_LE):
        return "utf-16-le"
    if head.startswith(codecs.BOM_UTF16_BE):
        return "utf-16-be"
    sample = head[:2000]
    # Without a mark: mostly Latin letters from the first on, so every second byte is zero.
    if len(sample) >= 8 and sample[:8].count(0) >= 2:
        even, odd = sample[0::2], sample[1::2]
        if odd.count(0) > 0.6 * len(odd) and even.count(0) < 0.1 * len(even):
            return "utf-16-le"
        if even.count(0) > 0.6 * len(even) and odd.count(0) < 0.1 * len(odd):
            return "utf-16-be"
    return None


def _line_ends(raw: bytes) -> bytes:
    return raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in raw else raw


class _Keeper:
    """Keeps everything while it is little, then only what may matter."""

    def __init__(self) -> None:
        self.whole: list[bytes] | None = []
        self.size = 0
        self.count = 0  # of lines seen before the current piece
        self.kept: dict[int, bytes] = {}
        self.budget = WHOLE // 2
        # When the budget is spent on the first half, the newest trouble pushes out older one.
        self.late: deque[tuple[int, bytes]] = deque(maxlen=4000)
        self.tail: deque[tuple[int, bytes]] = deque(maxlen=_TAIL)
        self.seen: set[int] = set()

    def add(self, piece: bytes) -> None:
        if self.whole is not None:
            self.whole.append(piece)
            self.size += len(piece)
            if self.size <= WHOLE:
                return
            piece, self.whole = b"".join(self.whole), None
        self._condense(piece)

    def _condense(self, piece: bytes) -> None:
        lines = piece.split(b"\n")
        if lines[-1] == b"":
            lines.pop()
        start = self.count
        self.count += len(lines)
        for index in range(min(max(0, _HEAD - start), len(lines))):
            self._keep(start + index, lines[index])
        seen, trouble = self.seen, _TROUBLE.search
        for index, line in enumerate(lines):
            # The same complaint a thousand times is one complaint; numbers in it do not make it new.
            mark = hash(line.translate(None, _DIGITS))
            if mark in seen:
                continue
            if len(seen) < _MOST_SEEN:
                seen.add(mark)
            if trouble(line, 0, _LONGEST_LINE):
                for near in range(max(0, index - _BEFORE), min(len(lines), index + _AFTER + 1)):
                    self._keep(start + near, lines[near])
        self.tail.extend(
            (start + index, lines[index][:_LONGEST_LINE]) for index in range(max(0, len(lines) - _TAIL), len(lines))
        )

    def _keep(self, number: int, line: bytes) -> None:
        if number in self.kept:
            return
        line = line[:_LONGEST_LINE]
        if self.budget > 0:
            self.kept[number] = line
            self.budget -= len(line) + 1
        elif len(line) < 500:
            self.late.append((number, line))

    def log(self, total_bytes: int) -> Log:
        if self.whole is not None:
            raw = decode(b"".join(self.whole)).split("\n")
            if raw[-1] == "":
                raw.pop()
            lines, numbers, self.count = raw, list(range(1, len(raw) + 1)), len(raw)
        else:
            everything = {**self.kept, **dict(self.late), **dict(self.tail)}
            order = sorted(everything)
            lines = [_decode_line(everything[number]) for number in order]
            numbers = [number + 1 for number in order]
        return Log(tuple(map(_clean, lines)), tuple(numbers), self.count, total_bytes)


def _clean(line: str) -> str:
    if "\x1b" in line:
        line = _COLOUR.sub("", line)
    return line.translate(_CONTROL)[: 10 * _LONGEST_LINE]
