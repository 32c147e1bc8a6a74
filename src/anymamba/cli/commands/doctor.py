"""`anymamba doctor`: what this machine is, what works on it, and one line to cure what does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated

import typer
from rich.markup import escape

from anymamba.cli.language import Language, answer_in
from anymamba.cli.terminal import Terminal, terminal
from anymamba.doctor import Diagnosis, Result, Status, Way, examine
from anymamba.doctor.language import in_language, row_in_language
from anymamba.doctor.reference import ReferenceRow
from anymamba.doctor.verdict import Verdict
from anymamba.machine import read_machine

# Words, not signs: a console with code page 936 or plain ASCII shows them too.
_MARKS = {
    Status.OK: "[green]ok[/]",
    Status.INFO: "[blue]info[/]",
    Status.WARN: "[yellow]warn[/]",
    Status.FAIL: "[bold red]FAIL[/]",
}


_WORDS = {
    "en": {
        "check": "check",
        "for": "for",
        "seen": "seen",
        "reference": "The guide's reference environment",
        "what": "what",
        "guide": "guide",
        "here": "here",
        "matters": "matters for",
        "same": "same",
        "none": "none",
        "other": "other",
        "wanted": "wanted:",
        "why": "why:   ",
        "fix": "fix:   ",
        "no card": "does not apply: no GPU here",
        "works": "works",
        "better": "better with",
        "not yet": "does not work yet",
        "first": "first",
    },
    "zh": {
        "check": "检查项",
        "for": "用于",
        "seen": "本机情况",
        "reference": "教程的参考环境",
        "what": "项目",
        "guide": "教程",
        "here": "本机",
        "matters": "对谁重要",
        "same": "相同",
        "none": "没有",
        "other": "不同",
        "wanted": "应为:",
        "why": "原因:",
        "fix": "解决:",
        "no card": "不适用：本机没有 GPU",
        "works": "可用",
        "better": "改进后更好",
        "not yet": "目前不可用",
        "first": "先解决",
        "both": "两者",
        "port": "移植版",
        "native": "本地编译",
        "nobody": "无",
        "ok": "正常",
        "info": "信息",
        "warn": "警告",
        "fail": "失败",
        "port on GPU": "移植版（GPU）",
        "port on CPU": "移植版（CPU）",
    },
}


class _For(str, Enum):
    PORT = "port"
    NATIVE = "native"


def command(
    way: Annotated[
        _For | None,
        typer.Option("--for", help="Show only what matters for the port (no compiler) or for a native build."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON (schema anymamba-doctor/1).")] = False,
    operators: Annotated[bool, typer.Option(help="Call each operator once to see it run.")] = True,
    network: Annotated[
        bool,
        typer.Option("--network", help="Also try whether your package index and GitHub answer (at most 6 s)."),
    ] = False,
    lang: Annotated[Language | None, typer.Option(help="Language of the answer; the system's by default.")] = None,
) -> None:
    """Look at this machine and say what works, what does not, and how to cure it.

    Ends with 0 when nothing failed for the way asked for (the port, unless --for native is given), else with 1. Nothing goes on
    the network without --network.

    Example: anymamba doctor --for native
    """
    diagnosis = examine(read_machine(operators=operators, network=network))
    judged = Way.NATIVE if way is _For.NATIVE else Way.PORT
    language = answer_in(lang)
    if json:
        terminal().json(diagnosis.to_json(language))
    else:
        show(terminal(), diagnosis, Way.BOTH if way is None else judged, language)
    if not diagnosis.healthy(judged):
        raise typer.Exit(1)


def show(screen: Terminal, diagnosis: Diagnosis, way: Way, language: str = "en") -> None:
    """Print the checks, the comparison with the reference environment, the cures and the verdicts."""
    words = _WORDS[language]
    results = [in_language(result, language) for result in diagnosis.about(way)]
    screen.table("", ["", words["check"], words["for"], words["seen"]], [_row(result, words) for result in results])
    screen.say("")
    screen.table(
        words["reference"],
        ["", words["what"], words["guide"], words["here"], words["matters"]],
        [_reference_row(row_in_language(row, language), words) for row in diagnosis.reference],
    )
    _show_cures(screen, [result for result in results if result.status in (Status.WARN, Status.FAIL)], words)
    screen.say("")
    for verdict in diagnosis.verdicts:
        if way is Way.BOTH or verdict.route.startswith(way.value):
            screen.say(_sentence(verdict, words))


def _mark(status: Status, words: Mapping[str, str]) -> str:
    mark = _MARKS[status]
    english = mark.partition("]")[2].partition("[")[0]
    return mark.replace(english, words.get(status.value, english))


def _row(result: Result, words: Mapping[str, str]) -> list[str]:
    way = words.get(result.way.value, result.way.value)
    return [_mark(result.status, words), escape(result.title), way, escape(result.seen)]


def _reference_row(row: ReferenceRow, words: Mapping[str, str]) -> list[str]:
    mark = f"[green]{words['same']}[/]" if row.agrees else words["none"] if not row.seen else words["other"]
    return [
        mark,
        escape(row.title),
        escape(row.wanted),
        escape(row.seen or "-"),
        escape(f"{words.get(row.matters_for, row.matters_for)}: {row.note}"),
    ]


def _show_cures(screen: Terminal, troubles: Sequence[Result], words: Mapping[str, str]) -> None:
    for result in troubles:
        screen.say("")
        screen.say(
            f"{_mark(result.status, words)} [bold]{escape(result.title)}[/] ({escape(result.id)}): {escape(result.seen)}"
        )
        if result.wanted:
            screen.say(f"  {words['wanted']} {escape(result.wanted)}")
        if result.why:
            screen.say(f"  {words['why']} {escape(result.why)}")
        if result.fix:
            screen.out.print(f"  {words['fix']} {escape(result.fix)}", soft_wrap=True)  # one line, to be copied whole


def _sentence(verdict: Verdict, words: Mapping[str, str]) -> str:
    if verdict.works is None:
        answer = words["no card"]
    elif verdict.works:
        answer = f"[green]{words['works']}[/]"
        answer += f"; {words['better']}: {', '.join(verdict.better)}" if verdict.better else ""
    else:
        answer = f"[red]{words['not yet']}[/]; {words['first']}: {', '.join(verdict.obstacles)}"
    return f"[bold]{words.get(verdict.route, verdict.route)}[/]: {answer}"
