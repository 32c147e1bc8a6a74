"""Everything in this folder needs Windows: a real one, or the laboratory's (`python -m tools.windows_lab test`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from windows_helpers import Run

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.windows)
            if os.name != "nt":
                item.add_marker(pytest.mark.skip(reason="needs Windows; `python -m tools.windows_lab test` has one"))


@pytest.fixture
def python() -> Run:
    """Run this Python anew with arguments; output as bytes, for its code page is what is tested."""

    def run(
        arguments: Sequence[str], variables: Mapping[str, str | None] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        environment = dict(os.environ)
        for name, value in (variables or {}).items():
            environment.pop(name, None)
            if value is not None:
                environment[name] = value
        return subprocess.run(
            [sys.executable, *arguments], env=environment, cwd=cwd, capture_output=True, check=False, timeout=240
        )

    return run
