"""One file for a bug report: what this machine is, what runs on it, what is installed, and what went wrong last.

Each section is what a command says, so its reader can ask the same again; each runs in a process of its own, so a torch that
dies takes only its section along. What points at a person, a machine or an account is taken out (`anymamba.faults.scrub`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Protocol

from anymamba.faults.scrub import scrub
from anymamba.machine._programs import Answer, ask

__all__ = ["SCHEMA", "Progress", "Section", "gather", "last_bench", "last_log", "to_html", "to_json", "to_text"]

SCHEMA = "anymamba-report/1"
"""Name and version of the JSON form; the number changes when a field changes its meaning or goes away."""

_SECONDS = 180.0
_KEPT_LINES = 120  # of a build log, from its end; the explanation quotes what is before


class Progress(Protocol):
    """Who wants to know how far it is."""

    def step(self, text: str) -> None:
        """Say what is being done now."""


@dataclass(frozen=True)
class Section:
    """A part of the report: the command that says it, its lines for people, its value for programs."""

    name: str
    command: str
    lines: tuple[str, ...]
    value: Any = None


Run = Callable[[Sequence[str]], Answer]


def gather(
    progress: Progress, *, verify: bool = True, bench: Path | None = None, log: Path | None = None,
    show_paths: bool = False, run: Run | None = None,
) -> list[Section]:  # fmt: skip
    """Ask everything, scrub the answers.

    Parameters
    ----------
    progress : Progress
    verify : bool
        Run `anymamba verify --quick` too.
    bench : Path, optional
        A file of `anymamba bench --json`; by default the last benchmark of this machine, where there is one.
    log : Path, optional
        A build log; by default that of the last native build, where there is one.
    show_paths : bool
        Leave paths and names in. Passwords and tokens are taken out all the same.
    run : callable, optional
        Runs an anymamba command; tests pass their own.

    Returns
    -------
    list of Section
    """
    run = run or _run
    asked: dict[str, tuple[list[str], Callable[[Any], list[str]]]] = {
        "doctor": (["doctor", "--json", "--lang", "en"], _doctor),
        "backends": (["backends", "--json"], _backends),
        "provenance": (["provenance", "--json"], _provenance),
    }
    if verify:
        asked["verify"] = (["verify", "--quick", "--json"], _verify)
    progress.step(", ".join(asked))
    with ThreadPoolExecutor(max_workers=2) as pool:
        waiting = {name: pool.submit(_asked, name, words, show, run) for name, (words, show) in asked.items()}
        sections = [future.result() for future in waiting.values()]
    sections.insert(1, _versions(sections[0]))
    progress.step("last build, last benchmark")
    sections.append(_build(log or last_log()))
    sections.append(_bench(bench or last_bench()))
    clean = partial(_clean, show_paths=show_paths)
    return [Section(one.name, clean(one.command), tuple(map(clean, one.lines)), clean(one.value)) for one in sections]


def to_text(sections: Sequence[Section]) -> str:
    """Return the report as plain text."""
    parts = [_head(sections)]
    for section in sections:
        parts.append(f"\n== {section.name}" + (f"    ({section.command})" if section.command else ""))
        parts += section.lines
    return "\n".join(parts) + "\n"


def to_html(sections: Sequence[Section]) -> str:
    """Return the report as one page: no network, no script, light and dark, readable on a phone."""
    from anymamba.measure.bench.page import STYLE

    head, contents, *words = _head(sections).splitlines()
    body = [
        f"<h1>{escape(head)}</h1>",
        *(f'<p class="soft">{escape(line)}</p>' for line in (contents, " ".join(words))),
    ]
    for section in sections:
        body.append(f"<h2>{escape(section.name)}</h2>")
        body += [f'<p class="soft"><code>{escape(section.command)}</code></p>'] if section.command else []
        body.append(f'<pre tabindex="0">{escape(chr(10).join(section.lines))}</pre>')
        if section.value is not None:
            whole = escape(json.dumps(section.value, indent=1, ensure_ascii=False))
            body.append(f'<details><summary>all of it, as JSON</summary><pre tabindex="0">{whole}</pre></details>')
    style = (
        STYLE
        + "pre { overflow-x: auto; font-size: .85rem; border: 1px solid var(--line); padding: .6rem; }"
        + "code { overflow-wrap: anywhere; }"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="generator" content="{SCHEMA}"><title>anymamba report</title>'
        f'<link rel="icon" href="data:,"><style>{style}</style></head><body>\n' + "\n".join(body) + "\n</body></html>\n"
    )


def to_json(sections: Sequence[Section]) -> dict[str, Any]:
    """Return plain values for `json.dumps`."""
    return {
        "schema": SCHEMA,
        "sections": [
            {"name": one.name, "command": one.command, "lines": list(one.lines), "value": one.value} for one in sections
        ],
    }


def last_log() -> Path | None:
    """Return the log of the last native build on this machine, or None."""
    from anymamba.machine.folders import cache_folder

    try:
        logs = sorted((cache_folder() / "native" / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime)
    except OSError:
        return None
    return logs[-1] if logs else None


def last_bench() -> Path | None:
    """Return the last result of `anymamba bench` on this machine, or None."""
    from anymamba.measure.bench.results import last_result

    path = last_result()
    return path if path.is_file() else None


def _head(sections: Sequence[Section]) -> str:
    return (
        "anymamba report\n"
        f"It contains: {', '.join(section.name for section in sections)}.\n"
        "User names, home folders, machine names, addresses, tokens and passwords were replaced by words in capitals\n"
        "(with --show-paths, only the last two).\n"
        "That works by patterns: read it before you send it."
    )


def _run(words: Sequence[str]) -> Answer:
    import anymamba

    root = str(Path(anymamba.__file__).parent.parent)
    # as the installed script does: the working folder is not on the path, so no file of the user's is imported
    code = f"import sys; sys.path[:1] = [{root!r}]; sys.argv = {['anymamba', *words]!r}; from anymamba.cli import main; main()"
    return ask([sys.executable, "-X", "utf8", "-c", code], seconds=_SECONDS)


def _asked(name: str, words: list[str], show: Callable[[Any], list[str]], run: Run) -> Section:
    answer = run(words)
    command = f"anymamba {' '.join(words)}"
    try:
        value = json.loads(answer.out)
        return Section(name, command, tuple(show(value)), value)
    except (ValueError, KeyError, TypeError, AttributeError):
        said = [line for line in answer.error.splitlines() if line.strip()]
        return Section(name, command, (f"ended with {answer.code}", *said[-20:]))


def _doctor(value: Any) -> list[str]:
    lines = []
    for one in value["results"]:
        lines.append(f"{one['status']:4} {one['title']} ({one['id']}, {one['way']}): {one['seen']}")
        if one["status"] in ("warn", "fail"):
            lines += [f"     why: {one['why']}", f"     fix: {one['fix']}"]
    for verdict in value["verdicts"]:
        works = {True: "works", False: "does not work yet", None: "does not apply"}[verdict["works"]]
        hints = verdict["obstacles"] or verdict["better"]
        lines.append(f"{verdict['route']}: {works}" + (f"; see {', '.join(hints)}" if hints else ""))
    return lines


def _versions(doctor: Section) -> Section:
    value = doctor.value or {}
    machine = value.get("machine") or {}
    torch, driver = machine.get("torch") or {}, machine.get("driver") or {}
    versions: dict[str, Any] = {
        "anymamba": value.get("anymamba"),
        "Python": (machine.get("python") or {}).get("version"),
        "torch": torch.get("version"),
        "torch's CUDA": torch.get("cuda"),
        "NVIDIA driver": driver.get("version"),
        "Triton": (machine.get("triton") or {}).get("version"),
    }
    packages = machine.get("packages") or {}
    for one in (*packages.get("upstream", ()), *packages.get("company", ())):
        versions[one["name"]] = one["version"] + (f" ({one['kind']})" if "kind" in one else "")
    return Section("versions", "", tuple(f"{name}: {version or '-'}" for name, version in versions.items()), versions)


def _backends(value: Any) -> list[str]:
    lines = [f"{value['device']}, {value['dtype']}, asked for: {value['requested'] or 'nothing'}"]
    lines += [f"{one['name']}: {one['unavailable'] or 'available'}" for one in value["backends"]]
    return lines + [f"{row['operator']}: {row['chosen'] or 'none'}" for row in value["operators"]]


def _provenance(value: Any) -> list[str]:
    lines = []
    for port in value["packages"]:
        altered = [file for file in port["files"] if file["state"] != "intact"]
        lines.append(f"{port['name']} {port['version']} in {port['location']}, from {port['source_file']}")
        lines.append(f"     {len(port['files'])} files, {len(altered)} not intact")
        lines += [f"     {file['state']}: {file['path']}" for file in altered]
    return lines


def _verify(value: Any) -> list[str]:
    counts = ", ".join(f"{count} {name}" for name, count in value["counts"].items())
    lines = [f"{'passed' if value['passed'] else 'FAILED'}: {counts}; {value['seconds']} s"]
    for row in value["rows"]:
        if row["status"] in ("failed", "refused"):
            where = " ".join(
                part for part in (row["name"], row["case"], row["backend"], row["dtype"], row["device"]) if part
            )
            lines.append(f"{row['status']}: {where}: {row['message']}")
    return lines


def _build(log: Path | None) -> Section:
    if log is None:
        return Section("last build", "", ("no native build was made on this machine",))
    from anymamba.faults import explain
    from anymamba.faults.brief import this_system

    try:
        with log.open("rb") as stream:
            explanation = explain(stream)
    except OSError as error:
        return Section("last build", f"anymamba explain {log}", (f"{log} cannot be read: {error.strerror or error}",))
    system = explanation.system or this_system()
    lines = [f"{log}: {explanation.outcome.value}"]
    for finding in explanation.findings:
        lines.append(
            f"{finding.fault.sure}: {finding.title('en')} ({finding.fault.id}), line {finding.line}: {finding.quote}"
        )
        lines += [f"     do: {run or fix.text['en']}" for run, fix in finding.fixes(system)]
    lines += [f"first error that nothing explains, line {line}: {text}" for line, text in explanation.unexplained[:1]]
    kept = list(zip(explanation.log.numbers, explanation.log.lines))[-_KEPT_LINES:]
    lines += ["the end of the log:", *(f"{number:>7} {line}" for number, line in kept)]
    return Section("last build", f"anymamba explain {log}", tuple(lines), explanation.to_json("en", system))


def _bench(file: Path | None) -> Section:
    if file is None:
        return Section("benchmark", "", ("none was run on this machine (anymamba bench)",))
    from anymamba.measure.bench.results import read, to_json
    from anymamba.measure.bench.words import COLUMNS, cells, groups

    result = read(file)
    lines = [f"{name}: {value}" for name, value in result.machine.items()]
    for (subject, size, direction, dtype), rows in groups(result).items():
        lines += ["", f"{subject}, {direction}, {size}, {dtype}", "  ".join(COLUMNS)]
        for row in rows:
            lines.append("  ".join(cells(row)) + (f"  {row.message}" if row.message else ""))
    return Section(
        "benchmark", "anymamba bench", (*lines, *(f"note: {note}" for note in result.notes)), to_json(result)
    )


def _clean(value: Any, *, show_paths: bool) -> Any:
    """Scrub every text in a value; in the value, not in its JSON, which must stay JSON."""
    if isinstance(value, str):
        # a project's folder may tell as much as a user's name; the longest first, one may lie in the other
        folders = {} if show_paths else {str(Path.cwd()): "WORKING_FOLDER", sys.prefix: "ENVIRONMENT"}
        for folder in sorted(folders, key=len, reverse=True):
            if len(Path(folder).parts) > 2:  # "/" and "/usr" tell nothing and are in everything
                value = value.replace(folder, folders[folder])
        return scrub(value, keep_paths=show_paths)
    if isinstance(value, Mapping):
        return {key: _clean(entry, show_paths=show_paths) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(entry, show_paths=show_paths) for entry in value]
    return value
