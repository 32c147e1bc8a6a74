"""Installing into a real environment: done, or exactly as before, whatever happens; and taken back.

The environments are virtual ones that see this interpreter's torch and pip; the packages are the small stand-ins.
"""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import anymamba
from anymamba.errors import (
    EnvironmentLockedError,
    InstallError,
    NotWritableError,
    PatchError,
    VerificationFailedError,
)
from anymamba.upstream import making, transaction
from anymamba.upstream.environment import WHEN_TOLD, inspect_environment
from anymamba.upstream.footprint import footprint
from anymamba.upstream.index import Index
from anymamba.upstream.pip_settings import PipSettings
from anymamba.upstream.plan import PackagePlan, Plan, make_plan
from anymamba.upstream.progress import Silent
from anymamba.upstream.state import FOLDER, State
from anymamba.upstream.transaction import install, uninstall
from small_upstream import make_environment, site_packages, write_sdist

BOTH = ["causal_conv1d==99.0", "mamba_ssm==99.0"]
STATE_FILES = {"lock"}


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archives")
    for name in ("mamba_ssm", "causal_conv1d"):
        write_sdist(folder, name)
    return folder


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archives: Path) -> Path:
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(archives))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("ANYMAMBA_BACKEND", "torch")  # the proof need not compile kernels for this
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "elsewhere"))  # the user's settings must not divert us
    return make_environment(tmp_path / "my env 环境")


@pytest.fixture
def quick_pip(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpack wheels as pip would; some tests use pip itself."""

    def unpack(_: str, wheels: list[Path], state: State) -> None:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as zipped:
                zipped.extractall(site_packages(python))

    monkeypatch.setattr(transaction, "_pip_install", unpack)


@pytest.fixture
def plan(python: Path, archives: Path) -> Plan:
    with Index(PipSettings(no_index=True, find_links=(str(archives),))) as index:
        return make_plan(BOTH, python, index=index)


def _content(python: Path) -> dict[str, bytes]:
    """Every file of site-packages but the state folder's lock."""
    site = site_packages(python)
    files = {path.relative_to(site).as_posix(): path for path in site.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name != f"{FOLDER}/lock"}


def _foreign_package(python: Path) -> None:
    """A mamba_ssm built the old way: an extension, a script's folder, compiled files."""
    site = site_packages(python)
    texts = {
        "mamba_ssm/__init__.py": "built = 'by the user'\n",
        "mamba_ssm/__pycache__/__init__.cpython-00.pyc": "compiled\n",
        "selective_scan_cuda.cpython-00-x86_64.so": "machine code\n",
        "mamba_ssm-2.2.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: mamba-ssm\nVersion: 2.2.2\n",
        "mamba_ssm-2.2.2.dist-info/RECORD": "mamba_ssm/__init__.py,,\n../../../bin/mamba-tool,,\n",
    }
    for name, text in texts.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())


def _holds(python: str, versions: dict[str, str]) -> dict[str, Any]:
    return {"versions": versions}


def _fails(python: str, versions: dict[str, str]) -> dict[str, Any]:
    raise VerificationFailedError("It does not work.")


def test_an_install_puts_both_packages_there(python: Path, plan: Plan) -> None:
    done = install(plan, prove=_holds)
    assert done.packages == {"causal_conv1d": "99.0+anymamba.1", "mamba_ssm": "99.0+anymamba.1"}
    installed = inspect_environment(python).installed
    kinds = {name: (there.version, there.kind) for name, there in installed.items()}
    assert kinds == dict.fromkeys(done.packages, ("99.0+anymamba.1", "port"))
    check = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    # where anymamba is not itself installed but on the path, pip says that alone
    complaints = [line for line in check.stdout.splitlines() if "99.0" in line and "requires anymamba" not in line]
    assert complaints == []
    frozen = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
    assert "mamba_ssm==99.0+anymamba.1" in frozen.replace("mamba-ssm", "mamba_ssm")


def test_the_real_proof_runs_in_a_fresh_process_and_its_failure_restores_everything(python: Path, plan: Plan) -> None:
    _foreign_package(python)
    before = _content(python)
    # the stand-in lacks what the guide's script imports
    with pytest.raises(VerificationFailedError, match="put back"):
        install(plan)
    assert _content(python) == before


