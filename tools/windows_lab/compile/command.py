"""The command: plan in each Windows Python, compile what tells most first, link, say what was left."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.windows_lab import product, runner
from tools.windows_lab.compile import trees, units
from tools.windows_lab.compile.record import Entry, Record
from tools.windows_lab.compile.wanted import ARCHITECTURE, BUILDS, SETTINGS, Build, Trial, trials_of
from tools.windows_lab.layout import HERE, REPOSITORY
from tools.windows_lab.say import say
from tools.windows_lab.wine import Wine, windows_path

__all__ = ["DEBUG", "PTX", "WHOLE", "Job", "compile_all", "cost", "in_mode", "parse_sources"]

_TIMEOUT = 2400.0
WHOLE, DEBUG, PTX = "", "-G", "-G to PTX"
"""How much is made of device code: all, by the product's command word for word; unoptimised; that, and not assembled."""
_MODES = (WHOLE, DEBUG, PTX)


@dataclass(frozen=True)
class Job:
    """One thing to do: a unit with the plan's command, or (trial given) with its rule left out."""

    build: Build
    unit: str
    trial: Trial | None
    step: Mapping[str, Any]
    folder: Path
    inputs: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.build.key, self.unit, self.trial.rule if self.trial is not None else ""

    @property
    def words(self) -> str:
        return f"{self.build.key}: {self.unit}" + (f" without {self.trial.rule}" if self.trial is not None else "")


def cost(job: Job) -> tuple[int, int, int]:
    """Order jobs: C++ and trials, which end at their first error; one unit of each kind; then release by release."""
    if job.trial is not None or job.unit.endswith(".cpp"):
        return 0, 0, 0
    kinds = (r"_update\.cu$", r"conv1d_fwd\.cu$", r"scan_fwd_fp32\.cu$", r"conv1d_bwd\.cu$", r"scan_bwd_fp32_real\.cu$",
             r"scan_fwd_", r"scan_bwd_.*_real", "")  # fmt: skip
    kind = next(number for number, pattern in enumerate(kinds) if re.search(pattern, job.unit))
    return (1, 0, kind) if kind < 5 else (2, [*SETTINGS].index(job.build.setting), kind)


def parse_sources(texts: Sequence[str]) -> dict[tuple[str, str], Path]:
    """Return the folders of ``NAME==VERSION=DIR``."""
    found = {}
    for text in texts:
        match = re.fullmatch(r"(\w+)==([^=]+)=(.+)", text)
        if match is None or not Path(match[3]).exists():
            raise trees.TreeError(f"--source {text}: NAME==VERSION=DIR, where DIR is there")
        found[match[1], match[2]] = Path(match[3]).resolve()
    return found


