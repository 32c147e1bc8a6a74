"""Sources from an index, a tag, a folder: what is accepted, what is refused, and what is offered instead."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anymamba.errors import IntegrityError, OfflineError, OptionError, SourceError
from anymamba.upstream.native import tags
from anymamba.upstream.native.git_tree import tree_id
from anymamba.upstream.native.sources import SourcesOutOfReachError, get_sources, mirrored
from anymamba.upstream.native.wishes import exact_release, parse_architectures, parse_rules, releases

PYTHON = Path(sys.executable)
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
ENVIRONMENT = {
    **os.environ, "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b",
    "GIT_CONFIG_GLOBAL": os.devnull,
}  # fmt: skip


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, env=ENVIRONMENT, capture_output=True, check=True)
    return done.stdout.decode().strip()


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the tag v1.4.0, which the product knows; the address of its mirror leads to it."""
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "mirror" / "Dao-AILab" / "causal-conv1d"
    (folder / "csrc").mkdir(parents=True)
    (folder / "csrc" / "a.cu").write_text("// a\r\n", encoding="utf-8", newline="")
    (folder / "causal_conv1d").mkdir()
    (folder / "causal_conv1d" / "__init__.py").write_text('__version__ = "1.4.0"\n', encoding="utf-8")
    git(folder, "init", "--quiet")
    git(folder, "-c", "core.autocrlf=false", "add", ".")
    git(folder, "update-index", "--chmod=+x", "csrc/a.cu")
    git(folder, "commit", "--quiet", "-m", "x")
    git(folder, "tag", "v1.4.0")
    monkeypatch.setitem(
        tags._data()["causal_conv1d"], "release",
        [{
            "version": "1.4.0", "tag": "v1.4.0", "commit": git(folder, "rev-parse", "HEAD"),
            "tree": git(folder, "rev-parse", "HEAD^{tree}"), "csrc": git(folder, "rev-parse", "HEAD:csrc"),
            "executable": ["csrc/a.cu"],
        }],
    )  # fmt: skip
    return folder


def mirror_of(upstream: Path) -> str:
    return f"{(upstream.parents[1]).as_uri()}/{{path}}"


@needs_git
def test_a_tag_is_cloned_proved_and_kept_for_the_next_time(tmp_path: Path, upstream: Path) -> None:
    got = get_sources("causal_conv1d", "1.4.0", tmp_path / "one", python=PYTHON, mirror=mirror_of(upstream))
    assert got.proved and got.identity["tree"] == git(upstream, "rev-parse", "HEAD^{tree}")
    assert (got.folder / "csrc" / "a.cu").read_bytes() == b"// a\r\n" and not (got.folder / ".git").exists()
    shutil.rmtree(upstream)
    again = get_sources("causal_conv1d", "1.4.0", tmp_path / "two", python=PYTHON, offline=True)
    assert again.proved and "cache" in again.origin


@needs_git
def test_a_tag_that_holds_something_else_is_refused(tmp_path: Path, upstream: Path) -> None:
    (upstream / "csrc" / "a.cu").write_text("// b\n", encoding="utf-8")
    git(upstream, "commit", "--quiet", "-am", "y")
    git(upstream, "tag", "--force", "v1.4.0")
    with pytest.raises(IntegrityError, match="must have"):
        get_sources("causal_conv1d", "1.4.0", tmp_path / "one", python=PYTHON, mirror=mirror_of(upstream))
    assert not (tmp_path / "one").exists()


def test_out_of_reach_offers_the_nearest_archive_and_says_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path / "cache"))
    nowhere = (tmp_path / "nowhere").as_uri() + "/{path}"
    with pytest.raises(SourcesOutOfReachError) as error:
        get_sources("mamba_ssm", "2.2.2", tmp_path / "one", python=PYTHON, mirror=nowhere)
    assert "2.2.5: it differs in four lines of one C++ file" in error.value.why
    assert "mamba_ssm==2.2.5" in error.value.next_step and "--mirror" in error.value.next_step
    with pytest.raises(SourcesOutOfReachError, match="--offline"):
        get_sources("mamba_ssm", "2.2.2", tmp_path / "one", python=PYTHON, offline=True)
    with pytest.raises(OfflineError):
        get_sources("mamba_ssm", "2.2.5", tmp_path / "one", python=PYTHON, offline=True)


