"""What backward computes again instead of keeping it.

Entry point: `recompute_copies`, for the partitioner, once the graph is rewritten.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fx_passes.graph.facts import is_backward
from fx_passes.graph.operators import VIEWS, is_elementwise, is_pure

slime_fused = torch.ops.slime_fused

# NOTE [Copies of given logits]
# `logits.masked_fill(~allowed, -inf)` of logits that the graph is given is stored for `row_stats`, which is a kernel of
# its own. To the partitioner, which saves the fewest bytes, keeping that copy costs as much as keeping the logits; but
# the logits are in memory anyway, and the copy is not. Where backward reads it in arithmetic alone, it need not be
# there at all: it is computed again, element by element, in the kernel that makes the gradient. `row_grad` would store
# it again, and so would whoever gets it returned.


def recompute_copies(graph: Graph) -> None:
    """Element-wise copies of given logits are not kept where backward needs their elements only."""
    given = _from_inputs(graph)
    for operator in graph.find_nodes(op="call_function", target=slime_fused.row_stats.default):
        copy = operator.args[0]
        # what forward changes has its policy already
        needed = any(map(_stores, copy.users)) or "recompute" in copy.meta
        if copy in given and copy.op == "call_function" and not needed:
            copy.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def _from_inputs(graph: Graph) -> set[Node]:
    """Inputs, and what forward makes of them and of constants, element by element."""
    found: set[Node] = set()
    for node in graph.nodes:
        if not is_backward(node) and _is_cheap(node, found):
            found.add(node)
    return found


def _is_cheap(node: Node, found: set[Node]) -> bool:
    """An input, or made of what was found without reading any element but that at its place."""
    if node.op != "call_function":
        return node.op in ("placeholder", "get_attr")
    if not is_pure(node) or not found.issuperset(node.all_input_nodes):
        return False
    return not node.all_input_nodes or node.target in VIEWS or is_elementwise(node)


def _stores(reader: Node) -> bool:
    return reader.op == "output" or reader.target is slime_fused.row_grad.default
