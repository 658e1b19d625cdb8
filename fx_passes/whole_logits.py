"""A gradient over reshaped logits becomes a gradient over the logits in their given shape.

Entry point: `use_whole_logits`, on the joint graph after `fuse`. If the loss starts with `logits.view(-1, V)`,
`flatten` or `squeeze(0)`, `row_grad` reads the view, and the partitioner saves the view. It has the logits' memory, but
neither autograd's version counter nor the caller's references, so other users of the memory are invisible. Rows are
rows in any arrangement: this pass reshapes the coefficients and the result instead, and the logits themselves are
saved.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import rank_of, same, shape_of
from fx_passes.graph.operators import RESHAPES, under
from fx_passes.graph.order import tidy
from fx_passes.torch_private import detect_fake_mode

aten = torch.ops.aten

_SAME_ROWS = RESHAPES | {aten.alias.default, aten.detach.default}


def use_whole_logits(graph: Graph) -> int:
    """Rewrites each `row_grad` of reshaped inputs.

    Returns:
        How many; with 0 the graph is exactly as it was.
    """
    found = [
        (node, whole)
        for node in graph.find_nodes(
            op="call_function", target=torch.ops.slime_fused.row_grad.default
        )
        if (whole := _whole(node.args[0])) is not None
    ]
    if not found:
        return 0
    fake_mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    if fake_mode is None:
        return 0
    emit = Emitter(graph, fake_mode)
    emit.adopt_all()
    output = graph.output_node()
    for node, whole in found:
        emit.origin = node
        with graph.inserting_before(output):
            node.replace_all_uses_with(_over(emit, node, whole))
        graph.erase_node(node)
    tidy(graph)
    return len(found)


def _whole(x: Node) -> Node | None:
    """The input that `x` reshapes, with the same rows."""
    node = under(x, _SAME_ROWS)
    if node is x or node.op != "placeholder" or not rank_of(node):
        return None
    return node if same(shape_of(node)[-1], shape_of(x)[-1]) else None


def _over(emit: Emitter, node: Node, whole: Node) -> Node:
    """The gradient in the shape of `whole`, reshaped to that of `node`."""
    _, *coefficients, softmax, dtype, region = node.args
    rows = emit.sizes(whole)[:-1]
    inner = (2, 1, 1, 1)  # dimensions of a row's part of terms, affine, index, weight
    moved = []
    for value, rank in zip(coefficients, inner, strict=True):
        assert isinstance(value, Node), node
        moved.append(emit.reshape(value, [*rows, *emit.sizes(value)[-rank:]]))
    gradient = emit.call(node.target, whole, *moved, softmax, dtype, region)
    return emit.reshape(gradient, emit.sizes(node))
