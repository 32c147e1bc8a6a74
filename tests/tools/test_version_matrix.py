"""Every release with every partner: a slice in each run, all of it when slow tests run; the command writes the table."""

from __future__ import annotations

import pytest

from anymamba.upstream.releases import known_versions
from tools.version_matrix import Pair, report, run_matrix

OLDEST = {"mamba_ssm": "1.2.0", "causal_conv1d": "1.1.1"}
NEWEST = {"mamba_ssm": "2.3.2.post1", "causal_conv1d": "1.7.0"}


@pytest.mark.network
def test_the_ends_of_the_range_hold_with_each_other() -> None:
    pairs = run_matrix(*([OLDEST[name], NEWEST[name]] for name in ("mamba_ssm", "causal_conv1d")))
    assert len(pairs) == 4
    for pair in pairs:
        assert pair.failed == [], pair
        assert pair.left_out == {} and pair.modules > 15 and pair.names > 15
        assert pair.guide[0] == "Mamba" and ("Mamba2" in pair.guide) is (pair.mamba_ssm == NEWEST["mamba_ssm"])
        # what third parties import from the old version, and what only upstream's compilers can run in the new one
        assert not [name for name in pair.refused if name.startswith("mamba_ssm.ops.triton.layernorm.layer_norm_fn")]
    assert any("cute" in name or "tilelang" in name for name in pairs[-1].refused)


@pytest.mark.slow
@pytest.mark.network
def test_every_release_holds_with_every_partner() -> None:
    versions = {name: [str(v) for v in known_versions(name)] for name in ("mamba_ssm", "causal_conv1d")}
    pairs = run_matrix(versions["mamba_ssm"], versions["causal_conv1d"])
    assert len(pairs) == len(versions["mamba_ssm"]) * len(versions["causal_conv1d"]) > 500
    assert [pair for pair in pairs if pair.failed] == []


def test_the_table_shows_what_failed() -> None:
    good = Pair("2.2.2", "1.4.0", modules=40, scan_error=1e-7, convolution_error=1e-7, guide=["Mamba"], names=3)
    bad = Pair("2.2.2", "1.7.0", failed=["guide: RuntimeError: no"])
    table = report([good, bad])
    assert "**1 of 2 pairs**" in table
    assert "| 2.2.2 | 1.4.0 | 40 | - | 1e-07 | 1e-07 | Mamba | 3 | 0 | 1 of 2 |" in table
    assert "| 2.2.2 | + | FAILED |" in table and "- 2.2.2 with 1.7.0: guide: RuntimeError: no" in table
