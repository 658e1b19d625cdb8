import pytest
import torch
from torch.fx import Graph, Node

from fx_passes.graph.order import sort

aten = torch.ops.aten


def two_nodes() -> tuple[Graph, Node, Node, Node]:
    """A graph of an input, its negative and its exponential."""
    graph = Graph()
    x = graph.placeholder("x")
    return graph, x, *(graph.call_function(f, (x,)) for f in (aten.neg.default, aten.exp.default))


def test_nodes_stand_after_their_inputs() -> None:
    graph, _, first, second = two_nodes()
    graph.output(first)
    first.args = (second,)
    sort(graph)
    assert [node for node in graph.nodes if node.op == "call_function"] == [second, first]
    graph.lint()


def test_a_node_that_depends_on_itself_is_an_error() -> None:
    """Not a compile that never ends."""
    graph, _, first, second = two_nodes()
    graph.output(second)
    first.args, second.args = (second,), (first,)
    with pytest.raises(ValueError, match="depends on itself"):
        sort(graph)
