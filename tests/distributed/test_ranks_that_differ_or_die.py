"""What goes wrong on one rank is a clear error on every rank, in time, and not a hang."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from anymamba.distributed import context_parallel
from anymamba.errors import OptionError
from distributed_jobs import convolve_and_lose_a_rank, mismatched, run_operator
from rank_pool import Pool


def conv(*shape: int, dtype: torch.dtype = torch.float32, width: int = 4, **more: torch.Tensor) -> dict[str, Any]:
    return {"x": torch.zeros(shape, dtype=dtype), "weight": torch.zeros(shape[1], width), **more}


DIFFERENT = {
    "batch": [conv(2, 4, 8), conv(1, 4, 8)],
    "channels": [conv(2, 4, 8), conv(2, 5, 8)],
    "dtype": [conv(2, 4, 8), conv(2, 4, 8, dtype=torch.bfloat16)],
    "an argument": [conv(2, 4, 8), conv(2, 4, 8, bias=torch.zeros(4))],
    "gradient": [conv(2, 4, 8), {**conv(2, 4, 8), "weight": torch.zeros(4, 4, requires_grad=True)}],
}


@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.parametrize("odd", [0, 2])
def test_a_difference_is_told_to_every_rank(pool: Pool, what: str, odd: int) -> None:
    usual, other = DIFFERENT[what]
    calls = [other if rank == odd else usual for rank in range(3)]
    errors = pool.run(mismatched, 3, "causal_conv1d_fn", calls, {})
    assert len(set(errors)) == 1
    assert errors[0].startswith("ShapeError: The ranks of one sequence were called differently:")
    assert all(f"rank {rank}: length 8, causal_conv1d_fn(x (" in errors[0] for rank in range(3))
    assert "shard_sequence" in errors[0]


def test_a_wrong_argument_on_one_rank_is_its_own_error_there_and_told_to_the_others(pool: Pool) -> None:
    calls = [conv(2, 4, 8), {**conv(2, 4, 8), "weight": torch.zeros(5, 4)}]
    errors = pool.run(mismatched, 2, "causal_conv1d_fn", calls, {})
    assert errors[1].startswith("ShapeError: weight has shape (5, 4)")
    assert "rank 1: length 0, refused: weight has shape (5, 4)" in errors[0]


def test_a_part_shorter_than_the_filter_is_refused_on_every_rank(pool: Pool) -> None:
    errors = pool.run(mismatched, 2, "causal_conv1d_fn", [conv(1, 4, 8), conv(1, 4, 2)], {})
    assert errors[0] == errors[1]
    assert "at least 3 columns of the sequence, but rank 0 has 8, rank 1 has 2" in errors[0]


def test_lengths_may_differ(pool: Pool) -> None:
    assert pool.run(mismatched, 2, "causal_conv1d_fn", [conv(1, 4, 8), conv(1, 4, 5)], {}) == ["no error"] * 2


@pytest.mark.parametrize(("check", "times"), [("never", 0), ("entry", 1), ("always", 1)])
def test_what_the_handshake_costs_is_one_kibibyte_to_each_other_rank(pool: Pool, check: str, times: int) -> None:
    tensors = {"x": torch.zeros(1, 4, 9), "weight": torch.zeros(4, 4)}
    ranks = pool.run(run_operator, 3, "causal_conv1d_fn", tensors, {}, [torch.zeros(1, 4, 9)], [3, 3, 3], check)
    columns = 1 * 4 * 3 * 4  # batch, channels, width - 1, bytes
    assert [sent for _, _, (sent, _) in ranks] == [
        1024 * 2 * times + travelled for travelled in (columns, 2 * columns, columns)
    ]


@pytest.mark.parametrize(
    ("how", "when", "limit"),
    [
        pytest.param("killed", "forward", 60, marks=pytest.mark.slow),
        pytest.param("killed", "handshake", 60, marks=pytest.mark.slow),
        # Linux tells at once that a rank is gone; under wine nobody does before the group's timeout
        ("killed", "backward", 60 if os.name != "nt" else 8),
        ("hanging", "forward", 3),
    ],
)
def test_a_lost_rank_is_an_error_on_every_other_within_the_groups_timeout(
    tmp_path: Path, how: str, when: str, limit: float
) -> None:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(3):
        ours, theirs = context.Pipe()
        arguments = (rank, 3, tmp_path / "meeting", limit, how, when, theirs)
        process = context.Process(target=convolve_and_lose_a_rank, args=arguments, daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:  # all have imported torch: the group's timeout is for the ranks' work, not for their start
            assert pipe.poll(240), "a rank does not start"
            assert pipe.recv() == "ready"
        for pipe in pipes:
            pipe.send("go")
        for rank in (0, 2):
            assert pipes[rank].poll(240), f"rank {rank} hangs"
            text, seconds = pipes[rank].recv()
            assert text.startswith(f"Rank {rank} of 3 lost another rank of its sequence"), text
            assert "Why: " in text and "Next: " in text
            # three ranks share the cores with whatever else runs; without the product's limit it would be half an hour
            assert seconds < limit + 60
    finally:
        for process in processes:
            process.kill()


def test_without_a_process_group_the_context_says_what_to_call() -> None:
    with pytest.raises(OptionError, match="init_process_group"):
        context_parallel()


def test_a_check_that_does_not_exist_is_named(pool: Pool) -> None:
    outcomes = pool.outcomes(
        run_operator, 1, "causal_conv1d_fn", conv(1, 4, 8), {}, [torch.zeros(1, 4, 8)], [8], "sometimes"
    )
    assert "check is 'sometimes', but must be one of 'entry', 'always', 'never'" in outcomes[0][1]
