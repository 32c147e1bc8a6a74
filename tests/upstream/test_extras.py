"""`anymamba install --with NAME`: wheels of modules alone, planned, installed, proved, and taken back."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from anymamba.errors import OptionError
from anymamba.upstream import plan as planning
from anymamba.upstream.environment import Environment, Installed, inspect_environment
from anymamba.upstream.extras import EXTRAS, build_extra
from anymamba.upstream.plan import Plan, make_plan
from anymamba.upstream.port.families import EXTENSIONS
from anymamba.upstream.transaction import install, uninstall
from small_upstream import make_environment, site_packages

HERE = Path("python")


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "cache"))

    def become(**installed: str) -> None:
        found = {name: Installed("1.0", kind, "/site") for name, kind in installed.items()}
        environment = Environment("python", "/", "/site", "/site", False, True, "2.5.1", "/anymamba", found)
        monkeypatch.setattr(planning, "inspect_environment", lambda python: environment)

    become()
    return become


def planned(*requirements: str, extras: list[str]) -> list[str]:
    return [package.name for package in make_plan(requirements, HERE, extras=extras).packages]


def test_an_extra_comes_beside_the_pair_but_replaces_nothing_that_is_there(there: Callable[..., None]) -> None:
    assert planned(extras=["vmamba"]) == ["causal_conv1d", "mamba_ssm", "selective_scan"]
    there(mamba_ssm="package", causal_conv1d="port")
    assert planned(extras=["vmamba"]) == ["selective_scan"]
    assert planned("causal_conv1d==1.4.0", extras=["vmamba"]) == ["causal_conv1d", "selective_scan"]


def test_what_a_fork_needs_is_not_mamba_ssm(there: Callable[..., None]) -> None:
    there(mamba_ssm="editable")
    assert planned(extras=["fork"]) == ["causal_conv1d", "anymamba_extensions"]


def test_a_port_and_what_stands_in_its_place_exclude_each_other(there: Callable[..., None]) -> None:
    with pytest.raises(OptionError, match="only one"):
        planned("mamba_ssm==2.2.2", extras=["fork"])
    there(mamba_ssm="port", causal_conv1d="port")
    with pytest.raises(OptionError, match="only one"):
        planned(extras=["fork"])
    there(mamba_ssm="editable", causal_conv1d="port", anymamba_extensions="port")
    with pytest.raises(OptionError, match="fork's place"):
        planned(extras=[])


def test_an_unknown_word_is_answered_with_the_known_ones(there: Callable[..., None]) -> None:
    with pytest.raises(OptionError, match="nothing named 'vm'") as caught:
        planned(extras=["vm"])
    assert "vmamba" in str(caught.value.why)


def test_a_plan_with_an_extra_survives_saving(there: Callable[..., None]) -> None:
    import json

    plan = make_plan([], HERE, extras=["vmamba"])
    assert Plan.from_json(json.dumps(plan.to_json())) == plan


@pytest.mark.parametrize("name", [extra.name for extra in EXTRAS.values()])
def test_a_wheel_holds_the_modules_and_tells_that_it_is_ours(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(build_extra(name, tmp_path)) as zipped:
        files = zipped.namelist()
        assert zipped.testzip() is None
    assert sorted(file for file in files if "/" not in file) == sorted(f"{module}.py" for module in EXTENSIONS[name])
    assert any(file.endswith("/anymamba-provenance.json") for file in files)


@pytest.mark.parametrize("name", [module for modules in EXTENSIONS.values() for module in modules])
def test_every_extension_module_has_what_stands_behind_it(name: str) -> None:
    import importlib

    module = importlib.import_module(f"anymamba.extensions.{name}")
    assert {"fwd", "bwd"} <= {exported.removeprefix("causal_conv1d_") for exported in module.__all__}


def test_vmambas_modules_are_installed_proved_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ANYMAMBA_BACKEND", "torch")  # the proof need not compile kernels for this
    python = make_environment(tmp_path / "my env")
    site = site_packages(python)
    compiled = site / "selective_scan_cuda_oflex.cpython-00-x86_64.so"
    compiled.write_bytes(b"for another torch")
    before = sorted(path.name for path in site.iterdir())
    plan = make_plan([], python, extras=["vmamba"])
    done = install(Plan(**{**vars(plan), "packages": plan.packages[-1:]}))  # the real proof, but nothing is fetched
    assert done.packages == {"selective_scan": "0.0.2+anymamba.1"}
    assert inspect_environment(python).installed["selective_scan"].kind == "port"
    assert not compiled.exists()
    script = "import selective_scan_cuda_core as core, selective_scan_cuda_nrow as nrow; assert core.fwd is nrow.fwd"
    subprocess.run([python, "-c", script], check=True)
    assert uninstall(python) == {"selective_scan": [compiled.name]}
    assert sorted(path.name for path in site.iterdir() if path.name not in (".anymamba", "__pycache__")) == before
