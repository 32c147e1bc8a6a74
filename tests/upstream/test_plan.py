"""What an install would do, worked out before anything is done."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from unearth import Link

from anymamba.errors import (
    AnymambaError,
    InstallError,
    MachineError,
    NoSuchReleaseError,
    NotWritableError,
    OfflineError,
    OptionError,
)
from anymamba.upstream import plan as planning
from anymamba.upstream.cache import source_path
from anymamba.upstream.environment import Environment, Installed
from anymamba.upstream.index import Found, Index
from anymamba.upstream.pip_settings import PipSettings
from anymamba.upstream.plan import Plan, make_plan, parse_requirements
from small_upstream import write_sdist

HERE = Path(sys.executable)


def _environment(**changes: object) -> Environment:
    facts: dict[str, object] = {
        "python": sys.executable,
        "prefix": sys.prefix,
        "purelib": "/site",
        "platlib": "/site",
        "externally_managed": False,
        "has_pip": True,
        "torch": "2.5.1",
        "anymamba": "/site/anymamba/__init__.py",
        "installed": {},
    }
    return Environment(**{**facts, **changes})  # type: ignore[arg-type]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "cache"))

    def become(**changes: object) -> None:
        monkeypatch.setattr(planning, "inspect_environment", lambda python: _environment(**changes))

    become()
    return become


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    folder = tmp_path / "archives"
    folder.mkdir()
    for name, version in (("mamba_ssm", "98.0"), ("mamba_ssm", "99.0"), ("causal_conv1d", "99.0")):
        write_sdist(folder, name, version)
    with Index(PipSettings(no_index=True, find_links=(str(folder),))) as opened:
        yield opened


def test_nothing_named_is_the_guides_pair(environment: Callable[..., None]) -> None:
    plan = make_plan([], HERE)
    assert [(p.name, p.version, p.installs) for p in plan.packages] == [
        ("causal_conv1d", "1.4.0", "1.4.0+anymamba.1"),
        ("mamba_ssm", "2.2.2", "2.2.2+anymamba.1"),
    ]
    assert {package.hash_from for package in plan.packages} == {"lock"}
    assert all(package.sha256 and package.size and package.rules and not package.cached for package in plan.packages)


def test_a_mamba_ssm_alone_brings_the_partner_that_fits(environment: Callable[..., None]) -> None:
    partners = {p.name: p.version for p in make_plan(["mamba-ssm==2.2.6.post3"], HERE).packages}
    assert partners == {"causal_conv1d": "1.6.1", "mamba_ssm": "2.2.6.post3"}


def test_a_causal_conv1d_alone_stays_alone(environment: Callable[..., None]) -> None:
    assert [package.name for package in make_plan(["causal_conv1d==1.2.1"], HERE).packages] == ["causal_conv1d"]


def test_a_range_takes_the_newest_that_fits(environment: Callable[..., None], index: Index) -> None:
    plan = make_plan(["mamba_ssm>=2,<99", "causal_conv1d"], HERE, index=index)
    assert [(p.version, p.hash_from) for p in plan.packages] == [("99.0", "nobody"), ("98.0", "nobody")]


def test_latest_is_the_newest_of_both(environment: Callable[..., None], index: Index) -> None:
    plan = make_plan([], HERE, index=index, latest=True)
    assert [(p.name, p.version) for p in plan.packages] == [("causal_conv1d", "99.0"), ("mamba_ssm", "99.0")]


def test_a_range_without_a_partner_brings_the_one_that_fits_what_was_chosen(environment: Callable[..., None]) -> None:
    class Offers:
        def find(self, name: str) -> list[Found]:
            assert name == "mamba_ssm"
            versions = ("2.2.4", "2.2.5", "2.3.0")
            return [Found(name, v, f"{name}-{v}.tar.gz", None, None, Link("file:///x")) for v in versions]

    for range_, versions in ((">=2,<2.2.5", ("1.4.0", "2.2.4")), ("~=2.2", ("1.6.1", "2.3.0"))):
        plan = make_plan([f"mamba_ssm{range_}"], HERE, index=Offers())  # type: ignore[arg-type]
        assert tuple(package.version for package in plan.packages) == versions


def test_a_version_that_nobody_has_is_named(environment: Callable[..., None], index: Index) -> None:
    with pytest.raises(NoSuchReleaseError, match=r"mamba_ssm==97\.0") as caught:
        make_plan(["mamba_ssm==97.0"], HERE, index=index)
    assert "99.0" in caught.value.why


def test_offline_needs_the_cache(environment: Callable[..., None]) -> None:
    with pytest.raises(OfflineError):
        make_plan([], HERE, offline=True)
    with pytest.raises(OfflineError, match="in the cache"):
        make_plan(["causal_conv1d>1"], HERE, offline=True)


def test_offline_takes_what_the_cache_has(environment: Callable[..., None], tmp_path: Path) -> None:
    from anymamba.upstream.cache import sha256_of

    archive = write_sdist(tmp_path, "causal_conv1d", "99.0")
    kept = source_path(sha256_of(archive), archive.name)
    kept.parent.mkdir(parents=True)
    archive.replace(kept)
    package = make_plan(["causal_conv1d>1.7"], HERE, offline=True).packages[0]
    assert (package.version, package.hash_from, package.cached) == ("99.0", "cache", True)


def test_what_is_there_is_named(environment: Callable[..., None]) -> None:
    there = Installed("2.2.2", "editable", "/elsewhere")
    environment(installed={"mamba_ssm": there})
    assert make_plan([], HERE).packages[1].replaces == there


@pytest.mark.parametrize("text", ["mamba_ssm=2.2.2", "numpy", "mamba_ssm @ file:///x.tar.gz"])
def test_what_is_no_release_of_ours_is_refused(text: str) -> None:
    with pytest.raises(OptionError):
        parse_requirements([text])


def test_requirements_of_one_package_add_up() -> None:
    assert parse_requirements(["mamba_ssm>=2", "mamba-ssm<2.2"]) == {"mamba_ssm": SpecifierSet(">=2,<2.2")}


@pytest.mark.parametrize(
    ("change", "error", "next_step"),
    [
        ({"torch": None}, MachineError, "-m pip install torch"),
        ({"has_pip": False}, MachineError, "-m ensurepip"),
        ({"externally_managed": True}, NotWritableError, "-m venv"),
        ({"externally_managed": True, "conda": True}, NotWritableError, "conda create"),
        ({"anymamba": None}, MachineError, "-m pip install anymamba"),
        (
            {"installed": {"mamba_ssm": Installed("2.2.2", "package", "/u", hides=True)}},
            InstallError,
            "-m pip uninstall",
        ),
    ],
)
def test_an_environment_that_cannot_take_a_port_is_told_the_next_command(
    environment: Callable[..., None], change: dict[str, object], error: type[AnymambaError], next_step: str
) -> None:
    environment(**change)
    with pytest.raises(error) as caught:
        make_plan([], HERE)
    assert next_step in caught.value.next_step


def test_a_plan_is_saved_and_read_back(environment: Callable[..., None]) -> None:
    environment(installed={"mamba_ssm": Installed("2.2.2", "package", "/site")})
    plan = make_plan([], HERE)
    assert Plan.from_json(json.dumps(plan.to_json())) == plan


def test_a_plan_of_another_schema_is_refused() -> None:
    with pytest.raises(OptionError):
        Plan.from_json('{"schema": 99}')
