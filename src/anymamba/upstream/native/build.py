"""Carry out a plan: sources, edits, ninja, wheel. What was cut off goes on where it was; what failed is explained."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from anymamba.errors import OptionError
from anymamba.faults import Explanation, explain
from anymamba.faults import Outcome as Answer
from anymamba.machine.folders import cache_folder
from anymamba.upstream.index import Index
from anymamba.upstream.native.commands import Step, steps
from anymamba.upstream.native.ninja import write_ninja
from anymamba.upstream.native.pack import pack
from anymamba.upstream.native.plan import NativePlan, PackageBuild
from anymamba.upstream.native.recipe import Recipe, read_recipe
from anymamba.upstream.native.rules import work_out, write
from anymamba.upstream.native.run import BuildFailedError, HangError, Outcome, Report, run_ninja
from anymamba.upstream.native.sources import Sources, get_sources
from anymamba.upstream.patches import Applied
from anymamba.upstream.progress import Progress, Silent

__all__ = ["Arranged", "Built", "arrange", "build", "check_given"]


@dataclass(frozen=True)
class Arranged:
    """A package ready to be compiled: its sources with the edits made, and every command line."""

    sources: Sources
    recipe: Recipe
    applied: tuple[Applied, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Built:
    """A wheel, the log of its making, and how long it took."""

    name: str
    version: str
    wheel: Path
    log: Path
    seconds: float
    peak_bytes: int


def build(
    plan: NativePlan,
    wheel_dir: Path,
    *,
    python: Path,
    given: Path | None = None,
    mirror: str | None = None,
    offline: bool = False,
    resume: bool = False,
    keep: bool = False,
    hang_seconds: float = 600,
    index: Index | None = None,
    progress: Progress | None = None,
    report: Report | None = None,
    poll_seconds: float = 0.5,
) -> list[Built]:
    """Build the wheels of a plan.

    Parameters
    ----------
    plan : NativePlan
    wheel_dir : Path
        Where the wheels go; made when it is not there.
    python : Path
        Whose pip settings reach the index.
    given, mirror, offline, index
        As in `get_sources`.
    resume : bool
        Go on with a build of the same plan that was cut off: what was compiled stays.
    keep : bool
        Keep sources and objects after success as well.
    hang_seconds : float
        When the watchdog wakes.
    progress, report
        Are told steps, and how far the compilers are.

    Raises
    ------
    MachineError
        The plan has an obstacle.
    BuildFailedError, HangError
        With the log's path; what was compiled is kept for `resume`.
    SourceError, IntegrityError, PatchError
    """
    plan.check()
    assert plan.torch is not None  # else the doctor's checks are obstacles
    progress = progress or Silent()
    wheel_dir.mkdir(parents=True, exist_ok=True)
    built = []
    for package in plan.packages:
        folder = Path(package.folder)
        progress.step(f"Preparing {package.name} {package.version}")
        arranged = arrange(
            plan, package, folder, python=python, given=given, mirror=mirror, offline=offline, resume=resume, index=index,
            progress=progress,
        )  # fmt: skip
        todo = arranged.steps
        write_ninja(folder, todo, windows=plan.target.windows)
        log = _new_log(plan, package, todo)
        progress.step(f"Compiling {package.name} {package.version} (log: {log})")
        outcome = _compile(plan, package, folder, todo, log, hang_seconds, report, poll_seconds)
        progress.step(f"Packing {package.name} {package.installs}")
        details: dict[str, object] = {
            "cuda": ".".join(map(str, plan.chain.cuda)), "torch": plan.torch.version, "host": plan.chain.host,
            "architectures": list(plan.target.architectures), "standard": plan.target.standard,
            "rules": {cure.rule.id: "edit" if cure.flags is None else "flags" for cure in package.cures},
        }  # fmt: skip
        wheel = pack(
            arranged.sources, arranged.recipe, folder / todo[-1].output, package.installs, plan.torch.tag,
            arranged.applied, folder, details,
        )  # fmt: skip
        final = wheel_dir / wheel.name
        shutil.copyfile(wheel, final)
        built.append(Built(package.name, package.installs, final, log, outcome.seconds, outcome.peak_bytes))
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return built


def arrange(
    plan: NativePlan, package: PackageBuild, folder: Path, *, python: Path, given: Path | None = None,
    mirror: str | None = None, offline: bool = False, resume: bool = False, index: Index | None = None,
    progress: Progress | None = None,
) -> Arranged:  # fmt: skip
    """Get a package's sources, make the edits of its rules, and work out the command lines; nothing is compiled.

    Parameters
    ----------
    plan : NativePlan
        With a torch.
    package : PackageBuild
        One of the plan's.
    folder : Path
        Where; what was there is removed, unless `resume` and it was arranged before.
    python, given, mirror, offline, index, progress
        As in `get_sources`.

    Raises
    ------
    SourceError, IntegrityError, PatchError
    """
    assert plan.torch is not None
    sources, recipe, applied = _prepare(
        plan, package, folder, python, given, mirror, offline, resume, index, progress or Silent()
    )
    todo = steps(
        sources.folder, recipe, plan.chain, plan.torch,
        [cure.flags for cure in package.cures if cure.flags is not None], plan.target.standard,
    )  # fmt: skip
    return Arranged(sources, recipe, tuple(applied), tuple(todo))


def _prepare(
    plan: NativePlan, package: PackageBuild, folder: Path, python: Path, given: Path | None, mirror: str | None,
    offline: bool, resume: bool, index: Index | None, progress: Progress,
) -> tuple[Sources, Recipe, list[Applied]]:  # fmt: skip
    state = folder / "prepared.json"
    if resume and state.is_file():
        saved = json.loads(state.read_text(encoding="utf-8"))
        sources = Sources(folder=folder / "source", **saved["sources"])
        return sources, read_recipe(sources.folder, package.name), [Applied(**one) for one in saved["applied"]]
    if folder.exists():
        shutil.rmtree(folder)
    sources = get_sources(
        package.name, package.version, folder / "source", python=python, given=given, mirror=mirror, offline=offline,
        index=index, progress=progress,
    )  # fmt: skip
    recipe = read_recipe(sources.folder, package.name)
    edits = [cure.rule for cure in package.cures if cure.flags is None]
    changes, applied = work_out(sources.folder, package.name, package.version, edits, plan.arguments)
    write(sources.folder, changes)
    (folder / "obj").mkdir()
    saved = {
        "sources": {
            "name": sources.name, "version": sources.version, "origin": sources.origin,
            "identity": dict(sources.identity), "proved": sources.proved,
        },
        "applied": [vars(one) for one in applied],
    }  # fmt: skip
    state.write_text(json.dumps(saved), encoding="utf-8")
    return sources, recipe, applied


def _new_log(plan: NativePlan, package: PackageBuild, todo: Sequence[Step]) -> Path:
    """Begin the log with what a reader needs before the compilers speak."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    log = cache_folder() / "native" / "logs" / f"{package.name}-{package.version}-{stamp}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        f"anymamba build {package.name}=={package.version}",
        f"torch {plan.torch.version if plan.torch else '?'}, nvcc {'.'.join(map(str, plan.chain.cuda))} {plan.chain.nvcc}",
        f"host compiler {plan.chain.host}, architectures {', '.join(plan.target.architectures)}, jobs {plan.jobs}",
        *(f"rule {cure.rule.id}: {'edit' if cure.flags is None else 'flags'}" for cure in package.cures),
        *(f"command {step.source or step.output}: {shlex.join(step.command)}" for step in todo),
        "",
    ]
    log.write_text("\n".join(lines), encoding="utf-8")
    return log