@needs_git
def test_an_archive_of_the_tag_does_where_git_cannot_clone(
    tmp_path: Path, upstream: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = upstream / "archive" / "refs" / "tags" / "v1.4.0.tar.gz"
    archive.parent.mkdir(parents=True)
    git(upstream, "archive", "--prefix=causal-conv1d-1.4.0/", "-o", str(archive), "v1.4.0")
    shutil.rmtree(upstream / ".git")
    got = get_sources("causal_conv1d", "1.4.0", tmp_path / "one", python=PYTHON, mirror=mirror_of(upstream))
    assert got.proved


@needs_git
def test_sources_that_the_user_has_are_compared(tmp_path: Path, upstream: Path) -> None:
    same = get_sources("causal_conv1d", "1.4.0", tmp_path / "one", python=PYTHON, given=upstream)
    assert same.proved and not (same.folder / ".git").exists()
    (upstream / "csrc" / "a.cu").write_text("// mine\n", encoding="utf-8")
    other = get_sources("causal_conv1d", "1.4.0", tmp_path / "two", python=PYTHON, given=upstream)
    assert not other.proved and "not compared" in other.origin
    shutil.rmtree(upstream / "csrc")
    with pytest.raises(SourceError, match="no csrc"):
        get_sources("causal_conv1d", "1.4.0", tmp_path / "three", python=PYTHON, given=upstream)
    with pytest.raises(OptionError, match="is there already"):
        get_sources("causal_conv1d", "1.4.0", tmp_path / "two", python=PYTHON, given=upstream)


@needs_git
@settings(max_examples=8, deadline=None)
@given(
    st.dictionaries(
        st.lists(st.sampled_from(["a", "a.b", "a-b", "b", "é"]), min_size=1, max_size=3).map("/".join),
        st.binary(max_size=20), max_size=6,
    )
)  # fmt: skip
def test_the_tree_id_is_git_s(tmp_path_factory: pytest.TempPathFactory, content: dict[str, bytes]) -> None:
    folder = tmp_path_factory.mktemp("tree")
    executable = []
    for number, (path, data) in enumerate(content.items()):
        target = folder / path
        if any(parent.is_file() for parent in target.parents) or target.is_dir():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        if number % 2:
            executable.append(path)
    git(folder, "init", "--quiet")
    git(folder, "-c", "core.autocrlf=false", "add", ".")
    for path in executable:
        git(folder, "update-index", "--chmod=+x", path)
    assert tree_id(folder, executable) == git(folder, "write-tree")


def test_mirrors_go_before_the_address_or_replace_it() -> None:
    assert mirrored("mamba_ssm", "https://m.example/") == "https://m.example/https://github.com/state-spaces/mamba"
    assert mirrored("mamba_ssm", "https://m.example/{path}.git") == "https://m.example/state-spaces/mamba.git"


def test_every_known_release_without_sources_has_a_pinned_tag_and_an_offer() -> None:
    from anymamba.upstream.releases import known_versions

    for name in ("mamba_ssm", "causal_conv1d"):
        for version in map(str, known_versions(name)):
            if not tags.sdist_has_sources(name, version):
                pin = tags.pinned(name, version)
                assert pin is not None and len(pin.tree) == len(pin.csrc) == 40
                assert tags.sdist_has_sources(name, tags.nearest(name, version).version)


def test_wishes_are_read_or_refused() -> None:
    assert releases([]) == {"causal_conv1d": "1.4.0", "mamba_ssm": "2.2.2"}
    assert list(releases(["mamba-ssm==2.2.5"]).items()) == [("causal_conv1d", "1.6.1"), ("mamba_ssm", "2.2.5")]
    assert exact_release("causal-conv1d") == ("causal_conv1d", "1.4.0")
    assert releases(["causal_conv1d>=1.5,<1.6"]) == {"causal_conv1d": "1.5.3.post1"}
    assert parse_architectures("8.6, 8.9+PTX;9.0a") == ("8.6", "8.9+PTX", "9.0a")
    assert parse_rules(["kernel-parameters,kNThreads=64", "bool-switch-static"]) == (
        ["kernel-parameters", "bool-switch-static"], {"kNThreads": 64},
    )  # fmt: skip
    for wrong in (lambda: parse_architectures("sm_86"), lambda: parse_rules(["x"]), lambda: releases(["numpy"])):
        with pytest.raises(OptionError):
            wrong()
