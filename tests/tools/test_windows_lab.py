"""The laboratory's own parts, without wine: what a Windows run rests on."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tools.windows_lab import choice, commands, forwarder, junit, product, runner, suite, wine
from tools.windows_lab.interpreters import CRT, INTERPRETERS, NVRTCS, interpreter
from tools.windows_lab.layout import REPOSITORY, Layout, default_root
from tools.windows_lab.prepare import Steps
from tools.windows_lab.turns import Turn

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Not asked of /proc: a Windows Python under wine sees the machine's.
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="the laboratory runs on Linux alone")


# --- layout


def test_the_folder_is_the_users_choice_and_never_in_the_repository(tmp_path: Path) -> None:
    assert default_root({"ANYMAMBA_WINDOWS_LAB": str(tmp_path)}) == tmp_path.resolve()
    assert default_root({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "anymamba" / "windows_lab"
    assert REPOSITORY not in default_root({}).parents


# --- the lock files


@pytest.mark.parametrize("chosen", INTERPRETERS, ids=lambda i: i.version)
def test_a_lock_file_has_what_the_product_asks_for(chosen: object) -> None:
    locked = _locked(chosen.lock)  # type: ignore[attr-defined]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    environment = {
        "python_version": chosen.version,  # type: ignore[attr-defined]
        "sys_platform": "win32",
        "platform_system": "Windows",
        "os_name": "nt",
    }
    asked = [*project["dependencies"], *project["optional-dependencies"]["cpu"], *chosen.extra]  # type: ignore[attr-defined]
    for text in asked:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = requirement.name.lower()
            assert name in locked, f"{text}: run `python -m tools.windows_lab lock`"
            assert requirement.specifier.contains(locked[name], prereleases=True), text


def test_every_download_is_pinned_by_its_hash() -> None:
    for pinned in (CRT, *NVRTCS.values(), *(i.distribution for i in INTERPRETERS)):
        assert "==" in pinned.requirement
        assert re.fullmatch(r"[0-9a-f]{64}", pinned.sha256)
    for chosen in INTERPRETERS:
        text = chosen.lock.read_text(encoding="utf-8")
        assert len(re.findall(r"^\S+==", text, re.MULTILINE)) == len(
            re.findall(r"^\S+==\S+ \\\n +--hash", text, re.MULTILINE)
        )
        assert "://" not in text


def test_the_guides_pair_is_the_first_interpreter() -> None:
    assert _locked(interpreter("3.10").lock)["torch"] == Version("2.1.1")
    with pytest.raises(KeyError, match=r"no Windows Python 2\.7"):
        interpreter("2.7")


def _locked(lock: Path) -> dict[str, Version]:
    pairs = re.findall(r"^([A-Za-z0-9_.-]+)==(\S+) \\$", lock.read_text(encoding="utf-8"), re.MULTILINE)
    return {name.lower(): Version(version) for name, version in pairs}


# --- the process runner


@needs_proc
def test_output_and_exit_code_come_back() -> None:
    seen: list[str] = []
    outcome = runner.run([sys.executable, "-c", "print('one\\r'); raise SystemExit(3)"], on_text=seen.append)
    assert (outcome.returncode, outcome.output, outcome.ok) == (3, "one\n", False)
    assert "".join(seen) == "one\n"


@needs_proc
def test_a_descendant_that_keeps_the_pipe_open_does_not_hold_the_run_up() -> None:
    script = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print('done')"
    )
    start = time.monotonic()
    outcome = runner.run([sys.executable, "-c", script], timeout=60)
    assert outcome.ok
    assert "done" in outcome.output
    assert time.monotonic() - start < 30


@needs_proc
def test_a_time_limit_ends_the_whole_tree_even_what_left_the_session(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    grandchild = f"import os, time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(60)"
    child = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {grandchild!r}], start_new_session=True)\n"
        "print('started', flush=True); time.sleep(60)\n"
    )
    outcome = runner.run([sys.executable, "-c", child], timeout=4)
    assert outcome.timed_out
    assert not outcome.ok
    assert "started" in outcome.output
    (pid,) = pids.read_text(encoding="utf-8").split()
    for _ in range(50):
        if not _alive(int(pid)):
            break
        time.sleep(0.1)
    assert not _alive(int(pid))


def _alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


@needs_proc
def test_a_failed_step_tells_the_command_and_its_last_words() -> None:
    with pytest.raises(runner.CommandError, match=r"(?s)counting sheep: .* ended with 5 after .*baa"):
        runner.check([sys.executable, "-c", "print('baa'); raise SystemExit(5)"], "counting sheep")


@needs_proc
def test_a_command_that_is_told_to_end_ends_its_runs_first(tmp_path: Path) -> None:
    """A thread that waits for a run would wait to its end; SIGTERM is what dev.py sends."""
    script = (
        "import sys, threading\nfrom tools.windows_lab import commands, prepare, runner\n"
        "def test(*_):\n"
        "    runs = threading.Thread(target=runner.run, args=([sys.executable, '-c', 'import time; time.sleep(100)'],))\n"
        "    runs.start(); print('running', flush=True); runs.join(); return 0\n"
        "class Ready:\n"
        "    def __enter__(self): return None\n"
        "    def __exit__(self, *_): pass\n"
        "prepare.ready = lambda *_, **__: Ready()\n"
        "commands._test = test\n"
        "sys.exit(commands.main(['test']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "ANYMAMBA_WINDOWS_LAB": str(tmp_path)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        time.sleep(0.5)  # the thread's process is to be there
        process.terminate()
        assert process.wait(20) == 130
        assert "stopped" in process.stdout.read()


# --- steps


def test_a_step_is_done_once_for_its_inputs_and_again_after_a_failure(tmp_path: Path) -> None:
    done: list[str] = []

    def fails() -> None:
        raise OSError("no space")

    for inputs in ("a", "a", "b", "b"):
        Steps(Layout(tmp_path)).step("s", inputs, lambda inputs=inputs: done.append(inputs))
    assert done == ["a", "b"]
    with pytest.raises(OSError, match="no space"):
        Steps(Layout(tmp_path)).step("s", "c", fails)
    Steps(Layout(tmp_path)).step("s", "b", lambda: done.append("again"))
    assert done == ["a", "b", "again"]


# --- the DLL without code


def test_the_forwarder_is_a_dll_whose_export_leads_elsewhere() -> None:
    data = forwarder.dll("b.dll", {"Two": "other.Second", "One": "other.First"})
    (pe,) = struct.unpack_from("<I", data, 0x3C)
    assert data[:2] == b"MZ"
    assert data[pe : pe + 4] == b"PE\0\0"
    machine, sections = struct.unpack_from("<HH", data, pe + 4)
    assert (machine, sections) == (0x8664, 1)
    rva, size = struct.unpack_from("<II", data, pe + 24 + 112)

    def at(address: int) -> int:
        return address - 0x1000 + 0x200

    def text(address: int) -> str:
        return data[at(address) : data.index(b"\0", at(address))].decode()

    name, _, functions, names, addresses, name_table, ordinals = struct.unpack_from("<IIIIIII", data, at(rva) + 12)
    assert (text(name), functions, names) == ("b.dll", 2, 2)
    found = {}
    for i in range(names):
        (name_rva,) = struct.unpack_from("<I", data, at(name_table) + 4 * i)
        (ordinal,) = struct.unpack_from("<H", data, at(ordinals) + 2 * i)
        (target,) = struct.unpack_from("<I", data, at(addresses) + 4 * ordinal)
        assert rva <= target < rva + size  # inside the directory: a forwarder's text, not code
        found[text(name_rva)] = text(target)
    assert found == {"One": "other.First", "Two": "other.Second"}
    assert list(found) == sorted(found)  # Windows searches the names by halves


def test_too_many_exports_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        forwarder.dll("b.dll", {f"Function{i:04d}": "other.Function" for i in range(200)})


# --- results

XML = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest">
<testcase classname="tests.a" name="good" time="1.5"/>
<testcase classname="tests.a" name="bad" time="0.5"><failure message="assert 1 == 2">def test():
&gt;   assert 1 == 2
E   assert 1 == 2</failure></testcase>
<testcase classname="" name="tests.b" time="0"><error message="collection failure">E   ImportError: first
During handling of the above exception, another exception occurred:
E   ImportError: second</error></testcase>
<testcase classname="tests.a" name="skipped" time="0"><skipped type="pytest.skip" message="wine 8 lacks it"/></testcase>
<testcase classname="tests.a" name="known" time="0"><skipped type="pytest.xfail" message="later"/></testcase>
</testsuite></testsuites>"""


