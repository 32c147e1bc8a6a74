"""Upstream's language models, unedited, trained in every way that PyTorch distributes: the losses are those of one process."""

from __future__ import annotations

import pytest
import torch

from distributed_models import evaluate_packed, train, train_in_stages, train_on_a_mesh, train_tensor_parallel
from ported_upstream import build_upstream
from rank_pool import Pool, RankFailedError

pytestmark = pytest.mark.network

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_upstream(tmp_path_factory.mktemp("upstream")))


@pytest.fixture(scope="module")
def single(pool: Pool, port: str) -> dict[str, list[float]]:
    return {layer: pool.run(train, 1, port, layer, "single")[0] for layer in ("Mamba1", "Mamba2")}


WAYS = [
    "ddp",
    "ddp checkpoint",
    pytest.param("fsdp", marks=pytest.mark.skipif(TORCH < (2, 6), reason="fully_shard is public from torch 2.6 on")),
    "cp ddp",
    "cp ddp checkpoint",
    pytest.param(
        "cp ddp compile",
        marks=pytest.mark.skipif(
            TORCH < (2, 4), reason="dynamo of older releases breaks the graph at a changed global"
        ),
    ),
    pytest.param(
        "cp fsdp checkpoint any backend",
        marks=pytest.mark.skipif(TORCH < (2, 6), reason="fully_shard is public from torch 2.6 on"),
    ),
]


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2"])
@pytest.mark.parametrize("how", WAYS)
def test_losses_are_those_of_one_process(
    pool: Pool, port: str, single: dict[str, list[float]], layer: str, how: str
) -> None:
    for losses in pool.run(train, 2, port, layer, how):
        torch.testing.assert_close(losses, single[layer], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2"])
@pytest.mark.parametrize("size", [3, 4])
def test_the_sequence_over_more_ranks(
    pool: Pool, port: str, single: dict[str, list[float]], layer: str, size: int
) -> None:
    for losses in pool.run(train, size, port, layer, "cp ddp"):
        torch.testing.assert_close(losses, single[layer], rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(TORCH < (2, 3), reason="meshes are sliced by name from torch 2.2 on")
def test_a_mesh_of_data_parallel_and_sequence(pool: Pool, port: str, single: dict[str, list[float]]) -> None:
    for losses in pool.run(train_on_a_mesh, 4, port, "Mamba2"):
        torch.testing.assert_close(losses, single["Mamba2"], rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(TORCH < (2, 6), reason="torch.distributed.pipelining is new")
@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2"])
def test_stages_of_a_pipeline(pool: Pool, port: str, layer: str) -> None:
    alone = pool.run(train, 1, port, layer, "single untied")[0]
    torch.testing.assert_close(pool.run(train_in_stages, 2, port, layer)[1], alone, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2"])
def test_mixed_precision(pool: Pool, port: str, layer: str) -> None:
    alone = pool.run(train, 1, port, layer, "single autocast")[0]
    for losses in pool.run(train, 2, port, layer, "cp ddp autocast"):
        torch.testing.assert_close(losses, alone, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bounds", [None, [12], [11, 13], [3, 20]])
def test_packed_sequences_in_a_context(pool: Pool, port: str, bounds: list[int] | None) -> None:
    numbers = None
    if bounds is not None:
        numbers = torch.zeros(1, 24, dtype=torch.int32)
        for bound in bounds:
            numbers[:, bound:] += 1
    whole = pool.run(evaluate_packed, 1, port, "Mamba2", numbers, False)[0]
    for size in (2, 3):
        for logits in pool.run(evaluate_packed, size, port, "Mamba2", numbers, True):
            torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_upstreams_tensor_parallel_layers(pool: Pool, port: str, sequence_parallel: bool) -> None:
    try:
        results = pool.run(train_tensor_parallel, 2, port, sequence_parallel)
    except RankFailedError as error:
        if "no support for _allgather_base in Gloo" in str(error):
            pytest.skip(f"torch {torch.__version__} has no all_gather_into_tensor for gloo")
        raise
    for whole, split in results:
        torch.testing.assert_close(split, whole, rtol=2e-5, atol=2e-5)