def compile_all(
    found: Wine,
    microsoft: trees.MicrosoftTree,
    record: Record,
    *,
    nvcc: Path | None = None,
    sources: Mapping[tuple[str, str], Path] | None = None,
    only: str = "",
    minutes: float | None = None,
    mode: str = WHOLE,
) -> bool:
    """Compile what is wanted and not recorded yet; return whether all that was done ended as it must.

    Parameters
    ----------
    found : Wine
    microsoft : MicrosoftTree
    record : Record
        Is written after each compile.
    nvcc : Path, optional
        A CUDA toolkit of the user's for the newest setting.
    sources : mapping, optional
        Folders of releases that the index has no sources of; without one, its builds are left out and named.
    only : str
        Regular expression of the builds' keys.
    minutes : float, optional
        Begin nothing more after so long; the next call goes on.
    mode : str
        DEBUG compiles device code without optimisation (nvcc's -G): the same front ends and host compiler in a fraction of the
        time. PTX also leaves the assembler out, which is the same on every system and takes longest; the driver would run it
        on the user's card. Such an entry says so, and a later call that asks for more compiles again.
    """
    end = time.monotonic() + (minutes * 60 if minutes is not None else 1e9)
    root = found.layout.root / "compile"
    stand_ins = trees.make_stand_ins(root / "headers")
    record.tools.update(cl=microsoft.toolset, sdk=microsoft.sdk, wine=found.version(), architecture=ARCHITECTURE)
    jobs: list[Job] = []
    links: list[tuple[Build, Mapping[str, Any], list[Job]]] = []
    left: list[str] = []
    for setting in SETTINGS:
        builds = [build for build in BUILDS if build.setting == setting and re.search(only, build.key)]
        absent = [build for build in builds if _archive(found, build, sources or {}) is None]
        left += [f"{build.key}: no sources given (--source)" for build in absent]
        builds = [build for build in builds if build not in absent]
        if not builds:
            continue
        plans = _plans(found, microsoft, setting, builds, nvcc, stand_ins, sources or {}, record)
        for build, plan, folder in plans:
            mine = list(_jobs(build, plan, folder, found.layout.root, microsoft))
            jobs += mine
            if not build.only:
                links.append((build, plan["steps"][-1], [job for job in mine if job.trial is None]))
    jobs.sort(key=cost)
    fine = True
    for job in jobs:
        if _recorded(record, job, mode) is None and time.monotonic() < end:
            fine &= _do(found, microsoft, job, nvcc, stand_ins, record, mode)
    for build, step, whole in links:
        done = [_recorded(record, job, mode) for job in whole]
        together = _digest([entry.inputs for entry in done if entry is not None])
        linked = record.find((build.key, step["output"], ""), together)
        if all(entry is not None and entry.as_wanted for entry in done) and (linked is None or not linked.as_wanted):
            for job in whole:  # a plan made anew begins with an empty folder
                if not (job.folder / job.step["output"]).is_file():
                    fine &= _do(found, microsoft, job, nvcc, stand_ins, record, mode)
            fine &= _link(found, microsoft, build, step, whole, together, nvcc, stand_ins, record)
    left += [job.words for job in jobs if _recorded(record, job, PTX) is None]
    known = {job.key for job in jobs} | {(build.key, step["output"], "") for build, step, _ in links}
    asked = {job.build.key for job in jobs}
    record.entries = [entry for entry in record.entries if entry.key in known or entry.build not in asked]
    meant = {build.key for build in BUILDS if re.search(only, build.key)}
    record.not_compiled = left + [text for text in record.not_compiled if text.partition(": ")[0] not in meant]
    record.save()
    say(f"{len(jobs) - len(left)} of {len(jobs)} compiles are recorded in {record.path}; {len(left)} left")
    return fine


def _archive(found: Wine, build: Build, sources: Mapping[tuple[str, str], Path]) -> Path | None:
    if build.given:
        return sources.get((build.name, build.version))
    archive = found.layout.upstream / f"{build.name}-{build.version}.tar.gz"
    return archive if archive.is_file() else None


def _environment(
    found: Wine, microsoft: trees.MicrosoftTree, setting: str, nvcc: Path | None, stand_ins: Path
) -> dict[str, str]:
    chosen = SETTINGS[setting]
    tree = trees.cuda_tree(chosen.cuda, found.layout.root / "cuda", nvcc if chosen.cuda == "13.5" else None)
    base = product.environment(found, chosen.python)
    temporary = found.layout.root / "compile" / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    home = Path(found.layout.python(chosen.python))
    tools = microsoft.environment(first=(stand_ins,), programs=(home, home / "Scripts", tree / "bin"))
    return {
        **base,
        **tools,
        "CUDA_PATH": windows_path(tree),
        "TMP": windows_path(temporary),
        "TEMP": windows_path(temporary),
    }


