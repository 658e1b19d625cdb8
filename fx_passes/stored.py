"""The full-vocabulary values a rewritten graph stores; the others are parts of a kernel and never in memory.

Entry point: `stored_values`. The logits do not count, nor does one gradient of each, nor a value that the program
returns.

NOTE [What is stored]
Inductor computes element-wise values where they are read. A value is in memory if a separate kernel computes it (a
sort, a fused operator) or reads it (a matmul, a fused operator), and if the caller gets it. Backward reads values
stored by forward and recomputes the rest. An element-wise function of a stored value without other readers overwrites
it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from fx_passes.graph.backward import forward_outputs
from fx_passes.graph.facts import is_as_wide, is_backward, is_given, same_shape, shape_of, value
from fx_passes.graph.operators import (
    MATMULS,
    REDUCTIONS,
    SHOWN,
    VIEWS,
    WHOLE_VIEWS,
    is_elementwise,
    under,
)

aten = torch.ops.aten
slime_fused = torch.ops.slime_fused

_INLINED = {
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.constant_pad_nd.default,
    aten.full.default,
    aten.full_like.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.flip.default,
    aten.scatter.value,
    aten.copy.default,
}
"""Element-wise for inductor, although an element comes from another place."""

_ENDS = MATMULS | REDUCTIONS


def stored_values(graph: Graph) -> int:
    """Their number, apart from the logits of fused operators, one gradient of each, and forward's results."""
    operators = [n for n in graph.nodes if _reads_logits(n)]
    roots = {under(n.all_input_nodes[0], VIEWS) for n in operators}
    wide = _wide(graph, roots)
    stored = {node for node in wide if _makes(node) or any(_stores(u) for u in _readers(node))}
    leaving = {node for node in stored if is_backward(node) and any(map(_leaves, _readers(node)))}
    counted = stored - _written_over(graph, stored, wide)
    counted -= {under(node, WHOLE_VIEWS) for node in forward_outputs(graph)}
    return len(counted) - min(len(leaving & counted), len(roots))


def _wide(graph: Graph, roots: set[Node]) -> set[Node]:
    """Values computed from the logits and as wide. Exception: matmuls and sums, whose last dimension may be equal by
    chance.
    """
    found: set[Node] = set()
    for node in graph.nodes:
        made = not (found | roots).isdisjoint(node.all_input_nodes) or _reads_logits(node)
        tensor = isinstance(value(node), torch.Tensor | tuple | list)
        if made and tensor and node.target not in _ENDS and node.op == "call_function":
            found.add(node)
    return {
        node
        for node in found
        if node not in roots
        and isinstance(value(node), torch.Tensor)
        and node.target not in SHOWN - {aten.clone.default}
        and node.target is not aten.copy_.default
        and is_as_wide(node, roots)
    }


def _reads_logits(node: Node) -> bool:
    return node.target in (slime_fused.row_stats.default, slime_fused.row_grad.default)


def _makes(node: Node) -> bool:
    """A separate kernel computes it."""
    return not (is_elementwise(node) or node.target in _INLINED)


def _readers(node: Node) -> Iterable[Node]:
    """Of the value, by whatever view."""
    for user in node.users:
        if user.target in VIEWS:
            yield from _readers(user)
        else:
            yield user


def _stores(reader: Node) -> bool:
    absorbed = is_elementwise(reader) or reader.target in REDUCTIONS | _INLINED
    return reader.op == "output" or not (absorbed or reader.target is operator.getitem)


def _leaves(reader: Node) -> bool:
    return reader.op == "output" or reader.target in MATMULS


def _written_over(graph: Graph, stored: set[Node], wide: set[Node]) -> set[Node]:
    """Stored values overwritten by another one; each by one at most."""
    over: set[Node] = set()
    for node in graph.nodes:
        if node not in stored or _makes(node):
            continue
        free = (each for each in _operands(node, stored) if each not in over)
        taken = next((e for e in free if _only_for(e, node) and _fits(e, node)), None)
        if taken is not None:
            over.add(taken)
    return over


def _operands(node: Node, stored: set[Node]) -> Iterable[Node]:
    """The stored values read by the kernel of an element-wise value."""
    waiting, seen = list(node.all_input_nodes), set()
    while waiting:
        each = waiting.pop()
        if each in seen or is_given(each):
            continue
        seen.add(each)
        if each in stored:
            yield each
        elif is_elementwise(each) or each.target in VIEWS | _INLINED:
            waiting += each.all_input_nodes


def _only_for(operand: Node, node: Node) -> bool:
    """It has no readers after the kernel of `node`."""
    return all(user <= node for user in _readers(operand))


def _fits(operand: Node, node: Node) -> bool:
    same = value(operand).dtype.itemsize == value(node).dtype.itemsize
    return same and same_shape(shape_of(operand), shape_of(node))