def _compile(
    plan: NativePlan, package: PackageBuild, folder: Path, todo: Sequence[Step], log: Path, hang_seconds: float,
    report: Report | None, poll_seconds: float,
) -> Outcome:  # fmt: skip
    """Run ninja; an object that hung is tried once more alone, and one that ran out of memory with fewer beside it."""
    jobs, targets = plan.jobs, tuple[str, ...]()
    hung: set[str] = set()
    seconds, peak = 0.0, 0
    while True:
        outcome = run_ninja(
            plan.chain.ninja, folder, todo, log, jobs=jobs, targets=targets,
            environment=dict(plan.chain.environment) or None, hang_seconds=hang_seconds, report=report,
            poll_seconds=poll_seconds,
        )  # fmt: skip
        seconds, peak = seconds + outcome.seconds, max(peak, outcome.peak_bytes)
        if outcome.hang is not None:
            step = next((step for step in todo if step.source and step.source == outcome.hang.source), None)
            _note(log, f"hung: {outcome.hang.process}, {outcome.hang.source}: {outcome.hang.cause}")
            if step is None or step.output in hung:
                raise _hang_error(package, outcome, log)
            hung.add(step.output)
            jobs, targets = 1, (step.output,)
        elif outcome.code == 0 and targets:
            jobs, targets = plan.jobs, ()
        elif outcome.code == 0:
            outcome.seconds, outcome.peak_bytes = seconds, peak
            return outcome
        elif outcome.killed and jobs > 1:
            _note(log, f"a compiler was ended for lack of memory with {jobs} at once; going on with {jobs // 2}")
            jobs = jobs // 2
        else:
            raise _failure(plan, package, outcome, log)


