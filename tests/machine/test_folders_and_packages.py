"""Folders are tried, not guessed; packages are told apart by what they bring."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from anymamba.machine import packages as packages_module
from anymamba.machine.folders import cache_folder, read_folders
from anymamba.machine.system import system_language


def test_the_cache_folder_may_be_chosen(tmp_path: Path) -> None:
    assert cache_folder({"ANYMAMBA_CACHE_DIR": str(tmp_path)}) == tmp_path
    folders = read_folders(environ={"ANYMAMBA_CACHE_DIR": str(tmp_path / "not" / "yet")}, working=tmp_path)
    assert folders.cache_writable
    assert folders.cache_free_gb is not None
    assert folders.cache_free_gb > 0
    assert not (tmp_path / "not").exists(), "looking must not create"
    assert folders.home_variable is None


def test_a_folder_named_like_a_package_is_seen(tmp_path: Path) -> None:
    (tmp_path / "mamba_ssm").mkdir()
    (tmp_path / "mamba_ssm" / "__init__.py").touch()
    (tmp_path / "torch").mkdir()  # a data folder hides nothing: a regular package wins over it
    assert read_folders(environ={}, working=tmp_path).shadowed == ("mamba_ssm",)


@pytest.mark.parametrize(
    ("environ", "language"),
    [
        ({"LANG": "zh_CN.UTF-8"}, "zh_CN"),
        ({"LC_ALL": "en_GB.UTF-8", "LANG": "zh_CN.UTF-8"}, "en_GB"),
        ({"LANGUAGE": "zh_TW:en"}, "zh_TW"),
    ],
)
def test_the_language_follows_the_usual_variables(environ: dict[str, str], language: str) -> None:
    assert system_language(environ) == language


@pytest.mark.parametrize(
    ("version", "extension", "kind"),
    [
        ("2.2.2+anymamba.1", "/env/selective_scan_cuda.py", "port"),
        ("2.2.2", "/env/selective_scan_cuda.cpython-310-x86_64-linux-gnu.so", "native"),
        ("2.2.2", "/env/selective_scan_cuda.cp310-win_amd64.pyd", "native"),
        ("1.0.1", None, "foreign"),
    ],
)
def test_the_kind_of_an_installed_mamba_ssm(
    version: str, extension: str | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    origins = {"mamba_ssm": "/env/mamba_ssm/__init__.py", "selective_scan_cuda": extension}

    def find(name: str) -> str:
        if name == "mamba_ssm":
            return version
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(packages_module, "_origin", origins.get)
    monkeypatch.setattr(packages_module.metadata, "version", find)
    package = packages_module.read_packages().of_upstream("mamba_ssm")
    assert package is not None
    assert (package.version, package.kind) == (version, kind)