def test_counts_failures_and_reasons_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r.xml"
    path.write_text(XML, encoding="utf-8")
    counts = junit.read(path)
    assert (counts.passed, counts.failed, counts.errors, counts.skipped, counts.xfailed) == (1, 1, 1, 1, 1)
    assert counts.total == 5
    assert counts.seconds == 2.0
    assert counts.bad == ("tests.a::bad: assert 1 == 2", "::tests.b: ImportError: second")
    assert counts.skips == {"wine 8 lacks it": 1}
    assert not counts.ok
    assert not junit.Counts(skipped=5).ok
    assert junit.Counts(passed=1).ok


def test_the_table_puts_the_runs_side_by_side() -> None:
    lines = junit.table({"Linux": None, "Windows 3.10": junit.Counts(passed=12, skipped=1, seconds=3.4)}).splitlines()
    assert lines[0].split("|") == ["        ", " Linux ", " Windows 3.10"]
    assert [part.strip() for part in lines[2].split("|")] == ["passed", "-", "12"]
    assert [part.strip() for part in lines[-2].split("|")] == ["total", "-", "13"]
    assert len({len(line) for line in lines}) == 1


def test_counts_and_reasons_are_recorded_for_the_documents() -> None:
    skipped = junit.Counts(passed=3, failed=1, errors=1, skipped=2, skips={"wine 8 lacks it": 2})
    document = json.loads(junit.document({"Linux": None, "Windows 3.10": skipped}))
    run = {"python": "Windows 3.10", "passed": 3, "failed": 2, "skipped": 2, "skips": {"wine 8 lacks it": 2}}
    assert document["runs"] == [{**run, "seconds": 0, "files": {}}]