def _plans(
    found: Wine, microsoft: trees.MicrosoftTree, setting: str, builds: Sequence[Build], nvcc: Path | None,
    stand_ins: Path, sources: Mapping[tuple[str, str], Path], record: Record,
) -> list[tuple[Build, Mapping[str, Any], Path]]:  # fmt: skip
    """Ask the product, in this setting's Windows Python, for every build, and for every build without each rule in turn.

    The answer is kept for as long as nothing of the product's native part changes.
    """
    root = found.layout.root / "compile"
    environment = _environment(found, microsoft, setting, nvcc, stand_ins)
    cuda = [int(part) for part in SETTINGS[setting].cuda.split(".")]

    def ask(cases: list[dict[str, Any]], label: str) -> dict[str, Any]:
        asked = json.dumps({"cuda": cuda, "architecture": ARCHITECTURE, "cases": cases})
        key = hashlib.sha256((asked + _product()).encode()).hexdigest()
        kept = root / f"plan-{setting}-{label}.json"
        if kept.is_file():
            saved: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
            if saved["key"] == key:
                return dict(saved["answer"])
        say(f"{setting}: planning {len(cases)} builds in Windows Python {SETTINGS[setting].python}")
        (root / "asked.json").write_text(asked, encoding="utf-8")
        runner.check(
            found.command(
                found.layout.python(SETTINGS[setting].python) / "python.exe",
                windows_path(HERE / "compile" / "planner.py"),
                windows_path(root / "asked.json"),
                windows_path(root / "answer.json"),
            ),
            "planning",
            environment=environment,
            timeout=900,
        )
        answer: dict[str, Any] = json.loads((root / "answer.json").read_text(encoding="utf-8"))
        kept.write_text(json.dumps({"key": key, "answer": answer}), encoding="utf-8")
        return answer

    def case(build: Build, without: str) -> dict[str, Any]:
        archive = _archive(found, build, sources)
        assert archive is not None
        folder = root / build.key / (without or "all")
        return {
            "name": build.name, "version": build.version, "source": windows_path(archive),
            "folder": windows_path(folder), "without": [without] if without else [],
        }  # fmt: skip

    whole = ask([case(build, "") for build in builds], "all")
    pairs = [
        (build, trial)
        for build, plan in zip(builds, whole["cases"])
        for trial in trials_of(build, tuple(plan["rules"]))
    ]
    lesser = ask([case(build, trial.rule) for build, trial in pairs], "trials") if pairs else {"cases": []}
    record.tools["nvcc"] = whole["nvcc"]
    found_plans = []
    for build, plan in zip(builds, whole["cases"]):
        plan["trials"] = [(trial, answer) for (other, trial), answer in zip(pairs, lesser["cases"]) if other == build]
        record.builds[build.key] = {
            "package": build.name, "version": build.version, "sources": re.sub(r"Z:\S*\\", "", plan["sources"]),
            "same_as_tag": plan["proved"], "python": SETTINGS[setting].python, "torch": whole["torch"],
            "cuda_headers": SETTINGS[setting].cuda, "standard": plan["standard"], "rules": plan["rules"],
        }  # fmt: skip
        found_plans.append((build, plan, root / build.key))
    return found_plans


def _product() -> str:
    files = sorted((REPOSITORY / "src" / "anymamba" / "upstream" / "native").rglob("*.py"))
    return "".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in [*files, HERE / "compile" / "planner.py"])


def _jobs(
    build: Build, plan: Mapping[str, Any], folder: Path, lab: Path, microsoft: trees.MicrosoftTree
) -> Iterator[Job]:
    def inputs(step: Mapping[str, Any], answer: Mapping[str, Any], option: str) -> str:
        """Without the names of this machine's folders."""
        facts = json.dumps([step["command"], answer["rules"], answer["edits"], option])
        for path, word in ((lab, "LAB"), (microsoft.programs, "MSVC")):
            facts = facts.replace(json.dumps(windows_path(path))[1:-1], word)
        return _digest([facts])

    for step in plan["steps"][:-1]:
        if build.wants(step["source"]):
            yield Job(build, step["source"], None, step, folder / "all", inputs(step, plan, ""))
    for trial, answer in plan["trials"]:
        for step in answer["steps"][:-1]:
            if build.wants(step["source"]) and re.search(trial.units, step["source"]):
                made_of = inputs(step, answer, trial.option)
                yield Job(build, step["source"], trial, step, folder / trial.rule, made_of)


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def in_mode(command: Sequence[str], unit: str, mode: str) -> list[str]:
    """Return a compiler's command line with the options of a mode, which are for device code alone."""
    if not unit.endswith(".cu") or mode == WHOLE:
        return list(command)
    if mode == PTX:
        command = [re.sub(r"(-gencode=arch=compute_\w+,code=)sm_(\w+)", r"\1compute_\2", word) for word in command]
    return [*command, "-G"]


