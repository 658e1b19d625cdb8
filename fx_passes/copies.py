"""What backward copies over the logits is written there at once: `copy_(x, row_grad(x))` becomes `row_grad_(x)`.

Entry point: `write_copies`, on the backward graph after partitioning, as `inplace.py`. slime's entropy subtracts in the
logits that it was given; no third full-vocabulary value is needed for that.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from fx_passes.graph.aliases import Aliases
from fx_passes.graph.facts import value
from fx_passes.graph.operators import WHOLE_VIEWS
from fx_passes.graph.order import ancestors
from fx_passes.inplace import is_kernel, non_overlapping

aten = torch.ops.aten
fused = torch.ops.slime_fused


def write_copies(graph: Graph) -> None:
    """Rewrites every copy whose value nothing else reads, and before which all other readers of the logits are done."""
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        made = _under_views(copy.args[1])
        if made.target is not fused.row_grad.default or copy.users:
            continue
        if _is_over(made, copy) and _is_alone(made, copy) and _is_last(graph, made, copy):
            _write(graph, made, copy)


def _under_views(node: object) -> Node:
    assert isinstance(node, Node), node
    while node.target in WHOLE_VIEWS:
        node = node.all_input_nodes[0]
    return node


def _is_over(made: Node, copy: Node) -> bool:
    """Element for element: the value has the logits' own dtype and shape, and they are an input."""
    into = copy.args[0]
    assert isinstance(into, Node), copy
    old, new = value(into), value(made)
    whole = made is copy.args[1] and made.args[0] is into and into.op == "placeholder"
    return whole and old.dtype == new.dtype and non_overlapping(old)


def _is_alone(made: Node, copy: Node) -> bool:
    return set(made.users) == {copy}


def _is_last(graph: Graph, made: Node, copy: Node) -> bool:
    """All who read the logits do so before; see NOTE [Readers of the logits must be kernels of their own]."""
    aliases, order = Aliases(graph), {node: at for at, node in enumerate(graph.nodes)}
    x, before = made.args[0], ancestors([made])
    assert isinstance(x, Node), made
    if any(alias is not x and alias in before for alias in aliases.of(x)):
        return False
    readers = {user for alias in aliases.of(x) for user in alias.users} - {made, copy}
    return all(
        aliases.only_views(user, x) or (is_kernel(user) and order[user] < order[copy])
        for user in readers
    )


def _write(graph: Graph, made: Node, copy: Node) -> None:
    x, terms, affine, index, weight, softmax, _, region = made.args
    with graph.inserting_before(copy):
        write = graph.call_function(
            fused.row_grad_.default, (x, terms, affine, index, weight, softmax, region)
        )
    write.meta = {**made.meta, "val": None}
    graph.erase_node(copy)
    graph.erase_node(made)
