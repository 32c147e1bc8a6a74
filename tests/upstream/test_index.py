"""Finding and downloading source archives: from an index, from a folder, past failures, once only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from anymamba.errors import (
    HashMismatchError,
    IndexUnreachableError,
    MachineError,
    NoSuchReleaseError,
    NotWritableError,
)
from anymamba.machine.folders import cache_folder
from anymamba.upstream.index import Index
from anymamba.upstream.pip_settings import PipSettings
from anymamba.upstream.progress import Silent
from index_server import IndexServer, serve_index
from small_upstream import write_sdist


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


def _index(server: IndexServer, **settings: object) -> Index:
    return Index(PipSettings(index_url=f"{server.url}/simple", **settings), sleep=lambda _: None)  # type: ignore[arg-type]


def test_an_index_tells_its_source_archives_newest_first(server: IndexServer) -> None:
    with _index(server) as index:
        found = index.find("mamba_ssm")
    assert [release.version for release in found] == ["99.0", "98.0"]
    assert found[0].sha256 == hashlib.sha256(server.files[found[0].file].read_bytes()).hexdigest()


def test_an_index_is_asked_once(server: IndexServer) -> None:
    with _index(server) as index:
        index.find("mamba_ssm")
        index.find("mamba_ssm")
    assert server.requests == ["/simple/mamba-ssm/"]


def test_a_download_is_kept_and_not_fetched_again(server: IndexServer) -> None:
    with _index(server) as index:
        found = index.find("mamba_ssm")[0]
        first = index.download(found, found.sha256, Silent())
        again = index.download(found, found.sha256, Silent())
    assert first == again == cache_folder() / "sources" / str(found.sha256) / found.file
    assert first.read_bytes() == server.files[found.file].read_bytes()
    assert len([request for request in server.requests if request.startswith("/files")]) == 1


def test_a_damaged_kept_file_is_fetched_anew(server: IndexServer) -> None:
    with _index(server) as index:
        found = index.find("mamba_ssm")[0]
        kept = index.download(found, found.sha256, Silent())
        kept.write_bytes(b"damaged")
        assert index.download(found, found.sha256, Silent()).read_bytes() == server.files[found.file].read_bytes()


def test_a_folder_of_archives_will_do(tmp_path: Path) -> None:
    archive = write_sdist(tmp_path, "causal_conv1d")
    with Index(PipSettings(no_index=True, find_links=(str(tmp_path), str(tmp_path / "absent")))) as index:
        found = index.find("causal_conv1d")[0]
        assert (found.version, found.sha256) == ("99.0", None)
        assert index.download(found, None, Silent()).read_bytes() == archive.read_bytes()


def test_a_download_that_breaks_off_is_resumed(server: IndexServer) -> None:
    server.cut_downloads = 2
    with _index(server) as index:
        found = index.find("mamba_ssm")[0]
        assert index.download(found, found.sha256, Silent()).read_bytes() == server.files[found.file].read_bytes()
    assert any("bytes=" in request for request in server.requests)


def test_a_download_that_always_breaks_off_is_an_error_and_leaves_nothing(server: IndexServer) -> None:
    server.cut_downloads = 99
    with _index(server) as index:
        found = index.find("mamba_ssm")[0]
        with pytest.raises(IndexUnreachableError, match="broke off"):
            index.download(found, found.sha256, Silent())
    assert not [path for path in cache_folder().rglob("*") if path.is_file()]


def test_a_wrong_hash_is_refused_and_nothing_is_kept(server: IndexServer) -> None:
    server.wrong_hash = True
    with _index(server) as index:
        found = index.find("mamba_ssm")[0]
        with pytest.raises(HashMismatchError, match="0000"):
            index.download(found, found.sha256, Silent())
    assert not [path for path in cache_folder().rglob("*") if path.is_file()]


def test_a_server_error_is_tried_again(server: IndexServer) -> None:
    server.fail_pages = 2
    with _index(server) as index:
        assert len(index.find("mamba_ssm")) == 2


def test_a_server_that_only_errs_is_unreachable(server: IndexServer) -> None:
    server.fail_pages = 99
    with _index(server) as index, pytest.raises(IndexUnreachableError, match="mamba_ssm"):
        index.find("mamba_ssm")


def test_an_index_without_the_package_says_so(server: IndexServer) -> None:
    with _index(server) as index, pytest.raises(NoSuchReleaseError, match="causal_conv1d"):
        index.find("causal_conv1d")


def test_a_dead_extra_index_does_not_hide_one_that_answers(server: IndexServer) -> None:
    with _index(server, extra_index_urls=("http://127.0.0.1:9/simple",), retries=1) as index:
        assert len(index.find("mamba_ssm")) == 2


def test_passwords_are_not_shown(server: IndexServer) -> None:
    settings = PipSettings(index_url="http://me:secret@127.0.0.1:9/simple", retries=0)
    with Index(settings, sleep=lambda _: None) as index, pytest.raises(IndexUnreachableError) as caught:
        index.find("mamba_ssm")
    assert "secret" not in str(caught.value)


def test_an_unreadable_certificate_is_named(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="certificate"):
        Index(PipSettings(cert=str(tmp_path / "absent.pem")))


def test_a_cache_that_cannot_be_written_is_named(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the cache's place", encoding="utf-8")
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "file"))
    with _index(server) as index:
        found = index.find("mamba_ssm")[0]
        with pytest.raises(NotWritableError, match="cache") as caught:
            index.download(found, found.sha256, Silent())
    assert "ANYMAMBA_CACHE_DIR" in caught.value.next_step


@pytest.mark.parametrize("trusted", [(), ("mirror.example",)])
def test_the_proxy_is_used_also_for_trusted_hosts(server: IndexServer, trusted: tuple[str, ...]) -> None:
    # a proxy is asked for the whole address
    settings = PipSettings(
        index_url="http://mirror.example/simple",
        proxy=server.url,
        trusted_hosts=trusted or ("other.example",),
        retries=0,
    )
    with (
        Index(settings, sleep=lambda _: None) as index,
        pytest.raises((NoSuchReleaseError, IndexUnreachableError)) as caught,
    ):
        index.find("absent")
    assert trusted or "trusted-host" in caught.value.why
    assert [request.split()[0] for request in server.requests] == (
        ["http://mirror.example/simple/absent/"] if trusted else []
    )
