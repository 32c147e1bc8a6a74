"""Network settings are read without their secrets; WSL is known by its kernel and its libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from anymamba.machine import wsl as wsl_module
from anymamba.machine.network import Network, read_network
from anymamba.machine.wsl import Wsl, read_wsl


def test_no_variable_no_setting() -> None:
    assert read_network(environ={}) == Network()


def test_a_password_in_a_proxy_is_left_out() -> None:
    network = read_network(environ={"HTTPS_PROXY": "http://li:secret@proxy:8080", "http_proxy": "li:secret@proxy:80"})
    assert network.proxies == (("HTTPS_PROXY", "http://proxy:8080"), ("http_proxy", "proxy:80"))


def test_certificate_files_are_looked_for(tmp_path: Path) -> None:
    there = tmp_path / "root.pem"
    there.touch()
    network = read_network(environ={"PIP_CERT": str(there), "SSL_CERT_FILE": str(tmp_path / "gone.pem")})
    assert network.missing_certificates == ("SSL_CERT_FILE",)


@pytest.mark.parametrize(
    ("kernel", "version"),
    [
        ("Linux version 5.15.153.1-microsoft-standard-WSL2 (root@x)", 2),
        ("Linux version 4.4.0-19041-Microsoft (Microsoft@Microsoft.com)", 1),
        ("Linux version 6.1.0-18-amd64 (debian-kernel@lists.debian.org)", None),
    ],
)
def test_wsl_is_known_by_its_kernel(
    kernel: str, version: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wsl_module.platform, "system", lambda: "Linux")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "version").write_text(kernel, encoding="utf-8")
    library = tmp_path / "usr" / "lib" / "wsl" / "lib" / "libcuda.so.1"
    library.parent.mkdir(parents=True)
    library.touch()
    assert read_wsl(root=tmp_path) == (None if version is None else Wsl(version, True, False, linked=False))
