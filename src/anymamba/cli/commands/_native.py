"""What `anymamba build` and `anymamba install --mode native` share: plan, show, build, install."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from rich.markup import escape

from anymamba.cli.progress import shown_progress
from anymamba.cli.terminal import Terminal, terminal
from anymamba.errors import InstallError, MachineError
from anymamba.upstream.native.plan import NativePlan
from anymamba.upstream.native.run import Snapshot

__all__ = ["Mode", "native"]


class Mode(str, Enum):
    """How the packages get their kernels."""

    PORT = "port"
    NATIVE = "native"


def native(
    requirements: Sequence[str],
    *,
    install: bool,
    dry_run: bool,
    wheel_dir: Path | None = None,
    arch: str = "native",
    jobs: int | None = None,
    source: Path | None = None,
    mirror: str | None = None,
    offline: bool = False,
    resume: bool = False,
    keep: bool = False,
    rules: Sequence[str] = (),
    without: Sequence[str] = (),
    hang_minutes: float = 10,
    as_json: bool = False,
) -> None:
    """Plan; then stop there, or build, and install when asked to."""
    from anymamba.machine import read_machine
    from anymamba.upstream.native.build import build, check_given
    from anymamba.upstream.native.plan import make_native_plan
    from anymamba.upstream.native.torch_paths import TorchPaths, read_torch_paths
    from anymamba.upstream.native.wishes import parse_rules, releases
    from anymamba.upstream.transaction import install_wheels

    screen, python = terminal(), Path(sys.executable)
    asked, arguments = parse_rules(rules)
    with shown_progress() as progress:
        progress.step("Looking at this machine")
        wanted = releases(requirements, partners=source is None)
        machine = read_machine(operators=False)
        torch: TorchPaths | None
        try:
            torch = read_torch_paths(python)
        except MachineError:
            torch = None  # the doctor's checks in the plan say it better
        plan = make_native_plan(
            wanted,
            machine,
            torch,
            arch=arch,
            jobs=jobs,
            asked=asked,
            without=without,
            arguments=arguments,
            given=source,
        )
        check_given(plan, source)
        if not dry_run:

            def report(snapshot: Snapshot) -> None:
                progress.tell(_how_far(snapshot, live=screen.err.is_terminal))

            with (
                _advice(requirements, install=install),
                tempfile.TemporaryDirectory(prefix="anymamba-", ignore_cleanup_errors=True) as aside,
            ):
                built = build(
                    plan, wheel_dir or (Path(aside) if install else Path()), python=python, given=source, mirror=mirror,
                    offline=offline, resume=resume, keep=keep or install, hang_seconds=hang_minutes * 60, progress=progress,
                    report=report,
                )  # fmt: skip
                done = install_wheels(python, {one.name: one.wheel for one in built}, progress) if install else None
                # not before they work: an installation that was refused can be tried again in seconds
                for package in plan.packages if install and not keep else ():
                    shutil.rmtree(package.folder, ignore_errors=True)
    if dry_run:
        screen.json(plan.to_json()) if as_json else _show(screen, plan)
        return
    if as_json:
        screen.json(
            {
                "plan": plan.to_json(),
                "built": [
                    {"name": one.name, "version": one.version, "wheel": str(one.wheel), "log": str(one.log),
                     "seconds": one.seconds, "peak_bytes": one.peak_bytes}
                    for one in built
                ],
                "installed": None if done is None else done.packages,
                "proof": None if done is None else done.proof,
            }
        )  # fmt: skip
        return
    for one in built:
        screen.say(
            f"{escape(one.name)} {escape(one.version)}: {one.seconds:.0f} s, {one.peak_bytes / 2**30:.1f} GiB at most; "
            f"log {escape(str(one.log))}"
        )
        if done is None or wheel_dir is not None:
            screen.say(f"  {escape(str(one.wheel))}")
    if done is not None:
        tried = any(done.proof.get(part) for part in ("convolution", "guide"))
        screen.say(
            "Installed and proved in a fresh process. All numbers: anymamba verify"
            if tried
            else "Installed, and it loads in a fresh process. There is no card here to run it on."
        )


@contextmanager
def _advice(requirements: Sequence[str], *, install: bool) -> Iterator[None]:
    """After Ctrl-C, and when what was compiled could not be installed, say how to go on."""
    try:
        yield
    except (KeyboardInterrupt, InstallError):
        words = ["build", "--resume", *(["--install"] if install else [])]
        terminal().note(f"What was compiled is kept; to go on: {escape(' '.join(['anymamba', *words, *requirements]))}")
        raise


def _how_far(snapshot: Snapshot, *, live: bool) -> str:
    text = f"{snapshot.done}/{snapshot.total}" if snapshot.total else "all made before"
    if not live:
        return text
    if snapshot.remaining is not None:
        text += f", about {max(1, round(snapshot.remaining / 60))} min left"
    names = [Path(path).name for path in snapshot.current[:3]]
    return f"{text}  {', '.join(names)}{' ...' if len(snapshot.current) > 3 else ''}"


def _show(screen: Terminal, plan: NativePlan) -> None:
    chain, torch = plan.chain, plan.torch
    for package in plan.packages:
        screen.say(f"[bold]{escape(package.name)} {escape(package.installs)}[/]")
        screen.say(f"  sources  {escape(package.sources)}")
        for cure in package.cures:
            how = "edit" if cure.flags is None else " ".join(dict.fromkeys((*cure.flags.host, *cure.flags.nvcc))) or "-"
            screen.say(f"  rule     {escape(cure.rule.id)}: {escape(how)}")
        screen.say(f"  built in {escape(package.folder)}")
    screen.say("[bold]Tools[/]")
    built_with = f"CUDA {torch.cuda}" if torch is not None and torch.cuda else "no CUDA"
    screen.say(f"  torch    {escape(f'{torch.version}, {built_with}, {torch.standard}') if torch else 'none'}")
    release = f" ({chain.cuda[0]}.{chain.cuda[1]})" if chain.nvcc else ""
    screen.say(f"  nvcc     {escape((chain.nvcc or 'none') + release)}")
    screen.say(f"  host     {escape(chain.host or 'none')}")
    screen.say(f"  ninja    {escape(chain.ninja or 'none')}; {plan.jobs} at once ({escape(plan.why_jobs)})")
    if chain.launcher:
        screen.say(f"  cache    {escape(chain.launcher[0])}")
    screen.say(f"  cards    {escape(', '.join(plan.target.architectures) or 'none')}")
    for problem in plan.problems:
        word = "[bold red]Missing[/]" if problem.fatal else "[yellow]Note[/]"
        screen.say(f"{word} {escape(problem.title)}: {escape(problem.seen)}")
        if problem.why:
            screen.say(f"  why  {escape(problem.why)}")
        if problem.fix:
            screen.say(f"  fix  {escape(problem.fix)}")
    screen.say(
        "Nothing was changed. [bold red]It could not be built here now.[/]"
        if plan.obstacles
        else "Nothing was changed."
    )
