"""The product's whole test-suite in a Windows Python, from the working tree as it is."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.windows_lab import checkout, junit, runner
from tools.windows_lab.layout import REPOSITORY, Layout
from tools.windows_lab.product import environment
from tools.windows_lab.say import say
from tools.windows_lab.wine import Wine, windows_path

_ENDED = re.compile(r"\[ *\d+%\]")  # with which pytest -v ends a test's line


@dataclass(frozen=True)
class Result:
    """One run of the suite: its counts, or None when the interpreter died before it could write them."""

    counts: junit.Counts | None
    outcome: runner.Outcome
    log: Path

    @property
    def ok(self) -> bool:
        return self.outcome.ok and self.counts is not None and self.counts.ok


def run(
    found: Wine,
    version: str,
    arguments: Sequence[str],
    *,
    timeout: float,
    verbose: bool = False,
    by_dev: bool = False,
    repository: Path = REPOSITORY,
) -> Result:
    """Run pytest in a Windows Python and read what it found; `by_dev`: as `dev.py test --bare` on a copy does."""
    layout = found.layout
    limited = any(word.startswith("--minutes") for word in arguments)
    log, xml = _files(layout, version + ("-dev" if by_dev else "") + ("-part" if limited else ""))
    if by_dev:
        words = ["test", "--bare", *_pytest(windows_path(xml))[2:], *arguments]
        with _Progress(f"Windows {version}", log, verbose) as progress:
            outcome = checkout.dev(found, version, words, timeout=timeout, repository=repository, on_text=progress)
        return Result(junit.read(xml) if xml.exists() else None, outcome, log)
    command = found.command(layout.python(version) / "python.exe", *_pytest(windows_path(xml)), *arguments)
    progress = _Progress(f"Windows {version}", log, verbose)
    with progress:
        outcome = runner.run(
            command,
            environment=environment(found, version, repository),
            cwd=repository,
            timeout=timeout,
            on_text=progress,
        )
    return Result(junit.read(xml) if xml.exists() else None, outcome, log)


def run_here(layout: Layout, arguments: Sequence[str], *, timeout: float, verbose: bool = False) -> Result:
    """Run the same suite in this Python on this machine, for the table's first column."""
    log, xml = _files(layout, "linux")
    progress = _Progress("Linux", log, verbose)
    with progress:
        outcome = runner.run(
            [sys.executable, *_pytest(str(xml)), *arguments],
            environment={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
            cwd=REPOSITORY,
            timeout=timeout,
            on_text=progress,
        )
    return Result(junit.read(xml) if xml.exists() else None, outcome, log)


def _files(layout: Layout, name: str) -> tuple[Path, Path]:
    layout.results.mkdir(parents=True, exist_ok=True)
    log, xml = layout.results / f"{name}.log", layout.results / f"{name}.xml"
    xml.unlink(missing_ok=True)
    return log, xml


def _pytest(xml: str) -> list[str]:
    # faulthandler's limit names the test that hangs; the cache plugin would write into the working tree.
    options = ["-p", "no:cacheprovider", "-o", "faulthandler_timeout=240", "-o", "junit_family=xunit2"]
    return ["-m", "pytest", "-v", "--durations=15", "--color=no", f"--junitxml={xml}", *options]


class _Progress:
    """Keeps the whole log in a file, and says now and then how far the run is."""

    def __init__(self, name: str, log: Path, verbose: bool) -> None:
        self._name, self._path, self._verbose = name, log, verbose
        self._last = time.monotonic()

    def __enter__(self) -> _Progress:
        self._log = self._path.open("w", encoding="utf-8")
        say(f"{self._name}: running the suite; log in {self._path}")
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()

    def __call__(self, text: str) -> None:
        if self._log.closed:
            return
        self._log.write(text)
        self._log.flush()
        if self._verbose:
            sys.stdout.write(text)
            sys.stdout.flush()
        elif time.monotonic() - self._last > 30:
            self._last = time.monotonic()
            ended = len(_ENDED.findall(self._path.read_text(encoding="utf-8")))  # whole: words come in pieces
            say(f"{self._name}: {ended} tests so far")


def complaints(results: Mapping[str, Result | None]) -> list[str]:
    """One line or more for everything that went wrong; empty when nothing did."""
    lines: list[str] = []
    for name, result in results.items():
        if result is None or result.ok:
            continue
        if result.outcome.timed_out:
            lines.append(f"{name}: stopped after {result.outcome.seconds:.0f} s; see {result.log}")
        if result.counts is None:
            tail = "\n".join(result.outcome.output.splitlines()[-30:])
            lines.append(f"{name}: the interpreter ended with {result.outcome.returncode} and wrote no result:\n{tail}")
        else:
            lines += [f"{name}: FAILED {test}" for test in result.counts.bad]
            if result.counts.passed == 0:
                lines.append(f"{name}: no test passed; see {result.log}")
    return lines


def clean(layout: Layout, keep_downloads: bool) -> None:
    """Remove the laboratory; with `keep_downloads` the wheels stay, and the next setup needs no network."""
    for folder in (layout.prefix, layout.stamps, layout.results, layout.nvrtc):
        shutil.rmtree(folder, ignore_errors=True)
    if not keep_downloads:
        shutil.rmtree(layout.root, ignore_errors=True)
