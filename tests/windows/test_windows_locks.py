"""Files that another process holds: Windows refuses to move, replace or delete them. Nothing breaks, nothing is half done."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from anymamba.backends.cuda.runtime.cache import DiskCache
from anymamba.errors import EnvironmentLockedError, NotWritableError
from anymamba.upstream.cache import cached_source, sha256_of, source_path
from anymamba.upstream.environment import inspect_environment
from anymamba.upstream.index import Index
from anymamba.upstream.pip_settings import PipSettings
from anymamba.upstream.plan import Plan, make_plan
from anymamba.upstream.progress import Silent
from anymamba.upstream.state import State
from anymamba.upstream.transaction import install, uninstall
from small_upstream import make_environment, site_packages, write_sdist


@contextmanager
def _held(*paths: Path) -> Iterator[None]:
    """Hold files open in another process, as a notebook that has imported them would: reading is shared, moving is not."""
    script = "import sys; files = [open(p, 'rb') for p in sys.argv[1:]]; print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, paths)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    try:
        assert holder.stdout.readline().strip() == b"held"
        yield
    finally:
        holder.stdin.close()
        holder.wait(30)
        holder.stdout.close()


def _holds(python: str, versions: dict[str, str]) -> dict[str, Any]:
    return {"versions": versions}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    for name in ("mamba_ssm", "causal_conv1d"):
        write_sdist(tmp_path, name)
    with Index(PipSettings(no_index=True, find_links=(str(tmp_path),))) as index:
        python = make_environment(tmp_path / "an environment")
        return make_plan(["causal_conv1d==99.0", "mamba_ssm==99.0"], python, index=index)


def _content(python: Path) -> dict[str, bytes]:
    site = site_packages(python)
    return {
        path.relative_to(site).as_posix(): path.read_bytes()
        for path in site.rglob("*")
        if path.is_file() and path.name != "lock" and "__pycache__" not in path.parts
    }


def test_holding_a_file_does_forbid_moving_it(tmp_path: Path) -> None:
    """The ground the other tests stand on."""
    path = tmp_path / "held.txt"
    path.write_text("x", encoding="utf-8")
    with _held(path), pytest.raises(PermissionError):
        path.unlink()
    path.unlink()


def test_a_kernel_that_another_process_reads_is_no_error(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    assert cache.put("k", b"old")
    (entry,) = tmp_path.glob("*.kernel")
    with _held(entry):
        cache.put("k", b"new")
        assert cache.get("k") in (b"old", b"new")
    assert not list(tmp_path.glob("*.tmp"))
    assert cache.put("k", b"new")
    assert cache.get("k") == b"new"


def test_the_cache_can_shrink_around_entries_that_are_held(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, bound=400)
    assert cache.put("a", b"a" * 300)
    (entry,) = tmp_path.glob("*.kernel")
    with _held(entry):
        assert cache.put("b", b"b" * 300)
        assert cache.get("b") == b"b" * 300


def test_a_source_that_another_process_reads_can_be_downloaded_again(tmp_path: Path, plan: Plan) -> None:
    """Two installs at once: the other has just finished the same download and is unpacking it."""
    archive = tmp_path / "causal_conv1d-99.0.tar.gz"
    kept = source_path(sha256_of(archive), archive.name)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(archive.read_bytes())
    with Index(PipSettings(no_index=True, find_links=(str(tmp_path),))) as index, _held(kept):
        (found,) = index.find("causal_conv1d")
        assert index.download(found, None, Silent()) == kept


def test_a_damaged_source_that_is_held_is_not_used(tmp_path: Path, plan: Plan) -> None:
    archive = tmp_path / "causal_conv1d-99.0.tar.gz"
    kept = source_path(sha256_of(archive), archive.name)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(b"damaged")
    with _held(kept):
        assert cached_source(sha256_of(archive), archive.name) is None


def test_an_extension_in_use_stops_the_install_and_everything_is_as_before(plan: Plan) -> None:
    python = Path(plan.python)
    site = site_packages(python)
    for name, text in {
        "mamba_ssm/__init__.py": "built = 'by the user'\n",
        "selective_scan_cuda.cp310-win_amd64.pyd": "machine code\n",
        "mamba_ssm-2.2.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: mamba-ssm\nVersion: 2.2.2\n",
    }.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(text.encode())
    before = _content(python)
    with _held(site / "selective_scan_cuda.cp310-win_amd64.pyd"):
        with pytest.raises(NotWritableError, match="running program") as caught:
            install(plan, prove=_holds)
        assert _content(python) == before
    assert "selective_scan_cuda" in caught.value.why
    assert install(plan, prove=_holds).packages
    uninstall(python)
    assert _content(python) == before


def test_a_module_in_use_stops_the_uninstall_and_the_port_still_works(plan: Plan) -> None:
    python = Path(plan.python)
    install(plan, prove=_holds)
    before = _content(python)
    with (
        _held(site_packages(python) / "causal_conv1d_cuda.py"),
        pytest.raises(NotWritableError, match="it is as it was"),
    ):
        uninstall(python)
    assert _content(python) == before
    uninstall(python)
    assert inspect_environment(python).installed == {}


def test_a_file_held_inside_a_package_makes_it_all_or_nothing(plan: Plan) -> None:
    """Windows moves no folder with an open file in it; wine does, and then the file cannot be deleted at the end."""
    python = Path(plan.python)
    install(plan, prove=_holds)
    before = _content(python)
    with _held(site_packages(python) / "mamba_ssm" / "__init__.py"):
        try:
            uninstall(python)
        except NotWritableError:
            assert _content(python) == before
        else:
            assert inspect_environment(python).installed == {}
            assert install(plan, prove=_holds).packages
            uninstall(python)
    assert install(plan, prove=_holds).packages
    uninstall(python)
    assert not [path for path in (site_packages(python) / ".anymamba").rglob("*") if path.name not in {"lock"}]


def test_two_processes_do_not_install_at_once(plan: Plan) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from anymamba.upstream.environment import inspect_environment\n"
        "from anymamba.upstream.state import State\n"
        "with State(inspect_environment(Path(sys.argv[1]))).locked():\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    other = subprocess.Popen([sys.executable, "-c", script, plan.python], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdin is not None
    try:
        assert other.stdout.readline().strip() == b"held"
        with pytest.raises(EnvironmentLockedError):
            install(plan, prove=_holds)
    finally:
        other.stdin.close()
        other.wait(30)
        other.stdout.close()
    with State(inspect_environment(Path(plan.python))).locked():
        pass
