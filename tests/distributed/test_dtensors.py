"""DTensors sharded over batch, channels, heads, groups or rows: each rank computes its part, and nothing travels forward."""

from __future__ import annotations

import pytest
import torch

from anymamba.distributed.dtensor import RULES, register
from dtensor_jobs import CASES, compile_heads, run_case, shard_unevenly
from rank_pool import Pool

pytestmark = pytest.mark.skipif(not register(), reason="register_sharding came with torch 2.6")


@pytest.mark.parametrize("name", CASES)
def test_an_operator_on_shards_sends_nothing_and_equals_the_whole(pool: Pool, name: str) -> None:
    for placement, messages, errors in pool.run(run_case, 2, name):
        assert placement == f"S({CASES[name][3]})"
        assert messages == 0
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize(("groups", "expected"), [(1, "S(2)"), (3, "R")])
def test_three_heads_on_two_ranks_are_right_and_their_groups_never_cut(pool: Pool, groups: int, expected: str) -> None:
    for placement, difference in pool.run(shard_unevenly, 2, groups):
        assert placement == expected
        assert difference < 1e-12


def test_sharded_heads_compile_into_one_graph(pool: Pool) -> None:
    for placement, difference, gradient in pool.run(compile_heads, 2):
        assert (placement, gradient) == ("S(2)", "S(0)")
        assert difference < 1e-12


@pytest.mark.parametrize("operator", RULES)
def test_a_rule_names_the_arguments_and_results_of_its_operator(operator: str) -> None:
    schema = getattr(torch.ops.anymamba, operator).default._schema
    tensors = {argument.name for argument in schema.arguments if "Tensor" in str(argument.type)}
    assert set(RULES[operator].inputs) == tensors
    assert len(RULES[operator].outputs) == len(schema.returns)


def test_every_operator_that_writes_nothing_in_place_has_a_rule() -> None:
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("anymamba::")]
    pure = {
        schema.name.partition("::")[2]
        for schema in schemas
        if not any(argument.alias_info is not None for argument in schema.arguments)
    }
    # packed sequences' last columns: what it reads lies anywhere in the batch; the sharded_ ones are context_parallel's own
    assert {name for name in pure if not name.startswith("sharded_")} - set(RULES) == {"causal_conv1d_varlen_states"}
