"""Where each installed file came from, what changed it, and whether it is still what was installed."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anymamba.errors import InstallError
from anymamba.upstream import provenance
from anymamba.upstream.cache import sha256_of, source_path
from anymamba.upstream.environment import Installed
from anymamba.upstream.making import make_wheel
from anymamba.upstream.provenance import Traced, differences, trace
from anymamba.upstream.sbom import bill_of_materials
from small_upstream import VERSION, write_sdist

HERE = Path(sys.executable)
LOCAL = f"{VERSION}+anymamba.1"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("made")
    archive = write_sdist(folder, "mamba_ssm")
    return archive, make_wheel("mamba_ssm", VERSION, sha256_of(archive), archive, folder / "staging")


@pytest.fixture
def site(tmp_path: Path, made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A site-packages with the port in it; its source archive in the cache."""
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "缓存 cache"))
    archive, wheel = made
    kept = source_path(sha256_of(archive), archive.name)
    kept.parent.mkdir(parents=True)
    shutil.copyfile(archive, kept)
    folder = tmp_path / "site 包"
    with zipfile.ZipFile(wheel) as zipped:
        zipped.extractall(folder)
    environment = SimpleNamespace(installed={"mamba_ssm": Installed(LOCAL, "port", str(folder))})
    monkeypatch.setattr(provenance, "inspect_environment", lambda python: environment)
    return folder


def _trace() -> Traced:
    return trace(HERE, ["mamba-ssm"])[0]


def _states(traced: Traced) -> dict[str, str]:
    return {file.path: file.state for file in traced.altered}


def test_every_file_is_traced_to_upstream_or_to_a_rule(site: Path) -> None:
    traced = _trace()
    files = {file.path: file for file in traced.files}
    on_disk = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    assert set(files) == on_disk
    assert traced.altered == [] and traced.judged_by == "source"
    of = {path: (file.origin, file.source, file.rules) for path, file in files.items()}
    assert of["mamba_ssm/__init__.py"] == ("upstream", "mamba_ssm/__init__.py", ())
    assert of["selective_scan_cuda.py"] == ("anymamba", None, ("extension-module",))
    assert of["mamba_ssm/ops/triton/layer_norm.py"] == ("anymamba", None, ("redirect",))
    moved = of["mamba_ssm/_upstream/ops/triton/layer_norm.py"]
    assert moved[:2] == ("adapted", "mamba_ssm/ops/triton/layer_norm.py") and "triton-optional" in moved[2]
    assert of["mamba_ssm/utils/hf.py"][0] == "adapted" and of["mamba_ssm/utils/hf.py"][2]
    assert all(traced.reasons[rule] for file in traced.files for rule in file.rules)


@pytest.mark.parametrize("source_at_hand", [True, False])
def test_what_was_altered_removed_or_added_is_named(site: Path, tmp_path: Path, source_at_hand: bool) -> None:
    if not source_at_hand:
        shutil.rmtree(tmp_path / "缓存 cache")
    (site / "mamba_ssm/__init__.py").write_text("import os\n", encoding="utf-8")
    (site / "selective_scan_cuda.py").unlink()
    (site / "mamba_ssm/more.py").write_text("", encoding="utf-8")
    traced = _trace()
    assert traced.judged_by == ("source" if source_at_hand else "record")
    assert _states(traced) == {
        "mamba_ssm/__init__.py": "altered",
        "selective_scan_cuda.py": "missing",
        "mamba_ssm/more.py": "added",
    }


def test_altering_record_too_hides_nothing_while_the_source_is_at_hand(site: Path, tmp_path: Path) -> None:
    file, record = site / "mamba_ssm/__init__.py", site / f"mamba_ssm-{LOCAL}.dist-info/RECORD"
    before = provenance._recorded(record)["mamba_ssm/__init__.py"]
    file.write_text("import os\n", encoding="utf-8")
    lines = record.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not line.startswith("mamba_ssm/__init__.py,")]
    import base64

    digest = base64.urlsafe_b64encode(bytes.fromhex(sha256_of(file))).rstrip(b"=").decode()
    record.write_text("\n".join([*kept, f"mamba_ssm/__init__.py,sha256={digest},10"]) + "\n", encoding="utf-8")
    assert provenance._recorded(record)["mamba_ssm/__init__.py"] != before
    assert _states(_trace()) == {"mamba_ssm/__init__.py": "altered", f"mamba_ssm-{LOCAL}.dist-info/RECORD": "altered"}


def test_without_record_and_source_nothing_counts_as_intact(site: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "缓存 cache")
    (site / f"mamba_ssm-{LOCAL}.dist-info/RECORD").unlink()
    assert {file.state for file in _trace().files} == {"added", "missing"}


def test_compiled_files_and_pips_notes_are_no_alteration(site: Path) -> None:
    (site / "mamba_ssm/__pycache__").mkdir()
    (site / "mamba_ssm/__pycache__/x.pyc").write_bytes(b"")
    (site / f"mamba_ssm-{LOCAL}.dist-info/INSTALLER").write_text("pip\n", encoding="utf-8")
    assert _trace().altered == []


def test_the_diff_shows_the_changes_and_nothing_that_is_upstreams(site: Path) -> None:
    shown = list(differences(_trace(), HERE, offline=True))
    (hub,) = (text for text in shown if "b/mamba_ssm/utils/hf.py" in text)
    assert hub.startswith("--- a/mamba_ssm/utils/hf.py\n+++ b/mamba_ssm/utils/hf.py\n")
    assert "\n-from transformers.utils import CONFIG_NAME\n" in hub
    assert not [text for text in shown if "b/mamba_ssm/__init__.py" in text]
    assert any(text.startswith("--- /dev/null\n+++ b/selective_scan_cuda.py") for text in shown)


def test_the_diff_without_a_source_says_how_to_get_one(site: Path, tmp_path: Path) -> None:
    traced = _trace()
    shutil.rmtree(tmp_path / "缓存 cache")
    with pytest.raises(InstallError) as caught:
        list(differences(traced, HERE, offline=True))
    assert "anymamba install" in caught.value.next_step


def test_what_is_not_ours_is_refused(site: Path) -> None:
    with pytest.raises(InstallError, match="no causal_conv1d"):
        trace(HERE, ["causal_conv1d"])


def _bill() -> dict[str, Any]:
    bill: dict[str, Any] = json.loads(json.dumps(bill_of_materials([_trace()], torch="2.5.1+cpu")))
    return bill


def test_the_bill_of_materials_names_source_rules_and_files(site: Path) -> None:
    bill = _bill()
    port = bill["components"][0]
    assert port["purl"] == f"pkg:pypi/mamba-ssm@{VERSION}%2Banymamba.1"
    assert port["pedigree"]["ancestors"][0]["hashes"][0]["content"] == _trace().source_sha256
    assert {p["resolves"][0]["id"] for p in port["pedigree"]["patches"]} == set(_trace().reasons)
    assert {c["name"] for c in port["components"]} == {f.path for f in _trace().files if f.sha256}
    assert _bill()["serialNumber"] == bill["serialNumber"]


def test_the_bill_of_materials_is_cyclonedx(site: Path) -> None:
    validation = pytest.importorskip("cyclonedx.validation.json", reason="needs cyclonedx-python-lib[json-validation]")
    schema = pytest.importorskip("cyclonedx.schema")
    validator = validation.JsonStrictValidator(schema.SchemaVersion.V1_6)
    assert validator.validate_str(json.dumps(_bill())) is None
    broken = {**_bill(), "components": [{"type": "no such type", "name": "x"}]}
    assert validator.validate_str(json.dumps(broken)) is not None
