import pytest
import torch
from torch.fx import Graph

from fx_passes.graph.order import sort

aten = torch.ops.aten


def test_nodes_stand_after_their_inputs() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten.neg.default, (x,))
    second = graph.call_function(aten.exp.default, (x,))
    graph.output(first)
    first.args = (second,)
    sort(graph)
    assert [node for node in graph.nodes if node.op == "call_function"] == [second, first]
    graph.lint()


def test_a_node_that_depends_on_itself_is_an_error() -> None:
    """Not a compile that never ends."""
    graph = Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten.neg.default, (x,))
    second = graph.call_function(aten.exp.default, (first,))
    graph.output(second)
    first.args = (second,)
    with pytest.raises(ValueError, match="depends on itself"):
        sort(graph)
