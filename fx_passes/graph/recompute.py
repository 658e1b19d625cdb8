"""What backward computes again instead of keeping it.

Entry point: `recompute_elements`, for the partitioner, once the graph is rewritten.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fx_passes.graph.backward import is_tangent
from fx_passes.graph.facts import is_as_wide, is_backward
from fx_passes.graph.operators import REDUCTIONS, VIEWS, is_elementwise, is_pure

slime_fused = torch.ops.slime_fused

# NOTE [Elements of given logits]
# `logits.masked_fill(~allowed, -inf)` of logits that the graph is given is stored for `row_stats`, which is a kernel of
# its own. To the partitioner, which saves the fewest bytes, keeping that copy costs as much as keeping the logits; but
# the logits are in memory anyway, and the copy is not. So it is with a teacher's softmax that is spelled out: made of
# the teacher's logits and their statistics, element by element. Where backward reads such values in arithmetic alone,
# they need not be there at all: they are computed again, element by element, in the kernel that makes the gradient.
# `row_grad` would store them again, and so would a matmul, or whoever gets them returned.


def recompute_elements(graph: Graph) -> None:
    """Copies of given logits, and what is made of them and their statistics, are not kept where backward needs their
    elements only.
    """
    statistics = graph.find_nodes(op="call_function", target=slime_fused.row_stats.default)
    logits = {node.all_input_nodes[0] for node in statistics}
    made, of_statistics = _made_of_inputs(graph)
    again: set[Node] = set()
    for node in reversed(graph.nodes):
        asked = node in logits or node in of_statistics or not again.isdisjoint(node.users)
        decided = node.op != "call_function" or "recompute" in node.meta  # what forward changes
        if not asked or decided or node not in made:
            continue
        if is_as_wide(node, logits) and not _is_stored(node):
            again.add(node)
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def _made_of_inputs(graph: Graph) -> tuple[set[Node], set[Node]]:
    """What is made of forward's inputs, constants and statistics, element by element; what of that is of statistics."""
    made = {n for n in graph.nodes if n.op in ("placeholder", "get_attr") and not is_tangent(n)}
    of_statistics: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or is_backward(node):
            continue
        if _is_statistic(node):
            of_statistics.add(node)
        elif _reads_one_element(node) and all(
            each in made or each in of_statistics for each in node.all_input_nodes
        ):
            made.add(node)
            if not of_statistics.isdisjoint(node.all_input_nodes):
                of_statistics.add(node)
    return made, of_statistics


def _is_statistic(node: Node) -> bool:
    if node.target is not operator.getitem:
        return False
    (source,) = node.all_input_nodes
    return source.target is slime_fused.row_stats.default


def _reads_one_element(node: Node) -> bool:
    """Of each input that at its place, if any."""
    if not is_pure(node):
        return False
    return not node.all_input_nodes or node.target in VIEWS or is_elementwise(node)


def _is_stored(node: Node) -> bool:
    """Whether a reader needs it in memory: the caller, or of backward what is not arithmetic."""
    return any(
        _stores(reader) or (reader.target in VIEWS and _is_stored(reader)) for reader in node.users
    )


def _stores(reader: Node) -> bool:
    if reader.op == "output" or reader.target is slime_fused.row_grad.default:
        return True
    absorbed = reader.target in VIEWS | REDUCTIONS or is_elementwise(reader)
    return is_backward(reader) and not absorbed
