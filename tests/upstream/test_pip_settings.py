"""The user's pip configuration is what pip says it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from anymamba.errors import MachineError
from anymamba.upstream.pip_settings import PipSettings, parse_pip_settings, read_pip_settings


def test_sections_override_one_another_as_in_pip() -> None:
    listing = """\
global.index-url='https://global.example/simple'
global.timeout='60'
install.index-url='https://install.example/simple'
:env:.timeout='7'
download.proxy='http://not-ours.example'
"""
    settings = parse_pip_settings(listing, {})
    assert (settings.index_url, settings.timeout, settings.proxy) == ("https://install.example/simple", 7.0, None)


def test_lists_are_split_and_switches_understood() -> None:
    listing = """\
global.extra-index-url='https://a.example/simple\\nhttps://b.example/simple'
global.find-links='/one /two'
global.trusted-host='a.example'
global.no-index='true'
global.client-cert='/c.pem'
"""
    settings = parse_pip_settings(listing, {})
    assert settings.extra_index_urls == ("https://a.example/simple", "https://b.example/simple")
    assert settings.find_links == ("/one", "/two")
    assert (settings.trusted_hosts, settings.no_index, settings.client_cert) == (("a.example",), True, "/c.pem")


def test_the_certificate_variables_of_pips_http_library_count() -> None:
    assert parse_pip_settings("", {"REQUESTS_CA_BUNDLE": "/ca.pem"}).cert == "/ca.pem"
    assert parse_pip_settings("global.cert='/pip.pem'", {"REQUESTS_CA_BUNDLE": "/ca.pem"}).cert == "/pip.pem"


def test_nothing_configured_leaves_the_index_to_the_library() -> None:
    assert parse_pip_settings("", {}) == PipSettings()


def test_what_pip_prints_besides_is_passed_over() -> None:
    assert parse_pip_settings("WARNING: something = odd\nglobal.index-url=broken'\n\n", {}) == PipSettings()


def test_files_and_variables_are_read_through_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "p 配置.ini"
    file.write_text(
        "[global]\nindex-url = https://mirror.example/simple\nproxy = http://proxy.example:8080\n", encoding="utf-8"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_PROXY", "http://other.example:1")
    settings = read_pip_settings(Path(sys.executable))
    assert (settings.index_url, settings.proxy) == ("https://mirror.example/simple", "http://other.example:1")


def test_an_interpreter_without_pip_is_named_with_the_cure(tmp_path: Path) -> None:
    import venv

    venv.EnvBuilder(with_pip=False).create(tmp_path / "bare")
    python = next(p for p in (tmp_path / "bare/bin/python", tmp_path / "bare/Scripts/python.exe") if p.exists())
    with pytest.raises(MachineError) as caught:
        read_pip_settings(python)
    assert "ensurepip" in caught.value.next_step
