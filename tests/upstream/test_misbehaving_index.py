"""An index that misbehaves: each way it can, what becomes of it. Got through, or a typed error with the next command.

This is the table of the documentation: a row is a behaviour, and what finding and downloading through it ends in.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from anymamba.errors import AnymambaError, HashMismatchError, IndexUnreachableError, IntegrityError, NoSuchReleaseError
from anymamba.machine.folders import cache_folder
from anymamba.upstream.cache import sha256_of
from anymamba.upstream.index import Index
from anymamba.upstream.pip_settings import PipSettings
from anymamba.upstream.plan import _Resolver
from anymamba.upstream.progress import Silent
from index_server import IndexServer, serve_index
from small_upstream import write_sdist

# behaviour, how the server is set, how it ends: None is got through
TABLE: list[tuple[str, dict[str, Any], type[AnymambaError] | None]] = [
    ("behaves", {}, None),
    ("states no hashes", {"hashes": False}, None),
    ("slow, within the time limit", {"delay": 0.1}, None),
    ("slower than the time limit", {"delay": 0.6}, IndexUnreachableError),
    ("500 twice, then answers", {"fail_pages": 2}, None),
    ("500 for every page", {"fail_pages": 99}, IndexUnreachableError),
    ("503 for every page", {"fail_pages": 99, "fail_with": 503}, IndexUnreachableError),
    ("403 for every page", {"fail_pages": 99, "fail_with": 403}, IndexUnreachableError),
    ("401 for every page", {"fail_pages": 99, "fail_with": 401}, IndexUnreachableError),
    ("404 for the page", {"files": {}}, NoSuchReleaseError),
    ("404 for the file", {"missing_files": True}, IndexUnreachableError),
    ("500 twice for the file", {"fail_files": 2}, None),
    ("500 for the file, always", {"fail_files": 99}, IndexUnreachableError),
    ("redirect loop, pages", {"redirects": "pages"}, IndexUnreachableError),
    ("redirect loop, files", {"redirects": "files"}, IndexUnreachableError),
    ("cut twice", {"cut_downloads": 2}, None),
    ("cut always", {"cut_downloads": 99}, IndexUnreachableError),
    ("cut, length not stated", {"cut_downloads": 99, "cut_length": False}, HashMismatchError),
    ("states too great a length", {"wrong_length": 1000}, IndexUnreachableError),
    ("states too small a length", {"wrong_length": -1000}, HashMismatchError),
    ("states an absurd length", {"wrong_length": 1 << 40}, IntegrityError),
    ("wrong hash", {"wrong_hash": True}, HashMismatchError),
    ("path-style mirror", {"prefix": "repository/pypi-proxy"}, None),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "ca che 缓存"))
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[IndexServer]:
    served = IndexServer()
    for version in ("98.0", "99.0"):
        archive = write_sdist(tmp_path, "mamba_ssm", version)
        served.files[archive.name] = archive
    with serve_index(served):
        yield served


def _index(server: IndexServer, **settings: Any) -> Index:
    url = "/".join(part for part in (server.url, server.prefix, "simple") if part)
    return Index(PipSettings(index_url=url, timeout=0.35, **settings), sleep=lambda _: None)


def _newest(index: Index, digest: str) -> Path:
    found = index.find("mamba_ssm")[0]
    return index.download(found, found.sha256 or digest, Silent())


@pytest.mark.parametrize(("behaviour", "settings", "ends"), TABLE, ids=[row[0] for row in TABLE])
def test_whatever_an_index_does_it_is_got_through_or_named(
    server: IndexServer, behaviour: str, settings: dict[str, Any], ends: type[AnymambaError] | None
) -> None:
    right = server.files["mamba_ssm-99.0.tar.gz"]
    digest = sha256_of(right)
    for name, value in settings.items():
        setattr(server, name, value)
    with _index(server) as index:
        if ends is None:
            found = index.find("mamba_ssm")[0]
            assert index.download(found, digest, Silent()).read_bytes() == right.read_bytes()
            return
        with pytest.raises(ends) as caught:
            _newest(index, digest)
    assert type(caught.value) is ends
    assert caught.value.next_step, "an error without a next command"
    assert not [path for path in cache_folder().rglob("*") if path.is_file()], "something was kept"


def test_the_documents_table_is_this_one() -> None:
    rows = [
        f"| {name} | {ends.__name__ + ', exit code ' + str(ends.exit_code) if ends else 'got through'} |"
        for name, _, ends in TABLE
    ]
    document = (Path(__file__).parents[2] / "docs" / "trust.md").read_text(encoding="utf-8")
    assert "\n".join(rows) in document


def test_a_yanked_release_is_taken_only_when_it_is_named(server: IndexServer, tmp_path: Path) -> None:
    server.yanked = ("99.0",)
    with _index(server) as index:
        resolver = _Resolver(tmp_path, False, index)
        assert resolver._choose("mamba_ssm", SpecifierSet(">=98"))[0] == "98.0"
        version, found = resolver._choose("mamba_ssm", SpecifierSet("==99.0"))
    assert version == "99.0" and found is not None and found.yanked == "broken"


def test_a_mirrors_page_may_name_another_host(server: IndexServer, tmp_path: Path) -> None:
    """As mirrors do that keep the pages, and leave the files where they are."""
    page = IndexServer()
    page.page = lambda name: f'<a href="{server.url}/files/mamba_ssm-99.0.tar.gz">mamba_ssm-99.0.tar.gz</a>'  # type: ignore[method-assign]
    with serve_index(page), _index(page) as index:
        assert index.download(index.find("mamba_ssm")[0], None, Silent()).is_file()


OPENSSL = shutil.which("openssl")


@pytest.mark.skipif(OPENSSL is None, reason="needs openssl to make certificates")
def test_a_mirror_behind_a_certificate_authority_of_its_own(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pip's `cert` it is read, and its client certificate is asked for; without, the error names certificates."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [str(OPENSSL), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    both = tmp_path / "client.pem"
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    secure = IndexServer(files=server.files)
    with serve_index(secure, context):
        with _index(secure, cert=str(certificate), client_cert=str(both)) as index:
            assert len(index.find("mamba_ssm")) == 2
        for settings in ({}, {"cert": str(certificate)}):
            with _index(secure, retries=0, **settings) as index, pytest.raises(IndexUnreachableError) as caught:
                index.find("mamba_ssm")
            assert "certificate" in caught.value.why.lower() and "cert" in caught.value.next_step
