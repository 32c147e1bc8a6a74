"""HOME is not set on Windows: the product needs none, and ports give Triton one (the guide's KeyError: 'HOME')."""

from __future__ import annotations

import os

import pytest

from anymamba.upstream.port.home import complete_environment
from windows_helpers import Run

SCRIPT = """
import os
import torch
from anymamba.ops import causal_conv1d_fn, selective_scan_fn
causal_conv1d_fn(torch.randn(1, 4, 6), torch.randn(4, 3))
u = torch.randn(1, 4, 8)
selective_scan_fn(u, torch.rand(1, 4, 8), -torch.rand(4, 2), torch.randn(1, 2, 8), torch.randn(1, 2, 8))
print("HOME" in os.environ)
"""


def test_windows_sets_no_home() -> None:
    if "MSYSTEM" in os.environ or "GITHUB_ACTIONS" in os.environ:
        pytest.skip("git's shell sets HOME")
    assert "HOME" not in os.environ


@pytest.mark.parametrize("missing", [("HOME",), ("HOME", "USERPROFILE", "LOCALAPPDATA", "APPDATA")], ids=str)
def test_operators_work_without_it_and_set_nothing(missing: tuple[str, ...], python: Run) -> None:
    result = python(["-c", SCRIPT], dict.fromkeys(missing))
    assert result.returncode == 0, result.stderr.decode(errors="replace")
    assert result.stdout.strip() == b"False"


def test_a_port_gives_the_profile_as_home() -> None:
    variables = {"USERPROFILE": "C:\\Users\\甲"}
    assert complete_environment(variables) == {
        "HOME": "C:\\Users\\甲",
        "TRITON_CACHE_DIR": "C:\\Users\\甲\\.triton\\cache",
    }
    assert complete_environment(variables) == {}
