"""The lock file: complete, well-formed, and its partners real."""

from __future__ import annotations

import pytest
from packaging.version import Version

from anymamba.upstream.releases import DEFAULTS, PACKAGES, known, known_versions, package_name, partner


def test_every_release_has_a_file_of_its_name_a_size_and_a_sha256() -> None:
    for name in PACKAGES:
        for version in known_versions(name):
            release = known(name, str(version))
            assert release is not None
            assert release.file == f"{name}-{release.version}.tar.gz"
            assert release.size > 1000 and len(release.sha256) == 64 and int(release.sha256, 16)


def test_the_whole_history_is_there() -> None:
    assert known_versions("mamba_ssm")[0] >= Version("2.3.2.post1")
    assert known_versions("causal_conv1d")[0] >= Version("1.7.0")
    assert len(known_versions("mamba_ssm")) >= 26 and len(known_versions("causal_conv1d")) >= 22


def test_defaults_and_partners_are_known_releases() -> None:
    for name, version in DEFAULTS.items():
        assert known(name, version) is not None
    for version in known_versions("mamba_ssm"):
        assert known("causal_conv1d", partner(str(version))) is not None
    assert partner("2.2.2") == "1.4.0"
    assert Version(partner("2.2.5")) >= Version("1.5.1"), "needs causal_conv1d.cpp_functions"


@pytest.mark.parametrize("spelling", ["mamba_ssm", "mamba-ssm", "Mamba.SSM"])
def test_a_packages_name_may_be_spelt_in_pips_ways(spelling: str) -> None:
    assert package_name(spelling) == "mamba_ssm"
    assert package_name("mamba") is None
