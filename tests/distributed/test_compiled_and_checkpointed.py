"""A sharded sequence in one graph of torch.compile, and under activation checkpointing; heads sharded as DTensors."""

from __future__ import annotations

import pytest
import torch

from distributed_jobs import checkpoint_and_leave, compile_whole, scan_sharded_heads
from rank_pool import Pool

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.mark.skipif(TORCH < (2, 4), reason="dynamo of older releases breaks the graph at a changed global")
@pytest.mark.parametrize("entered", ["parallelize", "context"])
def test_one_graph_holds_every_sharded_operator_and_computes_the_same(pool: Pool, entered: str) -> None:
    for operators, difference, gradient_difference in pool.run(compile_whole, 2, entered):
        assert operators == ["sharded_causal_conv1d", "sharded_selective_scan", "sharded_ssd"]
        assert difference == 0
        assert gradient_difference == 0


def test_a_forward_run_again_outside_the_context_is_an_error_and_not_another_value(pool: Pool) -> None:
    assert pool.run(checkpoint_and_leave, 2, False) == ["CheckpointError"] * 2
    assert pool.run(checkpoint_and_leave, 2, True) == ["no error"] * 2


@pytest.mark.skipif(TORCH < (2, 6), reason="torch.distributed.tensor is public from torch 2.5 on")
def test_heads_sharded_as_dtensors(pool: Pool) -> None:
    for errors in pool.run(scan_sharded_heads, 2):
        assert max(errors.values()) < 1e-5, errors
