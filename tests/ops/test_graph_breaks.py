"""torch.compile sees every operator in one graph: `torch._dynamo.explain` finds no reason to break it, nor in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anymamba.measure.cases import Case, Draw, all_cases

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(TORCH < (2, 4), reason="dynamo of older releases breaks the graph at a named tuple")

CASES = {f"{case.operator.name}: {case.name}": case for case in all_cases() if torch.float32 in case.dtypes}


def explain(function: Any, *inputs: Any, **named: Any) -> Any:
    """What dynamo says of this call, each time from the start."""
    import torch._dynamo as dynamo

    dynamo.reset()
    return dynamo.explain(function)(*inputs, **named)


def operators_in(explained: Any) -> set[str]:
    """The operators of ours that its graphs call, as single nodes."""
    nodes = [node for graph in explained.graphs for node in graph.graph.nodes]
    return {str(node.target).split(".")[1] for node in nodes if str(node.target).startswith("anymamba.")}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_no_operator_breaks_the_graph(case: Case, training: bool) -> None:
    arguments = case.arguments(Draw(torch.float32, torch.device("cpu")))
    if not training:
        arguments = {
            name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()
        }
    seen = explain(case.function, **arguments)
    assert [str(reason.reason) for reason in seen.break_reasons] == []
    assert (seen.graph_count, seen.graph_break_count) == (1, 0)
    assert operators_in(seen), "the operator was traced through, not kept whole"


def test_what_breaks_a_graph_is_seen() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    assert explain(lambda x: broken(x).sin(), torch.ones(2)).graph_break_count == 1
