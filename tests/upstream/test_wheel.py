"""The wheel of a port: what pip needs, upstream's metadata, the provenance, the same bytes every time."""

from __future__ import annotations

import base64
import csv
import email.parser
import hashlib
import json
import zipfile
from pathlib import Path

import pytest

import small_upstream
from anymamba import __version__
from anymamba.errors import IntegrityError
from anymamba.upstream.port.build import build_port
from anymamba.upstream.wheel import build_wheel, check_identity
from small_upstream import VERSION

INFO = f"mamba_ssm-{VERSION}+anymamba.1.dist-info"


def _build(folder: Path) -> Path:
    source = small_upstream.write_tree(folder / "source", "mamba_ssm")
    for part in ("port", "wheel"):
        (folder / part).mkdir()
    port = build_port(source, "mamba_ssm", VERSION, folder / "port")
    return build_wheel(port, source, "mamba_ssm", VERSION, "ab" * 32, "mamba_ssm.tar.gz", folder / "wheel")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory.mktemp("wheel"))


def test_record_lists_every_file_with_its_hash_and_size(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as zipped:
        record = list(csv.reader(zipped.read(f"{INFO}/RECORD").decode().splitlines()))
        assert sorted(row[0] for row in record) == sorted(zipped.namelist())
        for path, digest, size in record:
            if path.endswith("/RECORD"):
                assert (digest, size) == ("", "")
                continue
            data = zipped.read(path)
            expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={expected}", str(len(data)))


def test_metadata_keeps_upstreams_words_and_relaxes_its_requirements(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as zipped:
        metadata = email.parser.Parser().parsestr(zipped.read(f"{INFO}/METADATA").decode())
        assert zipped.read(f"{INFO}/licenses/LICENSE") == b"A licence\n"
    assert (metadata["Name"], metadata["Version"]) == ("mamba_ssm", f"{VERSION}+anymamba.1")
    assert (metadata["Author"], metadata["Summary"]) == ("Somebody Else", "A small stand-in")
    requirements = metadata.get_all("Requires-Dist", [])
    always = [requirement for requirement in requirements if "extra" not in requirement]
    assert always == ["torch", "einops", "packaging", f"anymamba>={__version__}"]
    assert 'triton; extra == "triton"' in requirements and 'pytest; extra == "dev"' in requirements
    assert set(metadata.get_all("Provides-Extra", [])) == {"triton", "transformers", "ninja", "dev"}
    assert metadata.get_payload() == "# mamba_ssm\n"


def test_provenance_says_where_every_change_came_from(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as zipped:
        provenance = json.loads(zipped.read(f"{INFO}/anymamba-provenance.json"))
    assert provenance["source"] == {
        "name": "mamba_ssm",
        "version": VERSION,
        "file": "mamba_ssm.tar.gz",
        "sha256": "ab" * 32,
    }
    assert provenance["port"]["anymamba"] == __version__
    changed = {change["file"] for change in provenance["changes"]}
    assert {"utils/hf.py", "ops/triton/layer_norm.py", "../selective_scan_cuda.py"} <= changed


def test_extension_modules_are_in_the_wheel_and_setup_is_not(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as zipped:
        names = zipped.namelist()
        assert b"Root-Is-Purelib: true" in zipped.read(f"{INFO}/WHEEL")
    assert "selective_scan_cuda.py" in names and "mamba_ssm/_upstream/ops/triton/layer_norm.py" in names
    assert not [name for name in names if "setup" in name]


def test_the_same_source_gives_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    assert _build(tmp_path).read_bytes() == wheel.read_bytes()


@pytest.mark.parametrize("said", [("mamba_ssm", "1.0"), ("other", VERSION), ("mamba_ssm", "nonsense")])
def test_an_archive_that_says_it_is_something_else_is_refused(tmp_path: Path, said: tuple[str, str]) -> None:
    (tmp_path / "PKG-INFO").write_text(small_upstream.pkg_info(*said), encoding="utf-8")
    with pytest.raises(IntegrityError, match="says that it is"):
        check_identity(tmp_path, "mamba_ssm", VERSION)


def test_an_archive_without_metadata_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError):
        check_identity(tmp_path, "mamba_ssm", VERSION)
