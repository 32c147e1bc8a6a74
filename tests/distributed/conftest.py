"""The ranks that the tests of this folder share: four processes, eight where asked for; gone when its tests are done."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rank_pool import Pool

_pools: list[Pool] = []


def _start(size: int, folder: Path) -> Pool:
    if not torch.distributed.is_available():
        pytest.skip("this torch was built without torch.distributed")
    _pools.append(Pool(size, folder))
    return _pools[-1]


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return _start(4, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="session")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return _start(8, tmp_path_factory.mktemp("eight"))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the ranks after the folder's last test: a session goes on for minutes, and each holds a whole torch."""
    folder, items = Path(__file__).parent, item.session.items
    if not any(folder in later.path.parents for later in items[items.index(item) + 1 :]):
        while _pools:
            _pools.pop().close()
