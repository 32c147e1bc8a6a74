"""From a log to its cause.

1. Every symptom of the catalogue is looked for in what was kept of the log.
2. A finding whose fault is listed as a consequence (`after`) of another finding steps behind it.
3. What is left is ranked: sure and likely causes before possible ones, then the first in the log: what broke first is the
   cause, and the last line is the place where somebody gave up.
4. Errors in the log that nothing explains are counted honestly: a log with such an error and no cause is "unknown".
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, BinaryIO

from anymamba.faults.catalogue import Fault, Fix, catalogue
from anymamba.faults.reading import Log, read_log, unwrapped

__all__ = ["SCHEMA", "Explanation", "Finding", "Outcome", "explain", "explain_log"]

SCHEMA = "anymamba-explain/1"


class Outcome(str, Enum):
    """How an explanation ends."""

    EXPLAINED = "explained"
    UNKNOWN = "unknown"  # there is an error, and no entry of the catalogue fits
    CLEAN = "clean"  # no error was seen


@dataclass(frozen=True)
class Finding:
    """A fault seen in the log: where, and the words that gave it away."""

    fault: Fault
    line: int
    quote: str
    captures: dict[str, str]
    consequences: tuple[str, ...] = ()  # ids of faults in the same log that follow from this one

    def title(self, language: str) -> str:
        """Return what it is, in `language`."""
        return _fill(self.fault.title[language], self.captures)

    def cause(self, language: str) -> str:
        """Return why, in `language`."""
        return _fill(self.fault.cause[language], self.captures)

    def fixes(self, system: str) -> list[tuple[str, Fix]]:
        """Return the fixes for a system ("windows", "linux", "mac", "wsl"), each with its command filled in."""
        return [(_fill(fix.run, self.captures), fix) for fix in self.fault.fixes if not fix.on or system in fix.on]


@dataclass(frozen=True)
class Explanation:
    """The answer: the causes, the likeliest first; and the first error that none of them explains."""

    outcome: Outcome
    findings: tuple[Finding, ...]
    unexplained: tuple[tuple[int, str], ...] = ()  # line number and text of the first errors that nothing explains
    log: Log = field(repr=False, default_factory=lambda: Log((), (), 0, 0))

    @property
    def cause(self) -> Finding | None:
        """The likeliest cause, or None."""
        return self.findings[0] if self.findings else None

    @property
    def system(self) -> str | None:
        """The system that the log comes from (windows, mac, wsl, linux), None when it does not show.

        Logs travel: who explains one is often not who has the fault, and the cures are those of the machine it is from.
        """
        text = self.log.text[:200_000]
        for system, pattern in _SYSTEMS:
            if pattern.search(text):
                return system
        return None

    def to_json(self, language: str, system: str) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "schema": SCHEMA,
            "system": system,
            "outcome": self.outcome.value,
            "findings": [
                {
                    "id": finding.fault.id,
                    "where": list(finding.fault.where),
                    "sure": finding.fault.sure,
                    "line": finding.line,
                    "quote": finding.quote,
                    "title": finding.title(language),
                    "cause": finding.cause(language),
                    "fixes": [{"run": run, "text": fix.text[language]} for run, fix in finding.fixes(system)],
                    "consequences": list(finding.consequences),
                    "seen": list(finding.fault.seen),
                }
                for finding in self.findings
            ],
            "unexplained": [{"line": line, "text": text} for line, text in self.unexplained],
            "lines": self.log.total_lines,
            "bytes": self.log.total_bytes,
        }


def explain(source: BinaryIO | bytes | str, *, faults: Sequence[Fault] | None = None) -> Explanation:
    """Explain a log.

    Parameters
    ----------
    source : binary file, bytes or str
        The log. Bytes may be in any encoding.
    faults : sequence of Fault, optional
        Look for these instead of the whole catalogue.
    """
    raw = source.encode("utf-8", errors="replace") if isinstance(source, str) else source
    return explain_log(read_log(raw), faults=faults)


def explain_log(log: Log, *, faults: Sequence[Fault] | None = None) -> Explanation:
    """Explain a log that was read already."""
    known = catalogue() if faults is None else faults
    matches = _matches(log, known)
    if not any(one.fault.sure != "possible" and not one.fault.wrapper for one in matches):
        joined = unwrapped(log)
        if joined is not None:
            log, matches = joined, _matches(joined, known)
    wrappers = [one for one in matches if one.fault.wrapper]
    causes = _ranked([one for one in matches if not one.fault.wrapper])
    explained = {line for one in matches for line in range(one.line - 2, one.line + 3)}
    hollow = [symptom.pattern for one in wrappers for symptom in one.fault.symptoms]
    errors = [
        (line, text)
        for line, text in _errors(log)
        if line not in explained and not any(pattern.search(text) for pattern in hollow)
    ]
    certain = [one for one in causes if one.fault.sure != "possible"]
    if certain:
        first = min(one.line for one in certain)
        unexplained = tuple(error for error in errors if error[0] < first)[:3]
        return Explanation(Outcome.EXPLAINED, tuple(causes), unexplained, log)
    # What may be harmless is an answer only where nothing else went wrong.
    if errors or (wrappers and not causes):
        return Explanation(Outcome.UNKNOWN, tuple(causes), tuple(errors[:3]), log)
    return Explanation(Outcome.EXPLAINED if causes else Outcome.CLEAN, tuple(causes), (), log)


def _matches(log: Log, faults: Sequence[Fault]) -> list[Finding]:
    text = log.text
    starts = [0]
    for line in log.lines:
        starts.append(starts[-1] + len(line) + 1)
    found = []
    for fault in faults:
        best: tuple[int, int, re.Match[str]] | None = None
        for symptom in fault.symptoms:
            if symptom.needs and symptom.needs not in text:
                continue
            match = symptom.pattern.search(text)
            if match is not None and (best is None or match.start() < best[0]):
                best = (match.start(), match.end(), match)
        if best is None:
            continue
        # A pattern may begin lines before the telling one; quote the line where it ends.
        index = bisect.bisect_right(starts, max(best[0], best[1] - 1)) - 1
        index = min(index, len(log.lines) - 1)
        captures = {name: value for name, value in best[2].groupdict().items() if value is not None}
        found.append(Finding(fault, log.numbers[index], log.lines[index].strip()[:300], captures))
    return found


def _ranked(findings: list[Finding]) -> list[Finding]:
    ids = {one.fault.id for one in findings}
    roots = [one for one in findings if not (ids & set(one.fault.after) - {one.fault.id})]
    order = sorted(roots, key=lambda one: (one.fault.sure == "possible", one.line))
    return [
        Finding(
            one.fault,
            one.line,
            one.quote,
            one.captures,
            tuple(other.fault.id for other in findings if one.fault.id in other.fault.after),
        )
        for one in order
    ]


# What an error looks like, by the tools' own conventions; nothing here says what it means.
_ERROR_LINE = re.compile(
    r"""
      \b(?:fatal\s)?error\s(?:C|LNK|RC|MSB|STL)\d{3,4}\b                # cl, link, msbuild
    | \b(?:致命)?错误\s?[:\s]?\s?(?:C|LNK|MSB)\d{4}                      # the same in Chinese
    | :\s(?:fatal\s)?error(?:\s\#?\d+)?:\s                              # gcc, clang, nvcc on Linux
    | \):\s(?:fatal\s)?error(?:\s\#\d+)?:\s                             # nvcc on Windows
    | ^\s*nvcc\s(?:fatal|error)\s*:
    | ^\s*(?:[|>]\s*)?(?:[A-Za-z_][\w]*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b(?::\s|$)   # Python
    | ^\s*(?:ERROR|FATAL|CRITICAL|Error|error|fatal|FAILED)\s?:\s
    | ^\s*ninja:\serror
    | Segmentation\sfault|core\sdumped|\bKilled$|Access\sviolation|Windows\sfatal\sexception
    | \bcollect2:\serror|\bld:\s(?:cannot|fatal)
    """,
    re.VERBOSE,
)


# Lines that look like errors and only announce one.
_HOLLOW = re.compile(r"Warning|ERROR: Exception:\s*$|Caught \w+ in (?:replica|DataLoader worker)")


def _errors(log: Log) -> list[tuple[int, str]]:
    return [
        (number, line.strip()[:300])
        for number, line in zip(log.numbers, log.lines)
        if _ERROR_LINE.search(line[:1000]) and not _HOLLOW.search(line[:200])
    ][:200]


_SYSTEMS = (
    ("wsl", re.compile(r"/usr/lib/wsl/|microsoft-standard-WSL")),
    (
        "windows",
        re.compile(
            r"\b[A-Z]:[\\/]|\[WinError|\.pyd\b|win_amd64|LNK\d{4}|\bMSVC\b|error C\d{4}|DLL load failed|PS [A-Z]:"
        ),
    ),
    ("mac", re.compile(r"macosx_|\.dylib\b|/opt/homebrew|/Users/\w+/|xcrun")),
    ("linux", re.compile(r"linux_(?:x86_64|aarch64)|manylinux|linux-gnu|/usr/(?:bin|lib|local)|/home/|\.so\b|/root/")),
)


def _fill(text: str, captures: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: captures.get(match.group(1), "..."), text)
