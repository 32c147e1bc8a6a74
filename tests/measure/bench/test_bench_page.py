"""The page of `anymamba bench`: one file, no network, both themes, readable on a phone; looked at by a real browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from anymamba.measure.bench.page import page
from anymamba.measure.bench.results import Result, Row
from browser import look, needs_browser, readable


def row(implementation: str, length: int, rounds: tuple[float, ...], **changed: object) -> Row:
    given: dict[str, object] = {
        "subject": "Mamba block", "size": f"B2 L{length} d32", "batch": 2, "length": length, "width": 32,
        "direction": "forward", "dtype": "float32", "implementation": implementation, "windows": "yes",
        "status": "measured", "rounds_ms": rounds, "peak_mb": 3.5, "tokens_per_s": 1000.0, "copy_share": 0.1,
        "floor_ms": 0.2, "error": 1e-7, "bound": 1e-5,
    }  # fmt: skip
    return Row(**{**given, **changed})  # type: ignore[arg-type]


RESULT = Result(
    (
        row("torch", 64, (2.0, 2.2)), row("mamba.py", 64, (5.0, 5.5)),
        row("torch", 128, (4.0, 4.2)), row("mamba.py", 128, (9.0, 9.5)),
        row("<b>evil</b> & co", 128, (), status="failed", message="<script>alert(1)</script>", peak_mb=None),
    ),
    {"system": "Linux", "processor": "a processor with a very long name indeed, as processors have", "date": "today"},
    {"torch": "2.13.0"},
    "counted",
    ("the machine is busy",),
    {"cuda": "no card"},
)  # fmt: skip


class Reader(HTMLParser):
    """Collects tags and attributes; void elements aside, every opened tag must be closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)


def test_the_page_needs_nothing_from_anywhere_and_runs_nothing() -> None:
    text = page(RESULT)
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert "script" not in reader.tags
    assert reader.links == ["data:,"]
    assert not re.search(r"url\(|@import|https?://", text)


def test_the_floor_is_drawn_also_where_the_first_row_was_not_measured() -> None:
    skipped = row("torch", 64, (), status="skipped", floor_ms=None, peak_mb=None)
    assert page(Result((skipped, row("mamba.py", 64, (5.0, 5.5))))).count('class="floor"') == 1


def test_what_comes_from_outside_cannot_become_markup() -> None:
    assert "&lt;b&gt;evil&lt;/b&gt; &amp; co" in page(RESULT)
    assert "<script" not in page(RESULT)


def test_there_are_bars_for_each_work_and_lines_where_lengths_differ() -> None:
    text = page(RESULT)
    assert text.count('aria-label="time"') == 2
    assert text.count('aria-label="peak memory"') == 2
    assert text.count("<polyline") == 3  # two implementations and the floor
    assert "Time over length" not in page(Result(RESULT.rows[:2]))


@needs_browser
def test_a_browser_shows_it_in_both_themes_without_sideways_scrolling_on_a_phone(tmp_path: Path) -> None:
    seen = look(page(RESULT), tmp_path)
    readable(seen)
    for frames in seen.values():
        for frame in frames:
            assert frame["rows"] == len(RESULT.rows)
            assert all(height > 40 for height in frame["charts"])
            assert len(frame["charts"]) == page(RESULT).count("<svg")