@pytest.mark.parametrize("error", [VerificationFailedError("no"), KeyboardInterrupt()])
def test_whatever_ends_an_install_early_leaves_the_environment_as_it_was(
    python: Path, plan: Plan, quick_pip: None, error: BaseException
) -> None:
    def prove(python: str, versions: dict[str, str]) -> dict[str, Any]:
        raise error

    _foreign_package(python)
    before = _content(python)
    with pytest.raises(type(error)):
        install(plan, prove=prove)
    assert _content(python) == before


def test_pip_failing_leaves_the_environment_as_it_was(
    python: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_wheel(name: str, version: str, sha256: str | None, archive: Path, folder: Path) -> Path:
        folder.mkdir(parents=True)
        wheel = folder / "mamba_ssm-99.0-py3-none-any.whl"
        wheel.write_bytes(b"no zip")
        return wheel

    monkeypatch.setattr(making, "make_wheel", no_wheel)
    _foreign_package(python)
    before = _content(python)
    with pytest.raises(InstallError, match="pip could not install"):
        install(plan, prove=_holds)
    assert _content(python) == before


@pytest.mark.parametrize(
    ("error", "why", "next_step"),
    [
        ("error: externally-managed-environment\n", "owns this Python", "venv"),
        ("OSError: [Errno 28] No space left on device\n", "disk is full", "pip cache purge"),
        ("something nobody has seen\n", "something nobody has seen", "anymamba doctor"),
    ],
)
def test_a_step_that_fails_ends_with_the_known_fault_in_what_the_program_said(
    python: Path, monkeypatch: pytest.MonkeyPatch, error: str, why: str, next_step: str
) -> None:
    failed = subprocess.CompletedProcess(["pip"], 1, "", error)
    monkeypatch.setattr(transaction, "run_in", lambda *_, **__: failed)
    state = transaction.State(transaction.inspect_environment(python))
    with pytest.raises(InstallError) as caught:
        transaction._pip_install(str(python), [Path("mamba_ssm-99.0-py3-none-any.whl")], state)
    assert why in caught.value.why
    assert next_step in caught.value.next_step
    with pytest.raises(VerificationFailedError) as proof:
        transaction.prove(str(python), {"mamba_ssm": "99.0"})
    assert why in proof.value.why


def test_a_patch_that_does_not_fit_is_found_before_anything_is_touched(
    python: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(*_: object) -> None:
        raise PatchError("moved")

    monkeypatch.setattr(making, "build_port", moved)
    before = _content(python)
    with pytest.raises(PatchError):
        install(plan, prove=_holds)
    assert _content(python) == before


def test_uninstall_restores_what_was_there_before_the_first_port(python: Path, plan: Plan, quick_pip: None) -> None:
    _foreign_package(python)
    before = _content(python)
    install(plan, prove=_holds)
    install(plan, prove=_holds)  # a port over a port: the user's own stays remembered
    assert "built" not in _content(python)["mamba_ssm/__init__.py"].decode()
    restored = uninstall(python)
    assert "mamba_ssm" in restored["mamba_ssm"] and restored["causal_conv1d"] == []
    assert _content(python) == before


def test_uninstall_without_an_install_is_an_error(python: Path) -> None:
    _foreign_package(python)
    before = _content(python)
    with pytest.raises(InstallError, match="Nothing of anymamba's"):
        uninstall(python)
    assert _content(python) == before


def test_uninstall_cut_off_is_undone(
    python: Path, plan: Plan, quick_pip: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _foreign_package(python)
    install(plan, prove=_holds)
    before = _content(python)
    rename = State._rename
    for last in (1, 3, 6, 8):
        left = [last]

        def cut(self: State, source: str, target: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            rename(self, source, target)

        with monkeypatch.context() as cutting:
            cutting.setattr(State, "_rename", cut)
            with pytest.raises(KeyboardInterrupt):
                uninstall(python)
        assert _content(python) == before


class _Killed(BaseException):
    pass


def test_a_kill_at_any_step_is_healed_by_the_next_command(
    python: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, quick_pip: None
) -> None:
    """As if the process died at each write and each rename in turn: nothing after that point runs."""
    _foreign_package(python)
    before = _content(python)
    rename, write, undo = State._rename, State._write, State._undo
    folder = python.parent / "wheels"
    wheels = [making.make_wheel(p.name, p.version, p.sha256, _archive(p), folder / p.name) for p in plan.packages]
    monkeypatch.setattr(transaction, "make_wheels", lambda *_: wheels)
    point = steps = 0

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == point:
                raise _Killed
            return function(*arguments)

        return wrapped

    points = 0
    for point in range(1, 40):
        steps = 0
        with monkeypatch.context() as dying_process:
            dying_process.setattr(State, "_rename", dying(rename))
            dying_process.setattr(State, "_write", staticmethod(dying(write)))
            dying_process.setattr(State, "_undo", lambda *_: None)
            dying_process.setattr(transaction, "_pip_install", dying(transaction._pip_install))
            try:
                install(plan, prove=dying(_holds))
            except _Killed:
                points += 1
            else:
                break
        assert State._undo is undo
        with State(inspect_environment(python)).locked():
            pass  # taking the lock heals
        assert _content(python) == before, f"killed at step {point}"
    assert points >= 7
    uninstall(python)
    assert _content(python) == before


def _archive(package: PackagePlan) -> Path:
    """Return the package's archive, fetched into the cache from the folder that the plan found it in."""
    with Index(PipSettings(no_index=True, find_links=(os.environ["PIP_FIND_LINKS"],))) as index:
        return index.download(index.find(package.name)[0], None, Silent())


_VICTIM = """
import os, sys
from pathlib import Path
from anymamba.upstream.plan import Plan
from anymamba.upstream import making, transaction

def prove(python, versions):
    os._exit(9)

transaction.install(Plan.from_json(Path(sys.argv[1]).read_text(encoding="utf-8")), prove=prove)
"""


_QUICK_PIP = """
import zipfile

def unpack(python, wheels, state):
    site = Path(Plan.from_json(Path(sys.argv[1]).read_text(encoding="utf-8")).site_packages)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as zipped:
            zipped.extractall(site)

transaction._pip_install = unpack
transaction.install("""


def test_a_killed_process_is_healed_by_the_next_install(
    python: Path, plan: Plan, tmp_path: Path, quick_pip: None
) -> None:
    _foreign_package(python)
    before = _content(python)
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(plan.to_json()), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(Path(anymamba.__file__).parents[1])}
    victim = _VICTIM.replace("transaction.install(", _QUICK_PIP)
    died = subprocess.run([sys.executable, "-c", victim, str(saved)], env=environment, check=False)
    assert died.returncode == 9
    assert "built" not in _content(python)["mamba_ssm/__init__.py"].decode()
    install(plan, prove=_holds)
    uninstall(python)
    assert _content(python) == before


@pytest.mark.slow
def test_kills_at_random_moments_never_leave_anything_in_between(python: Path, plan: Plan, tmp_path: Path) -> None:
    """Real processes, real pip, killed at random moments: afterwards all is as before, or as after."""
    _foreign_package(python)
    before = _content(python)
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(plan.to_json()), encoding="utf-8")
    install_it = _VICTIM.replace("os._exit(9)", "return {}")
    environment = {**os.environ, "PYTHONPATH": str(Path(anymamba.__file__).parents[1])}
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", install_it, str(saved)], env=environment, check=True)
    whole = time.monotonic() - started
    uninstall(python)
    dice = random.Random(0)
    cut = 0
    kills = int(os.environ.get("ANYMAMBA_KILLS", "50"))
    for _ in range(kills):
        victim = subprocess.Popen([sys.executable, "-c", install_it, str(saved)], env=environment)
        time.sleep(whole * dice.uniform(0.2, 1.0))
        victim.kill()
        finished = victim.wait() == 0
        state = State(inspect_environment(python))
        cut += state.broken
        with state.locked():
            pass  # what every next command does
        installed = inspect_environment(python).installed
        kinds = {name: there.kind for name, there in installed.items()}
        if finished or "port" in kinds.values():
            assert kinds == {"causal_conv1d": "port", "mamba_ssm": "port"}
            uninstall(python)
        assert _content(python) == before
    print(f"{kills} kills, {cut} of them within the change itself")
    assert cut > 0, "no kill fell into the change itself"


def test_pip_does_nothing_when_its_starter_is_gone(python: Path) -> None:
    before = _content(python)
    orphan = [python, "-c", WHEN_TOLD, "pip", "install", "--no-index", "anything"]
    ended = subprocess.run(orphan, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert "is gone" in ended.stderr
    assert _content(python) == before


def test_a_killed_installs_pip_is_ended_before_healing(
    python: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    _foreign_package(python)
    before = _content(python)
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def killed(_: str, wheels: list[Path], state: State) -> None:
        state.working(sleeper.pid)
        raise _Killed

    try:
        with monkeypatch.context() as dying_process:
            dying_process.setattr(State, "_undo", lambda *_: None)
            dying_process.setattr(transaction, "_pip_install", killed)
            with pytest.raises(_Killed):
                install(plan, prove=_holds)
        with State(inspect_environment(python)).locked():
            assert not psutil.pid_exists(sleeper.pid) or sleeper.poll() is not None
        assert _content(python) == before
    finally:
        sleeper.kill()
        sleeper.wait()


def test_two_installs_at_once_do_not_mix(python: Path, plan: Plan, quick_pip: None) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(python: str, versions: dict[str, str]) -> dict[str, Any]:
        inside.set()
        go_on.wait(30)
        return {}

    first = threading.Thread(target=install, args=(plan,), kwargs={"prove": slow})
    first.start()
    try:
        assert inside.wait(60)
        started = time.monotonic()
        with pytest.raises(EnvironmentLockedError):
            install(plan, prove=_holds)
        assert time.monotonic() - started < 30
    finally:
        go_on.set()
        first.join()
    assert inspect_environment(python).installed["mamba_ssm"].kind == "port"


def test_a_site_packages_that_cannot_be_written_is_named(
    python: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a file in the place of the state folder: the same for every account, root included
    (site_packages(python) / FOLDER).write_text("", encoding="utf-8")
    with pytest.raises(NotWritableError, match="cannot be"):
        install(plan, prove=_holds)


def test_files_in_use_stop_the_install_and_nothing_is_moved(
    python: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    _foreign_package(python)
    before = _content(python)
    rename = Path.rename

    def locked(self: Path, target: str | Path) -> Path:
        if self.suffix == ".so":
            raise PermissionError(13, "The process cannot access the file", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", locked)
    with pytest.raises(NotWritableError, match="it is as it was"):
        install(plan, prove=_holds)
    monkeypatch.undo()
    assert _content(python) == before


def test_an_editable_install_is_put_aside_and_comes_back(python: Path, plan: Plan, quick_pip: None) -> None:
    site = site_packages(python)
    (site / "__editable__.mamba_ssm-2.2.2.pth").write_text("/src/mamba\n", encoding="utf-8")
    (site / "__editable___mamba_ssm_2_2_2_finder.py").write_text("", encoding="utf-8")
    info = site / "mamba_ssm-2.2.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mamba_ssm\nVersion: 2.2.2\n", encoding="utf-8")
    (info / "direct_url.json").write_text('{"url": "file:///src", "dir_info": {"editable": true}}', encoding="utf-8")
    (info / "RECORD").write_text("__editable__.mamba_ssm-2.2.2.pth,,\n", encoding="utf-8")
    assert inspect_environment(python).installed["mamba_ssm"].kind == "editable"
    before = _content(python)
    install(plan, prove=_holds)
    assert not (site / "__editable__.mamba_ssm-2.2.2.pth").exists()
    uninstall(python)
    assert _content(python) == before


@pytest.mark.parametrize(
    ("entry", "mine"),
    [
        ("mamba_ssm", True),
        ("mamba_ssm-2.2.2.dist-info", True),
        ("mamba_ssm-2.2.2-py3.10.egg-info", True),
        ("selective_scan_cuda.cp310-win_amd64.pyd", True),
        ("selective_scan_cuda_oflex.so", False),
        ("mamba_ssm_extras", False),
        ("mamba_ssm_extras-1.0.dist-info", False),
        ("__editable__.mamba_ssm_extras-1.0.pth", False),
        ("causal_conv1d", False),
        ("anymamba", False),
        ("torch", False),
    ],
)
def test_only_the_packages_own_entries_are_touched(tmp_path: Path, entry: str, mine: bool) -> None:
    (tmp_path / entry).mkdir()
    assert (footprint("mamba_ssm", [str(tmp_path)]) == [tmp_path / entry]) is mine


def test_the_cache_makes_a_second_install_independent_of_the_index(
    python: Path, plan: Plan, quick_pip: None, monkeypatch: pytest.MonkeyPatch, recorded: Callable[[], Any]
) -> None:
    install(plan, prove=_holds)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    again = make_plan(BOTH, python, offline=True)
    assert all(package.cached for package in again.packages)
    progress = recorded()
    install(again, progress, prove=_holds)
    assert not [step for step in progress.steps if "Download" in step]


@pytest.fixture
def recorded() -> Callable[[], Any]:
    class Recorded:
        def __init__(self) -> None:
            self.steps: list[str] = []

        def step(self, text: str) -> None:
            self.steps.append(text)

        def advance(self, done: int, total: int | None) -> None:
            pass

    return Recorded


@pytest.mark.parametrize("when", ["unpacking", "first write", "last write", "pip"])
def test_a_disk_that_is_and_stays_full_leaves_the_environment_as_it_was(
    python: Path, plan: Plan, quick_pip: None, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Undoing works on the full disk too: it renames and deletes, and writes nothing."""
    _foreign_package(python)
    before = _content(python)
    write, full = State._write, [when == "first write"]

    def no_room(*_: object, **__: object) -> None:
        full[0] = True
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    def writing(path: Path, content: Any) -> None:
        if full[0] or (when == "last write" and path.name == "installed.json"):
            no_room()
        write(path, content)

    with monkeypatch.context() as filling:
        filling.setattr(State, "_write", staticmethod(writing))
        if when == "unpacking":
            filling.setattr("anymamba.upstream.archive._write", no_room)
        if when == "pip":
            filling.setattr(transaction, "_pip_install", no_room)
        with pytest.raises(NotWritableError, match="No space left") as caught:
            install(plan, prove=_holds)
    assert "make room" in caught.value.next_step
    assert _content(python) == before
    install(plan, prove=_holds)  # with room again, and without cleaning by hand


@pytest.mark.skipif(os.name == "nt", reason="folders have no such modes there; the tests above stand for it")
def test_a_site_packages_that_is_another_accounts_or_read_only_is_named(python: Path) -> None:
    """The system itself refuses: a folder without write permission, and an account that is not root."""
    site = site_packages(python)
    state, before = State(inspect_environment(python)), _content(python)
    root = os.geteuid() == 0
    site.chmod(0o555)
    try:
        if root:
            os.seteuid(65534)
        with pytest.raises(NotWritableError, match="cannot be changed; it is as it was") as caught, state.locked():
            pass
    finally:
        if root:
            os.seteuid(0)
        site.chmod(0o755)
    assert "virtual environment" in caught.value.next_step
    assert _content(python) == before


def test_a_stale_lock_file_is_no_lock(python: Path, plan: Plan, quick_pip: None) -> None:
    lock = site_packages(python) / FOLDER / "lock"
    lock.parent.mkdir()
    lock.write_text("12345", encoding="utf-8")
    assert install(plan, prove=_holds).packages


_HOLDER = """
import sys, time
from pathlib import Path
from anymamba.upstream.environment import inspect_environment
from anymamba.upstream.state import State

with State(inspect_environment(Path(sys.argv[1]))).locked():
    print("held", flush=True)
    time.sleep(60)
"""


def test_another_process_locks_until_it_ends_and_no_longer(python: Path, plan: Plan, quick_pip: None) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(anymamba.__file__).parents[1])}
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(python)], env=environment, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline().strip() == b"held"
        with pytest.raises(EnvironmentLockedError) as caught:
            install(plan, prove=_holds)
        assert "the same command again" in caught.value.next_step
    finally:
        holder.kill()
        holder.communicate()
    assert install(plan, prove=_holds).packages


def test_what_conda_installed_comes_back(python: Path, plan: Plan, quick_pip: None) -> None:
    _foreign_package(python)
    (site_packages(python) / "mamba_ssm-2.2.2.dist-info/INSTALLER").write_text("conda", encoding="utf-8")
    record = python.parent.parent / "conda-meta" / "mamba-ssm-2.2.2-py310_0.json"
    record.parent.mkdir()
    record.write_text("{}", encoding="utf-8")
    assert inspect_environment(python).conda
    before = _content(python)
    install(plan, prove=_holds)
    uninstall(python)
    assert _content(python) == before and record.is_file()


def test_a_package_in_a_folder_that_is_searched_first_is_noticed(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a --user installation, or a checkout on PYTHONPATH: it would hide the port."""
    info = tmp_path / "user site" / "mamba_ssm-2.2.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mamba_ssm\nVersion: 2.2.2\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(info.parent))
    assert inspect_environment(python).installed["mamba_ssm"].hides
    with pytest.raises(InstallError, match="would hide") as caught:
        make_plan(["mamba_ssm==2.2.2"], python)
    assert "pip uninstall mamba_ssm" in caught.value.next_step
    monkeypatch.delenv("PYTHONPATH")
    _foreign_package(python)
    assert not inspect_environment(python).installed["mamba_ssm"].hides
