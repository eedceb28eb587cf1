"""vLLM's own splitting of a graph at our ops: what a model that calls them directly names in ``splitting_ops``."""

# pyright: reportMissingImports=false
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decode_step import DecodeStep, step_inputs

from tskernel.testing import compare

pytest.importorskip("vllm")

ATTENTION = ["tokenspeed::store_kvcache", "tokenspeed::mha_decode_with_kvcache"]


def test_a_graph_is_split_at_the_ops_that_are_named() -> None:
    from vllm.compilation.backends import split_graph

    captured: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        captured.append(graph)
        return graph

    step, inputs = DecodeStep(), step_inputs(2, 0)
    want = copy.deepcopy(step)(*inputs)
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    with torch.no_grad():
        compiled(*inputs)
    whole, parts = split_graph(captured[0], ATTENTION)
    names = [
        [node.target.name() for node in part.graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        for part in parts
    ]
    assert [part.is_splitting_graph for part in parts] == [False, True, False]
    assert names[1] == ATTENTION
    assert "tokenspeed::rmsnorm" in names[2] and not set(ATTENTION) & {*names[0], *names[2]}

    def again(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return whole

    torch._dynamo.reset()
    fresh = DecodeStep()
    compare(torch.compile(fresh, backend=again, fullgraph=True)(*inputs), want)