def _mode_of(job: Job, asked: str) -> str:
    """Rules are left out, and C++ is compiled, by whole commands always: both end soon."""
    return asked if job.trial is None and job.unit.endswith(".cu") else WHOLE


def _inputs(job: Job, mode: str) -> str:
    return job.inputs if mode == WHOLE else _digest([job.inputs, mode])


def _recorded(record: Record, job: Job, mode: str) -> Entry | None:
    """Return the entry of a job, made as this mode makes it or with more."""
    for fuller in _MODES[: _MODES.index(_mode_of(job, mode)) + 1]:
        found = record.find(job.key, _inputs(job, fuller))
        if found is not None:
            return found
    return None


def _do(
    found: Wine, microsoft: trees.MicrosoftTree, job: Job, nvcc: Path | None, stand_ins: Path, record: Record, asked: str
) -> bool:  # fmt: skip
    """Compile, and record it unless as much or more of this unit is recorded (its object was wanted for a link)."""
    environment = _environment(found, microsoft, job.build.setting, nvcc, stand_ins)
    mode = _mode_of(job, asked)
    command = in_mode(job.step["command"], job.unit, mode)
    if job.trial is not None and job.trial.option:
        command.append(job.trial.option)
    said = units.run_step(found, command, job.folder, job.step["output"], environment, timeout=_TIMEOUT)
    (job.folder / f"{Path(job.unit).name}.log").write_text(said.output, encoding="utf-8")
    if job.trial is None:
        wanted, as_wanted = "compiles", said.ok
    else:
        wanted, as_wanted = job.trial.says, not said.ok and units.says(said.output, job.trial.says)
    _how(job).write_text(mode, encoding="utf-8")
    if _recorded(record, job, mode) is None:
        made_of, seconds = _inputs(job, mode), round(said.seconds, 1)
        record.add(Entry(*job.key, wanted, as_wanted, said.error, seconds, _today(), made_of, mode))
    verdict = "as it must" if as_wanted else "NOT AS IT MUST"
    say(
        f"{job.words}: {verdict}: {said.error or 'compiled'} ({' '.join(filter(None, [mode, f'{said.seconds:.0f} s']))})"
    )
    return as_wanted


def _how(job: Job) -> Path:
    """The file beside an object that says in which mode it was made."""
    return job.folder / f"{job.step['output']}.mode"


def _link(
    found: Wine, microsoft: trees.MicrosoftTree, build: Build, step: Mapping[str, Any], whole: Sequence[Job],
    inputs: str, nvcc: Path | None, stand_ins: Path, record: Record,
) -> bool:  # fmt: skip
    folder = found.layout.root / "compile" / build.key / "all"
    libraries = found.layout.python(SETTINGS[build.setting].python) / "Lib" / "site-packages" / "torch" / "lib"
    environment = _environment(found, microsoft, build.setting, nvcc, stand_ins)
    said, stood_in = units.link(found, step["command"], folder, step["output"], environment, libraries)
    (folder / "link.log").write_text(said.output, encoding="utf-8")
    made = [_how(job).read_text(encoding="utf-8") if _how(job).is_file() else "" for job in whole]
    notes = [f"{made.count(mode)} of its objects with {mode}" for mode in (DEBUG, PTX) if mode in made]
    if stood_in:
        notes.append(f"{len(stood_in)} names of c10_cuda.lib and torch_cuda.lib stood in for")
    note = "; ".join(notes)
    seconds, output = round(said.seconds, 1), step["output"]
    record.add(Entry(build.key, output, "", "links", said.ok, said.error, seconds, _today(), inputs, note))
    say(f"{build.key} {step['output']}: {'linked' if said.ok else said.error} ({note or 'nothing stood in for'})")
    return said.ok


def _today() -> str:
    return datetime.date.today().isoformat()
