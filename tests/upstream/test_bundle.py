"""A folder that installs without a network: made whole, checked before it is used, refused when it is not what it was."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anymamba.errors import HashMismatchError, IntegrityError, NoSuchReleaseError, OptionError, SourceError
from anymamba.upstream import transaction
from anymamba.upstream.bundle import LIST, Bundle, make_bundle, plan_from_bundle
from anymamba.upstream.companions import collect_companions
from anymamba.upstream.environment import inspect_environment
from anymamba.upstream.index import Index
from anymamba.upstream.pip_settings import PipSettings
from anymamba.upstream.plan import make_plan
from anymamba.upstream.progress import Silent
from anymamba.upstream.target import PLATFORMS, Target
from anymamba.upstream.transaction import install
from anymamba.upstream.wheel import pack_wheel
from small_upstream import make_environment, site_packages, write_sdist

VERSIONS = {"causal_conv1d": "99.0+anymamba.1", "mamba_ssm": "99.0+anymamba.1"}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("bundle") / "e n v 环境")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, python: Path) -> Bundle:
    folder = tmp_path_factory.mktemp("archives")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ANYMAMBA_CACHE_DIR", str(folder / "cache"))
        patched.setenv("PIP_FIND_LINKS", str(folder))
        patched.setenv("PIP_NO_INDEX", "1")
        for name in VERSIONS:
            write_sdist(folder, name)
        with Index(PipSettings(no_index=True, find_links=(str(folder),))) as index:
            plan = make_plan(["mamba_ssm==99.0", "causal_conv1d==99.0"], python, index=index)
        return make_bundle(plan, folder / "usb stick 盘", companions=False)


@pytest.fixture
def bundle(made: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to be spoilt, as on a machine where neither index nor cache can be reached."""
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "no cache"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    return Path(shutil.copytree(made.folder, tmp_path / "bundle"))


def _no_proof(python: str, versions: dict[str, str]) -> dict[str, Any]:
    return {}


def _list(bundle: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((bundle / LIST).read_text(encoding="utf-8"))
    change(content)
    (bundle / LIST).write_text(json.dumps(content), encoding="utf-8")


def test_a_bundle_installs_without_index_and_cache(bundle: Path, python: Path, tmp_path: Path) -> None:
    plan = plan_from_bundle(bundle, [], python)
    assert {package.name: package.installs for package in plan.packages} == VERSIONS
    assert plan.offline and all(package.rules and package.hash_from == "bundle" for package in plan.packages)
    assert install(plan, prove=_no_proof).packages == VERSIONS
    assert {name: there.kind for name, there in inspect_environment(python).installed.items()} == dict.fromkeys(
        VERSIONS, "port"
    )
    assert not (tmp_path / "no cache").exists()
    transaction.uninstall(python)


def test_a_part_of_a_bundle_can_be_asked_for(bundle: Path, python: Path) -> None:
    plan = plan_from_bundle(bundle, ["causal-conv1d>1"], python)
    assert [package.name for package in plan.packages] == ["causal_conv1d"]
    with pytest.raises(NoSuchReleaseError) as caught:
        plan_from_bundle(bundle, ["mamba_ssm==2.2.2"], python)
    assert "mamba_ssm==99.0" in caught.value.why


@pytest.mark.parametrize("damage", [b"cut", None])
def test_a_damaged_or_missing_wheel_is_refused_before_anything_changes(
    bundle: Path, python: Path, damage: bytes | None
) -> None:
    plan = plan_from_bundle(bundle, [], python)
    wheel = next(bundle.glob("mamba_ssm*.whl"))
    wheel.unlink()
    if damage is not None:
        wheel.write_bytes(damage)
    with pytest.raises(HashMismatchError, match="mamba_ssm"):
        install(plan, prove=_no_proof)
    assert not (site_packages(python) / "causal_conv1d").exists()


@pytest.mark.parametrize("entry", ["torch/__init__.py", "../evil.py", "evil.pth", "mamba_ssm-99.0.data/scripts/x"])
def test_a_wheel_that_holds_more_than_its_package_is_refused(bundle: Path, python: Path, entry: str) -> None:
    from anymamba.upstream.cache import sha256_of

    wheel = next(bundle.glob("mamba_ssm*.whl"))
    with zipfile.ZipFile(wheel, "a") as zipped:
        zipped.writestr(entry, "")

    def trust(content: dict[str, Any]) -> None:
        content["packages"][1]["sha256"] = sha256_of(wheel)

    _list(bundle, trust)
    with pytest.raises(IntegrityError):
        install(plan_from_bundle(bundle, [], python), prove=_no_proof)
    assert not (site_packages(python) / "mamba_ssm").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../mamba_ssm-99.0+anymamba.1-py3-none-any.whl"},
        {"file": "C:\\x.whl"},
        {"name": "torch"},
        {"installs": "98.0+anymamba.1"},
        {"sha256": None},
        {"size": "large"},
        {"rules": [["id"]]},
        {"version": "no version"},
    ],
)
def test_a_list_that_makes_no_sense_is_refused(bundle: Path, python: Path, change: dict[str, Any]) -> None:
    _list(bundle, lambda content: content["packages"][0].update(change))
    with pytest.raises(IntegrityError, match="damaged"):
        plan_from_bundle(bundle, [], python)


