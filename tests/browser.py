"""A real headless browser looks at a page of ours, in both themes, as wide as a phone and as a desk.

The page is shown in frames of a probe page; a script of the probe measures it there. Nothing of the page itself runs.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

__all__ = ["BROWSER", "look", "needs_browser", "photograph"]

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome", "msedge"))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium, Chrome or Edge on this machine")
WIDTHS = (360, 1200)
THEMES = {"light": "1", "dark": "0"}

_PROBE = """<!doctype html><body><script>
  async function look(width) {
    const frame = document.createElement('iframe'); frame.src = 'page.html'; frame.width = width; frame.height = 800;
    const ready = new Promise(done => frame.onload = done); document.body.append(frame); await ready;
    const page = frame.contentDocument, root = page.documentElement, style = frame.contentWindow.getComputedStyle;
    // an element whose own box leaves the page, unless it lies in a box that scrolls by itself
    const inScroller = e => { for (; e && e !== page.body; e = e.parentElement)
      if (['auto', 'scroll'].includes(style(e).overflowX)) return true; return false; };
    const outside = [...page.body.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > width + 1
      && !inScroller(e)).map(e => e.tagName);
    const luminance = rgb => { const [r, g, b] = rgb.match(/\\d+/g).map(v => { v /= 255;
      return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; }); return .2126 * r + .7152 * g + .0722 * b; };
    const contrast = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
      return (x + .05) / (y + .05); };
    const ground = style(page.body).backgroundColor;
    const texts = [...page.querySelectorAll('h1, h2, p, li, td, th, dt, dd, pre, summary')].map(e => style(e).color);
    return {width, wide: root.scrollWidth <= width, outside, rows: page.querySelectorAll('tbody tr').length,
            charts: [...page.querySelectorAll('svg')].map(svg => svg.getBoundingClientRect().height),
            small: Math.min(...[...page.querySelectorAll('p, td, li, dd, pre')].map(e => parseFloat(style(e).fontSize))),
            contrast: Math.min(...texts.map(color => contrast(color, ground))), ground};
  }
  (async () => { document.title = 'seen ' + JSON.stringify([await look(360), await look(1200)]); })();
</script>"""


def look(page: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what a browser sees of `page`, by theme: a phone's view and a desk's."""
    (folder / "page.html").write_text(page, encoding="utf-8")
    (folder / "probe.html").write_text(_PROBE, encoding="utf-8")
    seen = {}
    for theme in THEMES:
        done = _browse(
            folder, theme, "--virtual-time-budget=8000", "--allow-file-access-from-files", "--dump-dom",
            (folder / "probe.html").as_uri(),
        )  # fmt: skip
        title = re.search(r"<title>seen (.*?)</title>", done.stdout)
        assert title is not None, done.stdout[-1000:] + done.stderr[-1000:]
        seen[theme] = json.loads(title[1])
    return seen


def readable(seen: dict[str, list[dict[str, Any]]]) -> None:
    """Require what every page of ours must have: no sideways scrolling, text large enough and told from its ground."""
    for frames in seen.values():
        for frame in frames:
            assert frame["wide"], f"the page is wider than {frame['width']}"
            assert frame["outside"] == []
            assert frame["contrast"] >= 4.5  # WCAG's AA
            assert frame["small"] >= 13
    assert {frames[0]["ground"] for frames in seen.values()} == {"rgb(255, 255, 255)", "rgb(20, 22, 26)"}


def photograph(page: str, folder: Path, theme: str, width: int, height: int, to: Path) -> None:
    """Write a picture of the page, to look at; a phone's is a frame, for windows have a least width."""
    (folder / "page.html").write_text(page, encoding="utf-8")
    frame = (
        f'<!doctype html><body style="margin:0"><iframe src="page.html" width={width} height={height} style="border:0">'
    )
    (folder / "photo.html").write_text(frame, encoding="utf-8")
    _browse(
        folder, theme, f"--window-size={max(width, 500)},{height}", f"--screenshot={to}", "--hide-scrollbars",
        (folder / "photo.html").as_uri(),
    )  # fmt: skip
    assert to.is_file()


def _browse(folder: Path, theme: str, *flags: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    return subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
         f"--blink-settings=preferredColorScheme={THEMES[theme]}", *flags],
        capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=120, check=False,
    )  # fmt: skip
