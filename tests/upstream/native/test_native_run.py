"""Ninja over stand-in compilers: progress, a hang that is named, a build cut off and gone on with, memory that ran out."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import psutil
import pytest

from anymamba.upstream.native.commands import Step
from anymamba.upstream.native.ninja import write_ninja
from anymamba.upstream.native.run import Outcome, Snapshot, run_ninja

NINJA = shutil.which("ninja") or ""
pytestmark = pytest.mark.skipif(not NINJA, reason="needs ninja")
STANDIN = str(Path(__file__).with_name("standin.py"))


class Build:
    def __init__(self, folder: Path, sources: dict[str, str]) -> None:
        (folder / "obj").mkdir(parents=True)
        self.folder, self.log = folder, folder / "log"
        self.steps = []
        for name, text in sources.items():
            (folder / name).write_text(text, encoding="utf-8")
            output = f"obj/{name}.o"
            command = (sys.executable, STANDIN, str(folder / name), "-o", output)
            self.steps.append(Step(output, (str(folder / name),), command, name))
        objects = tuple(step.output for step in self.steps)
        self.steps.append(Step("all.so", objects, (sys.executable, STANDIN, *objects, "-o", "all.so")))
        write_ninja(folder, self.steps, windows=sys.platform == "win32")

    def run(self, **options: object) -> Outcome:
        options = {"jobs": 2, "hang_seconds": 60, "poll_seconds": 0.1, **options}
        return run_ninja(NINJA, self.folder, self.steps, self.log, **options)  # type: ignore[arg-type]

    def runs(self, name: str) -> int:
        count = self.folder / "obj" / f"{name}.o.runs"
        return int(count.read_text(encoding="utf-8")) if count.exists() else 0


def test_progress_counts_and_names_what_is_being_compiled(tmp_path: Path) -> None:
    build = Build(tmp_path / "a b", {"one.cu": "// standin: sleep 0.3", "two.cu": "// standin: sleep 3", "c.cpp": ""})
    seen: list[Snapshot] = []
    outcome = build.run(report=seen.append)
    assert outcome.code == 0 and not outcome.killed and outcome.peak_bytes > 0
    assert (tmp_path / "a b" / "all.so").exists()
    assert {name for snapshot in seen for name in snapshot.current} >= {"one.cu", "two.cu"}
    assert seen[-1].total == 4 and any(snapshot.remaining for snapshot in seen)
    assert b"[4/4] all.so" in build.log.read_bytes()


def test_a_hang_is_named_and_nothing_is_left_running(tmp_path: Path) -> None:
    build = Build(tmp_path / "b", {"good.cu": "", "bad.cu": "// standin: hang 9"})
    outcome = build.run(hang_seconds=1.5)
    assert outcome.hang is not None
    assert outcome.hang.source == "bad.cu" and "python" in outcome.hang.process.lower() and outcome.hang.cause
    assert not psutil.pid_exists(outcome.hang.pid) or psutil.Process(outcome.hang.pid).status() == psutil.STATUS_ZOMBIE
    assert (tmp_path / "b" / "obj" / "good.cu.o").exists()


def started(others: list[psutil.Process] | None = None) -> list[psutil.Process]:
    """Return the processes below this one, without those that other tests left (a resource tracker, say)."""
    return [process for process in psutil.Process().children(recursive=True) if process not in (others or [])]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot stop a process so")
def test_a_stopped_compiler_is_named_as_stopped(tmp_path: Path) -> None:
    outcome = Build(tmp_path / "b", {"bad.cu": "// standin: stop"}).run(hang_seconds=1)
    assert outcome.hang is not None and "stopped" in outcome.hang.cause


def test_hard_work_in_silence_is_no_hang(tmp_path: Path) -> None:
    build = Build(tmp_path / "b", {"slow.cu": "// standin: work 2.5"})
    outcome = build.run(hang_seconds=1.5)
    assert outcome.hang is None and outcome.code == 0


def test_ctrl_c_ends_the_whole_tree_and_the_next_run_makes_only_what_is_missing(tmp_path: Path) -> None:
    build = Build(tmp_path / "b", {"done.cu": "", "cut.cu": "// standin: sleep 3"})
    tree: list[psutil.Process] = []
    others = started()

    def interrupt(snapshot: Snapshot) -> None:
        tree[:] = started(others)
        if snapshot.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build.run(report=interrupt)
    _, alive = psutil.wait_procs(tree, timeout=2)
    assert tree and not alive
    (tmp_path / "b" / "cut.cu").write_text("", encoding="utf-8")
    seen: list[Snapshot] = []
    assert build.run(report=seen.append).code == 0
    assert build.runs("done.cu") == 1 and build.runs("cut.cu") == 2
    assert seen[0].total == 2  # that object and the link


def test_a_ninja_that_was_killed_outright_leaves_a_build_that_goes_on(tmp_path: Path) -> None:
    build = Build(tmp_path / "b", {"done.cu": "", "cut.cu": "// standin: sleep 30"})

    def kill(snapshot: Snapshot) -> None:
        if snapshot.done:
            for child in psutil.Process().children():
                if "ninja" in child.name():
                    for compiler in child.children(recursive=True):
                        compiler.kill()
                    child.kill()

    start = time.monotonic()
    assert build.run(report=kill).code != 0
    assert time.monotonic() - start < 20
    (tmp_path / "b" / "cut.cu").write_text("", encoding="utf-8")
    assert build.run().code == 0 and build.runs("done.cu") == 1


def test_failures_and_processes_ended_for_memory_are_told_apart(tmp_path: Path) -> None:
    wrong = Build(tmp_path / "a", {"x.cu": "// standin: say x.cu(1): error: nothing\n// standin: fail"}).run()
    assert wrong.code != 0 and not wrong.killed and wrong.failed == ["obj/x.cu.o"]
    killed = Build(tmp_path / "b", {"x.cu": "// standin: killed 9"}).run()
    assert killed.code != 0 and killed.killed


def test_a_changed_header_compiles_again_and_an_unchanged_one_does_not(tmp_path: Path) -> None:
    build = Build(tmp_path / "b", {"x.cu": ""})
    header = tmp_path / "b" / "x.cuh"
    header.write_text("", encoding="utf-8")
    first = build.steps[0]
    build.steps[0] = Step(first.output, (*first.inputs, str(header)), first.command, first.source)
    write_ninja(build.folder, build.steps, windows=sys.platform == "win32")
    assert build.run().code == 0 and build.run().code == 0 and build.runs("x.cu") == 1
    later = time.time() + 5
    import os

    os.utime(header, (later, later))
    assert build.run().code == 0 and build.runs("x.cu") == 2


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_a_polite_kill_ends_the_compilers_as_ctrl_c_does(tmp_path: Path) -> None:
    import os
    import signal

    tree: list[psutil.Process] = []
    others = started()

    def kill(snapshot: Snapshot) -> None:
        tree[:] = started(others)
        if snapshot.current:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        Build(tmp_path / "b", {"x.cu": "// standin: sleep 30"}).run(report=kill)
    _, alive = psutil.wait_procs(tree, timeout=2)
    assert len(tree) > 1 and not alive and signal.getsignal(signal.SIGTERM) is before
