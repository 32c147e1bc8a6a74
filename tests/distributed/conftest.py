"""The ranks that the tests of this folder share: four processes for the whole session, eight where asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rank_pool import Pool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    if not torch.distributed.is_available():
        pytest.skip("this torch was built without torch.distributed")
    ranks = Pool(4, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    ranks = Pool(8, tmp_path_factory.mktemp("eight"))
    yield ranks
    ranks.close()
