"""Every rule on the real archives of the package index that hold C++ and CUDA sources."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from anymamba.upstream.native.rules import Rule, all_rules, work_out
from anymamba.upstream.native.sources import get_sources

pytestmark = pytest.mark.network

RELEASES = [
    ("causal_conv1d", "1.5.2"),
    ("causal_conv1d", "1.7.0"),
    ("mamba_ssm", "2.2.5"),
    ("mamba_ssm", "2.3.2.post1"),
]


@pytest.fixture(scope="module", params=RELEASES, ids="-".join)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    name, version = request.param
    folder = tmp_path_factory.mktemp(name) / "source"
    return get_sources(name, version, folder, python=Path(sys.executable)).folder, name, version


def edits_of(name: str, version: str) -> list[Rule]:
    return [one for one in all_rules() if one.edit is not None and one.applies_to(name, version)]


def test_each_rule_alone_and_all_together(release: tuple[Path, str, str]) -> None:
    source, name, version = release
    rules = edits_of(name, version)
    for one in rules:
        assert work_out(source, name, version, [one], {"kNThreads": 64} if one.asked else None)[0], one.id
    changes, applied = work_out(source, name, version, [one for one in rules if one.id != "kernel-parameters"])
    assert changes and {done.outcome for done in applied} == {"edited"}
    for change in changes:
        same_place = sum(a == b for a, b in zip(change.before.splitlines(), change.after.splitlines()))
        if change.file.startswith("csrc/"):
            assert same_place > 0.9 * len(change.before.splitlines()), change.file
