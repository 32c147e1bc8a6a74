"""The page of `anymamba bench`: one file, no network, both themes, readable on a phone; looked at by a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from anymamba.measure.bench.page import page
from anymamba.measure.bench.results import Result, Row

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome", "msedge"))), None
)


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


def test_what_comes_from_outside_cannot_become_markup() -> None:
    assert "&lt;b&gt;evil&lt;/b&gt; &amp; co" in page(RESULT)
    assert "<script" not in page(RESULT)


def test_there_are_bars_for_each_work_and_lines_where_lengths_differ() -> None:
    text = page(RESULT)
    assert text.count('aria-label="time"') == 2
    assert text.count('aria-label="peak memory"') == 2
    assert text.count("<polyline") == 3  # two implementations and the floor
    assert "Time over length" not in page(Result(RESULT.rows[:2]))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium, Chrome or Edge on this machine")
def test_a_browser_shows_it_in_both_themes_without_sideways_scrolling_on_a_phone(tmp_path: Path) -> None:
    """The page in frames as wide as a phone and a desk, in both themes; a script of the test's own measures it."""
    (tmp_path / "page.html").write_text(page(RESULT), encoding="utf-8")
    probe = """<!doctype html><body><script>
      async function look(width) {
        const frame = document.createElement('iframe'); frame.src = 'page.html'; frame.width = width; frame.height = 800;
        const ready = new Promise(done => frame.onload = done); document.body.append(frame); await ready;
        const page = frame.contentDocument, root = page.documentElement, style = frame.contentWindow.getComputedStyle;
        return {wide: root.scrollWidth <= width, rows: page.querySelectorAll('tbody tr').length,
                charts: [...page.querySelectorAll('svg')].every(svg => svg.getBoundingClientRect().height > 40),
                text: style(page.body).color, ground: style(page.body).backgroundColor};
      }
      (async () => { document.title = 'seen ' + JSON.stringify([await look(360), await look(1200)]); })();
    </script>"""
    (tmp_path / "probe.html").write_text(probe, encoding="utf-8")
    grounds = set()
    for dark in (False, True):
        assert BROWSER is not None
        flags = ["--blink-settings=preferredColorScheme=" + ("0" if dark else "1")]
        done = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", *flags,
             f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=8000", "--dump-dom",
             (tmp_path / "probe.html").as_uri()],
            capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=120, check=False,
        )  # fmt: skip
        title = re.search(r"<title>seen (.*?)</title>", done.stdout)
        assert title is not None, done.stdout[-1000:] + done.stderr[-1000:]
        seen = __import__("json").loads(title[1])
        for frame in seen:
            assert frame["wide"], "the page is wider than its window"
            assert frame["rows"] == len(RESULT.rows)
            assert frame["charts"]
            assert frame["text"] != frame["ground"]
        grounds.add(seen[0]["ground"])
    assert grounds == {"rgb(255, 255, 255)", "rgb(20, 22, 26)"}