def _note(log: Path, text: str) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(f"anymamba: {text}\n")


def _hang_error(package: PackageBuild, outcome: Outcome, log: Path) -> HangError:
    hang = outcome.hang
    assert hang is not None
    error = HangError(
        f"{hang.process} (process {hang.pid}) hung on {hang.source or 'no source file that is known'}: "
        f"for {hang.seconds / 60:.1f} minutes it neither said nor computed anything. It was ended.",
        why=f"Most likely {hang.cause}. The log: {log}",
        next_step=f"anymamba build {package.name}=={package.version} --resume --jobs 1",
    )
    error.log = log
    return error


def _failure(plan: NativePlan, package: PackageBuild, outcome: Outcome, log: Path) -> BuildFailedError:
    with log.open("rb") as file:
        explanation = explain(file)
    again = f"anymamba build {package.name}=={package.version} --resume"
    what = f"{package.name} {package.version} did not compile"
    if outcome.failed:
        what += f" ({', '.join(outcome.failed)})"
    cause = explanation.cause if explanation.outcome is Answer.EXPLAINED else None
    if outcome.killed and cause is None:
        error = BuildFailedError(
            f"{what}: the system ended a compiler, as it does when memory runs out.",
            why=f"All compilers together had {outcome.peak_bytes / 2**30:.1f} GiB. The log: {log}",
            next_step=f"close other programs, or add swap; then {again} --jobs 1",
        )
    elif cause is not None:
        system = "windows" if plan.target.windows else "linux"
        # what we were doing is no cure; the port is one, after those that let the build go on
        fixes = [run or fix.text["en"] for run, fix in cause.fixes(system) if not run.startswith("anymamba")]
        error = BuildFailedError(
            f"{what}: {cause.title('en')}",
            why=f"{cause.cause('en')} The log: {log}",
            next_step=f"{fixes[0]}; then {again}"
            if fixes
            else f"{again}, once that is cured; or: anymamba install    (no compiler)",
        )
    else:
        error = BuildFailedError(
            f"{what}.", why=f"{_first_error(explanation, log)} The log: {log}", next_step=f'anymamba explain "{log}"'
        )
    error.log = log
    return error


def _first_error(explanation: Explanation, log: Path) -> str:
    if explanation.unexplained:
        line, text = explanation.unexplained[0]
        return f"No known fault fits; the first error, line {line}: {text}"
    # one line beside ninja's own words, which the engine takes for theirs
    for number, text in enumerate(log.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if not text.startswith(("command ", "anymamba")) and re.search(r"\berror\b", text, re.IGNORECASE):
            return f"No known fault fits; the first error, line {number}: {text.strip()[:300]}"
    return "No known fault fits what the compilers said."


def check_given(plan: NativePlan, given: Path | None) -> None:
    """Refuse one folder of sources for two packages.

    Raises
    ------
    OptionError
    """
    if given is not None and len(plan.packages) != 1:
        raise OptionError(
            "--source gives the sources of one package, and two are to be built.",
            next_step=f"anymamba build {plan.packages[0].name}=={plan.packages[0].version} --source {given}",
        )