def test_each_files_tests_and_seconds_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "r.xml"
    path.write_text(XML.replace("tests.a", "tests.ops.test_a.TestClass"), encoding="utf-8")
    counts = junit.read(path)
    assert counts.files == {"tests/ops/test_a.py": (3, 2.0)}  # the skipped one cost nothing and says nothing
    text = junit.document({"Linux": counts}, {"commit": "abc"})
    assert json.loads(text)["commit"] == "abc"
    assert '"tests/ops/test_a.py": [3, 2.0]' in text


# --- runs of limited time


def test_cheap_and_unknown_files_come_first_then_what_is_named_then_the_rest(tmp_path: Path) -> None:
    for name in ("windows/test_w", "ops/test_dear", "ops/test_cheap", "ops/test_new"):
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / f"{name}.py").write_text("", encoding="utf-8")
    runs = [
        {"python": "Windows 3.10", "files": {"tests/ops/test_dear.py": [2, 1.0], "tests/ops/test_cheap.py": [10, 9.0]}},
        {"python": "Windows 3.12", "files": {"tests/ops/test_dear.py": [2, 8.0], "tests/ops/test_cheap.py": [10, 8.0]}},
        {"python": "Linux", "files": {"tests/ops/test_cheap.py": [1, 100.0]}},
    ]
    record = tmp_path / "windows.json"
    record.write_text(json.dumps({"runs": runs}), encoding="utf-8")
    files = choice.ordered(["tests/windows"], tmp_path, record)
    assert files == ["tests/ops/test_new.py", "tests/ops/test_cheap.py", "tests/windows", "tests/ops/test_dear.py"]


def test_no_test_begins_after_the_time_is_up(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(
        "import time\ndef test_first(): time.sleep(0.3)\ndef test_second(): pass\n", encoding="utf-8"
    )
    path = tmp_path / "r.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", os.devnull,
         "--confcutdir", str(tmp_path), "-p", "conftest", "--minutes=0.004", f"--junitxml={path}", str(tmp_path)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY / "tests")}, check=False, capture_output=True,
    )  # fmt: skip
    counts = junit.read(path)
    assert (counts.passed, counts.skips) == (1, {"not begun: the time that --minutes allows is up": 1})


