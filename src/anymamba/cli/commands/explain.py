"""`anymamba explain LOG`: what went wrong in a build log or traceback, and what to do about it."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from anymamba.cli.language import Language, answer_in
from anymamba.cli.terminal import Terminal, terminal
from anymamba.errors import OptionError
from anymamba.faults import Explanation, Finding, Outcome, explain
from anymamba.faults.brief import this_system
from anymamba.faults.report import write_report

_WORDS = {
    "en": {
        "sure": "Cause",
        "likely": "Likely cause",
        "possible": "Possible cause",
        "seen": "Seen in line",
        "why": "Why",
        "do": "Do",
        "then": "What follows from it in the same log",
        "others": "Other causes in this log, less likely",
        "earlier": "An earlier error that no known fault explains, line",
        "unknown": "Unknown. No known fault explains this log.",
        "first": "The first error, line",
        "none": "No error found in this log.",
        "attach": "To get help, attach what this writes (names, paths and secrets removed; look at it first): "
        "anymamba explain LOG --make-report report.zip. If the log has only pip's last lines, build again with: "
        "python -m pip install --verbose --no-build-isolation ...",
    },
    "zh": {
        "sure": "原因",
        "likely": "很可能的原因",
        "possible": "可能的原因",
        "seen": "见第 {line} 行",
        "why": "解释",
        "do": "解决",
        "then": "同一日志中由它引起的后果",
        "others": "日志中其他可能性较小的原因",
        "earlier": "更早且无法解释的错误，行号",
        "unknown": "未知：没有已知故障能解释这份日志。",
        "first": "第一个错误，行号",
        "none": "日志中没有发现错误。",
        "attach": "求助时请附上此命令生成的文件（已去除用户名、路径和密钥，发送前请先查看）："
        "anymamba explain LOG --make-report report.zip。如果日志只有 pip 的最后几行，请用以下命令重新构建："
        "python -m pip install --verbose --no-build-isolation ...",
    },
}


class _System(str, Enum):
    WINDOWS = "windows"
    LINUX = "linux"
    MAC = "mac"
    WSL = "wsl"


def command(
    log: Annotated[str, typer.Argument(help="The log file; - reads standard input.", metavar="LOG")] = "-",
    json: Annotated[bool, typer.Option("--json", help="Print JSON (schema anymamba-explain/1).")] = False,
    lang: Annotated[Language | None, typer.Option(help="Language of the answer; the system's by default.")] = None,
    on: Annotated[
        _System | None, typer.Option(help="Show the cures for this system; by default the one the log is from.")
    ] = None,
    make_report: Annotated[
        Path | None,
        typer.Option(help="Also write a zip to attach to a question: answer, log, machine; without names and secrets."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing report.")] = False,
) -> None:
    """Explain a build log or traceback: the first real cause, and the command that cures it.

    Any encoding and size. Ends with 0 when a cause was found or there is no error, with 1 when the cause is unknown.

    Example: python -m pip install mamba_ssm > build.log 2>&1; anymamba explain build.log
    """
    explanation = _read(log)
    language = answer_in(lang)
    system = on.value if on is not None else explanation.system or this_system()
    if json:
        terminal().json(explanation.to_json(language, system))
    else:
        show(terminal(), explanation, language, system)
    if make_report is not None:
        write_report(make_report, explanation, overwrite=force)
        terminal().note(str(make_report))
    if explanation.outcome is Outcome.UNKNOWN:
        raise typer.Exit(1)


def show(screen: Terminal, explanation: Explanation, language: str, system: str) -> None:
    """Print the answer: the likeliest cause in full, the others in a line each."""
    words = _WORDS[language]
    if explanation.outcome is Outcome.CLEAN:
        screen.say(words["none"])
        return
    if explanation.outcome is Outcome.UNKNOWN:
        screen.say(f"[bold]{words['unknown']}[/]")
        for line, text in explanation.unexplained[:1]:
            screen.say(f"{words['first']} {line}: {escape(text)}")
        for finding in explanation.findings:
            screen.say(f"{words[finding.fault.sure]}: {escape(finding.title(language))} ({finding.fault.id})")
        screen.say(escape(words["attach"]))
        return
    best, *others = explanation.findings
    _show_finding(screen, best, language, system)
    for line, text in explanation.unexplained[:1]:
        screen.say(f"{words['earlier']} {line}: {escape(text)}")
    if others:
        screen.say("")
        screen.say(f"{words['others']}:")
        for finding in others:
            screen.say(f"  {escape(finding.title(language))} ({finding.fault.id}, {finding.line})")


def _show_finding(screen: Terminal, finding: Finding, language: str, system: str) -> None:
    words = _WORDS[language]
    screen.say(f"[bold]{words[finding.fault.sure]}:[/] {escape(finding.title(language))} ({finding.fault.id})")
    seen = words["seen"].format(line=finding.line) if language == "zh" else f"{words['seen']} {finding.line}"
    screen.say(f"{seen}: {escape(finding.quote)}")
    screen.say(f"[bold]{words['why']}:[/] {escape(finding.cause(language))}")
    for run, fix in finding.fixes(system):
        screen.say("")
        if run:
            screen.out.print(f"[bold]{words['do']}:[/] {escape(run)}", soft_wrap=True)
            screen.say(f"    {escape(fix.text[language])}")
        else:
            screen.say(f"[bold]{words['do']}:[/] {escape(fix.text[language])}")
    if finding.consequences:
        screen.say("")
        screen.say(f"{words['then']}: {', '.join(finding.consequences)}")


def _read(log: str) -> Explanation:
    if log == "-":
        if sys.stdin.isatty():
            raise OptionError(
                "No log was given.",
                next_step="anymamba explain build.log    (or pipe one in: command 2>&1 | anymamba explain)",
            )
        return explain(sys.stdin.buffer)
    try:
        with Path(log).open("rb") as stream:
            return explain(stream)
    except OSError as failure:
        raise OptionError(
            f"{log} cannot be read: {failure.strerror or failure}.", next_step="give the path of a log file"
        ) from failure
