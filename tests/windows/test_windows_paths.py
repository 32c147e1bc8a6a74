"""Folders as people have them on Windows: spaces, Chinese, other case, longer than MAX_PATH, on a network share."""

from __future__ import annotations

from pathlib import Path

import pytest

from anymamba.backends.cuda.runtime.cache import DiskCache
from anymamba.upstream.archive import unpack
from anymamba.upstream.cache import cached_source, sha256_of, source_path
from small_upstream import VERSION, write_sdist
from windows_helpers import Run

LONG = "deep/" + "/".join(["a folder name of fifty characters, one of six 01234"] * 6)
NAMES = ["two words", "中文 路径", "ÄÖÜ-ß", "a'b & c^d %TEMP% (x86)", LONG]
IDS = ["spaces", "chinese", "umlauts", "shell-signs", "longer-than-260"]


@pytest.fixture(params=NAMES, ids=IDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    try:
        path.mkdir(parents=True)
    except OSError as error:
        if len(str(path)) < 248:
            raise
        pytest.skip(f"this Windows allows no long paths (LongPathsEnabled is 0): {error}")
    return path


def test_sources_are_kept_and_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(folder))
    archive = write_sdist(folder, "causal_conv1d")
    kept = source_path(sha256_of(archive), archive.name)
    kept.parent.mkdir(parents=True)
    archive.replace(kept)
    assert cached_source(sha256_of(kept), archive.name) == kept


def test_archives_are_unpacked(folder: Path) -> None:
    top = unpack(write_sdist(folder, "mamba_ssm"), folder)
    assert (top / "mamba_ssm" / "__init__.py").read_text(encoding="utf-8") == f'__version__ = "{VERSION}"\n'


def test_kernels_are_kept(folder: Path) -> None:
    cache = DiskCache(folder / "cuda")
    assert cache.put("k", b"image")
    assert cache.get("k") == b"image"


def test_a_folder_in_other_case_is_the_same_folder(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "Kernels")
    assert cache.put("k", b"image")
    assert DiskCache(tmp_path / "KERNELS").get("k") == b"image"


def test_the_product_imports_and_computes_from_a_folder_with_chinese_and_spaces(tmp_path: Path, python: Run) -> None:
    home = tmp_path / "用户 甲"
    home.mkdir()
    script = (
        "import torch\nfrom anymamba.ops import selective_scan_fn\n"
        "u = torch.randn(1, 4, 8)\nA = -torch.rand(4, 2)\nB = torch.randn(1, 2, 8)\n"
        "print(tuple(selective_scan_fn(u, torch.rand(1, 4, 8), A, B, B).shape))\n"
    )
    (home / "我的 脚本.py").write_text(script, encoding="utf-8")
    result = python(
        [str(home / "我的 脚本.py")],
        {"USERPROFILE": str(home), "LOCALAPPDATA": str(home / "AppData"), "ANYMAMBA_CACHE_DIR": str(home / "缓存")},
        cwd=home,
    )
    assert result.returncode == 0, result.stderr.decode(errors="replace")
    assert result.stdout.strip() == b"(1, 4, 8)"