def test_an_interpreter_that_dies_is_a_failure_with_its_last_words(tmp_path: Path) -> None:
    outcome = runner.Outcome(("python",), 5, "Fatal Python error\n", 1.0, timed_out=False)
    result = suite.Result(None, outcome, tmp_path / "log")
    assert not result.ok
    (complaint,) = suite.complaints({"Linux": None, "Windows 3.10": result})
    assert "ended with 5 and wrote no result" in complaint
    assert "Fatal Python error" in complaint


def test_a_run_of_no_tests_is_no_success(tmp_path: Path) -> None:
    outcome = runner.Outcome(("python",), 0, "", 1.0, timed_out=False)
    result = suite.Result(junit.Counts(skipped=3), outcome, tmp_path / "log")
    assert not result.ok
    assert "no test passed" in suite.complaints({"Windows 3.10": result})[0]


# --- without wine


@pytest.mark.parametrize(
    ("words", "code"), [(["setup"], 3), (["test"], 0), (["test", "--require"], 3), (["shell", "--", "cmd"], 3)]
)
def test_without_wine_one_plain_line_says_so(
    words: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANYMAMBA_WINDOWS_LAB", str(tmp_path))
    monkeypatch.setattr(wine, "_DEBIAN_LOADER", tmp_path / "none")
    monkeypatch.setattr(wine, "_DEBIAN_SERVER", tmp_path / "none")
    monkeypatch.setattr(wine, "_which", lambda name: None)
    monkeypatch.setattr(wine.platform, "system", lambda: "Linux")
    monkeypatch.setattr(wine.platform, "machine", lambda: "x86_64")
    assert commands.main(words) == code
    assert capsys.readouterr().out.splitlines() == [
        "windows-lab: not run: wine is not installed and there is no apt-get here; install wine by hand and call again"
    ]


def test_another_system_is_told_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANYMAMBA_WINDOWS_LAB", str(tmp_path))
    monkeypatch.setattr(wine.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(wine.platform, "machine", lambda: "arm64")
    assert commands.main(["setup"]) == 3
    assert "needs Linux on x86-64; this is Darwin on arm64" in capsys.readouterr().out


@needs_proc
def test_a_windows_process_sees_the_laboratory_and_nothing_of_this_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("PIP_INDEX_URL", "somewhere")
    monkeypatch.setenv("ANYMAMBA_BACKEND", "torch")
    found = wine.Wine(Path("wine64"), Path("wineserver"), Layout(tmp_path))
    environment = product.environment(found, "3.10", REPOSITORY)
    assert "PIP_INDEX_URL" not in environment
    assert "ANYMAMBA_BACKEND" not in environment
    assert environment["PIP_NO_INDEX"] == "1"
    assert environment["PYTHONPATH"].startswith("Z:\\")
    assert environment["WINEPREFIX"] == str(tmp_path / "prefix")


@pytest.mark.skipif(os.name == "nt", reason="names of this machine's files for Windows")
def test_a_file_of_this_machine_has_a_name_on_the_windows_side(tmp_path: Path) -> None:
    assert wine.windows_path(Path("/a b/中")) == "Z:\\a b\\中"


@needs_proc
def test_both_ways_of_calling_it_are_the_same() -> None:
    for words in (["-m", "tools.windows_lab"], ["tools/windows_lab"]):
        outcome = runner.run([sys.executable, *words, "--help"], cwd=REPOSITORY, timeout=60)
        assert outcome.ok, outcome.output
        assert "setup" in outcome.output


# --- several commands at once


@needs_proc
def test_a_change_waits_for_runs_and_runs_do_not_wait_for_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = Layout(tmp_path)
    script = (
        "import sys, pathlib\n"
        "from tools.windows_lab.layout import Layout\nfrom tools.windows_lab.turns import Turn\n"
        f"with Turn(Layout(pathlib.Path({str(tmp_path)!r}))) as turn:\n"
        "    print('running', flush=True)\n"
        "    turn.alone()\n"
    )
    with Turn(layout):
        change = subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        assert change.stdout is not None
        assert change.stdout.readline() == "running\n"  # beside ours
        assert "waiting for another command" in change.stdout.readline()
        assert change.poll() is None
    assert change.wait(30) == 0
    change.stdout.close()
    assert capsys.readouterr().out == ""


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    steps = Steps(Layout(tmp_path), dry=True)
    steps.step("s", "a", lambda: pytest.fail("it was done"))
    assert steps.done == ["s"]
    assert list(tmp_path.iterdir()) == []