def test_a_bundle_of_a_newer_anymamba_says_how_to_get_it(bundle: Path, python: Path) -> None:
    _list(bundle, lambda content: content.update(anymamba="999.0"))
    with pytest.raises(IntegrityError, match=r"999\.0") as caught:
        plan_from_bundle(bundle, [], python)
    assert "--find-links" in caught.value.next_step


def test_what_is_no_bundle_is_refused_and_not_overwritten(bundle: Path, python: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear", encoding="utf-8")
    with pytest.raises(OptionError, match=LIST):
        plan_from_bundle(tmp_path / "mine", [], python)
    plan = plan_from_bundle(bundle, [], python)
    with pytest.raises(OptionError, match="no bundle"):
        make_bundle(plan, tmp_path / "mine", companions=False)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]


def test_an_earlier_bundle_is_replaced_whole(bundle: Path, python: Path, tmp_path: Path) -> None:
    plan = plan_from_bundle(bundle, ["causal_conv1d"], python)
    old = Path(shutil.copytree(bundle, tmp_path / "old"))
    make_bundle(plan, old, companions=False)
    assert len(list(old.glob("*.whl"))) == 1 and not list(tmp_path.glob(".anymamba-*"))


# --- what the other machine needs


def _wheel(folder: Path, name: str, version: str, *requires: str, tag: str = "py3-none-any") -> Path:
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "Provides-Extra: cpu"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    about = f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
    content = {f"{info}/METADATA": ("\n".join(lines) + "\n\n").encode(), f"{info}/WHEEL": about}
    return pack_wheel(folder / f"{name}-{version}-{tag}.whl", info, content)


def test_dependencies_are_those_of_the_other_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop, into = tmp_path / "shop", tmp_path / "in to"
    shop.mkdir()
    into.mkdir()
    _wheel(shop, "consoles", "1.0", 'colours; sys_platform == "win32"', 'fork; sys_platform != "win32"', "fast<2")
    _wheel(shop, "colours", "1.0")
    for version, tag in (("1.0", "cp39-cp39-win_amd64"), ("1.5", "cp39-cp39-win_amd64"), ("2.0", "py3-none-any")):
        _wheel(shop, "fast", version, tag=tag)
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    own = _wheel(tmp_path, "anymamba", "1", "torch", "fast", "consoles", 'compiled; extra == "cpu"')
    target = Target("windows", "3.9")
    found = collect_companions(own, into, target, (), Silent())
    assert [path.name for path in found] == [
        "colours-1.0-py3-none-any.whl",
        "consoles-1.0-py3-none-any.whl",
        "fast-1.5-cp39-cp39-win_amd64.whl",  # 2.0 was taken first; then something asked for less
    ]
    assert sorted(path.name for path in into.iterdir()) == [path.name for path in found]
    with pytest.raises(SourceError, match="compiled") as caught:
        collect_companions(own, into, target, ("cpu",), Silent())
    assert caught.value.next_step


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_target_is_what_pip_and_markers_are_told(platform: str) -> None:
    from packaging.markers import Marker

    target = Target(platform, "3.10")
    options = target.pip_options
    assert options[:2] == ["--platform", PLATFORMS[platform][0][0]] and "3.10" in options
    windows = Marker('sys_platform == "win32" and os_name == "nt" and python_version < "3.11"')
    assert windows.evaluate(target.markers) is (platform == "windows")
    assert Target().pip_options == []


@pytest.mark.parametrize("wrong", [("amiga", None), (None, "three"), (None, "2.7")])
def test_an_unknown_target_is_refused(wrong: tuple[str | None, str | None]) -> None:
    with pytest.raises(OptionError) as caught:
        Target(*wrong)
    assert "leave it out" in caught.value.next_step


def test_anymamba_itself_is_packed_again_from_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import metadata

    from anymamba.upstream.companions import own_wheel

    info = "anymamba-1.2.dist-info"
    with zipfile.ZipFile(_wheel(tmp_path, "anymamba", "1.2")) as zipped:
        zipped.extractall(tmp_path / "site")
    package = tmp_path / "site/anymamba"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "lock.toml").write_text("", encoding="utf-8")
    (tmp_path / "site" / info / "INSTALLER").write_text("pip", encoding="utf-8")
    names = ["anymamba/__init__.py", "anymamba/lock.toml", "../../bin/anymamba"]
    names += [f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "INSTALLER")]
    (tmp_path / "site" / info / "RECORD").write_text("".join(f"{name},,\n" for name in names), encoding="utf-8")
    monkeypatch.setattr(metadata, "distribution", lambda _: metadata.PathDistribution(tmp_path / "site" / info))
    (tmp_path / "into").mkdir()
    wheel = own_wheel(tmp_path / "into")
    assert wheel.name == "anymamba-1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as zipped:
        kept = {"anymamba/__init__.py", "anymamba/lock.toml", *(f"{info}/{n}" for n in ("METADATA", "WHEEL", "RECORD"))}
        assert set(zipped.namelist()) == kept
