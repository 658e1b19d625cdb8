"""A batch of matrices, each multiplied by the same matrix, is one matmul.

    bmm(hidden [B, S, D], expand(weight.t() [D, V], [B, D, V]))  ->  view(mm(view(hidden, [B * S, D]), weight.t()))
    bmm(hidden [1, S, D], weight [1, D, V])  ->  view(mm(view(hidden, [S, D]), view(weight, [D, V])))

Entry point: `multiply_once`, on the joint graph. Torch expands a frozen weight if hidden is a part of a tensor
(`hidden[:, :-1]`), and multiplies batches of one for `einsum`; loops over rows multiply matrices only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import is_wide, rank_of, same, same_shape, shape_of, value
from fx_passes.graph.operators import RESHAPES, turns
from fx_passes.graph.order import tidy
from fx_passes.torch_private import detect_fake_mode

aten = torch.ops.aten


def multiply_once(graph: Graph, min_vocab: int) -> int:
    """Rewrites each `bmm` to or from a vocabulary by one matrix for all.

    Returns:
        How many; with 0 the graph is exactly as it was.
    """
    found = []
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        if any(is_wide(each, min_vocab) for each in (node, *node.all_input_nodes)):
            matrix, turned = _matrix(node.args[1])
            if matrix is not None:
                found.append((node, matrix, turned))
    fake_mode = detect_fake_mode([value(node) for node, *_ in found])
    if fake_mode is None:
        return 0
    emit = Emitter(graph, fake_mode)
    with graph.inserting_before(graph.output_node()):
        for node, matrix, turned in found:
            emit.origin = node
            rows: Any = node.args[0]
            batch, length, width = emit.sizes(rows)
            flat = emit.reshape(rows, [emit.times(batch, length), width])
            if turned:
                matrix = emit.call(aten.permute.default, matrix, [1, 0])
            elif rank_of(matrix) == 3:
                matrix = emit.reshape(matrix, emit.sizes(matrix)[1:])
            made = emit.call(aten.mm.default, flat, matrix)
            node.replace_all_uses_with(emit.reshape(made, [batch, length, emit.size(made, 1)]))
    tidy(graph)
    return len(found)


def _matrix(node: Node) -> tuple[Node | None, bool]:
    """The matrix repeated by `node`, if it repeats one, and whether it is transposed."""
    if same(shape_of(node)[0], 1):
        return node, False
    turned = False
    while node.op == "call_function":
        inner: Node = node.args[0]  # type: ignore[assignment]
        if node.target is aten.expand.default and len(shape_of(inner)) == 2:
            return inner, turned
        if turns(node):
            turned = not turned
        elif node.target not in RESHAPES or not same_shape(shape_of(node), shape_of(inner)):
            break
        node = inner
    return None, False
