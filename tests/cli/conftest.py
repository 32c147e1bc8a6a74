"""Commands under test get a terminal of their own: the real one keeps the streams it was made with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from anymamba.cli.terminal import terminal


@pytest.fixture(autouse=True)
def _fresh_terminal() -> Iterator[None]:
    terminal.cache_clear()
    yield
    terminal.cache_clear()
