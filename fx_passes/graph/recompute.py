"""Values backward recomputes instead of saving them.

Entry points: `recompute_elements`, for the partitioner, once the graph is rewritten; `keep_given`, once torch is done
with it, too.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fx_passes.graph.aliases import Aliases
from fx_passes.graph.backward import is_tangent
from fx_passes.graph.facts import is_as_wide, is_backward, is_given, same, value
from fx_passes.graph.operators import REDUCTIONS, VIEWS, is_elementwise, is_pure

slime_fused = torch.ops.slime_fused

_AGAIN = (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)

# NOTE [Elements of given logits]
# `logits.masked_fill(~allowed, -inf)` of logits passed in is stored for `row_stats`, a separate kernel. The partitioner
# saves the fewest bytes: to it, saving the copy costs as much as saving the logits. But the logits are in memory
# anyway, and the copy is not. The same holds for a teacher's softmax spelled out as arithmetic on the teacher's logits
# and their statistics. If backward reads such values in arithmetic only, they need no memory: the kernel of the
# gradient recomputes their elements. `row_grad`, a matmul, or a return of the value would store it again.
#
# The caller may change a returned value before backward; eager code would not notice. So a result is recomputed rather
# than read, by all readers. Other values are not recomputed from a result: they are saved, and their own readers may be
# recomputed.
#
# Logits computed by the graph in another way (rows picked by a mask, padded ones) have memory of their own anyway, and
# backward can overwrite it.


def recompute_elements(graph: Graph) -> None:
    """Copies of given logits, and element-wise functions of them, are recomputed if backward reads elements only."""
    statistics = graph.find_nodes(op="call_function", target=slime_fused.row_stats.default)
    logits = {node.all_input_nodes[0] for node in statistics}
    there = _kept_anyway(graph, logits)
    made, of_statistics = _made_of(graph, there)
    undecided = {
        n for n in made if "recompute" not in n.meta
    }  # values changed by forward are decided already
    returned = _callers(graph)
    possible = _without(
        returned, [n for n in graph.nodes if n in undecided and is_as_wide(n, logits)]
    )
    again: set[Node] = set()
    for node in reversed(graph.nodes):
        asked = node in logits or node in of_statistics or not again.isdisjoint(node.users)
        if asked and node in possible and (node in returned or not _is_stored(node)):
            again.add(node)
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def keep_given(graph: Graph) -> None:
    """Inputs of the graph are never recomputed.

    If an operator changes nothing, as `x / 1.0`, torch's joint passes replace it by `x` and put all of the operator's
    `meta` on `x`; the partitioner then fails.
    """
    for node in graph.nodes:
        if is_given(node) and node.meta.get("recompute") in _AGAIN:
            del node.meta["recompute"]


def _callers(graph: Graph) -> set[Node]:
    """Values sharing memory with a result of forward, and with no input of the graph."""
    aliases = Aliases(graph)
    results = (n for n in graph.output_node().all_input_nodes if not is_backward(n))
    groups = [aliases.of(result) for result in results]
    return {n for group in groups if not any(map(is_given, group)) for n in group}


def _kept_anyway(graph: Graph, logits: set[Node]) -> set[Node]:
    """Inputs of forward, and its numbers per row: saving these costs no extra memory."""
    given = {n for n in graph.nodes if is_given(n) and not is_tangent(n)}
    calls = (n for n in graph.nodes if n.op == "call_function" and not is_backward(n))
    return given | {n for n in calls if any(_is_per_row(n, x) for x in logits)}


def _is_per_row(node: Node, logits: Node) -> bool:
    found, wide = value(node), value(logits)
    if not isinstance(found, torch.Tensor):
        return False
    return same(found.numel(), 1) or same(found.numel() * wide.shape[-1], wide.numel())


def _made_of(graph: Graph, there: set[Node]) -> tuple[set[Node], set[Node]]:
    """Element-wise functions of `there` and constants; and the values of both that depend on statistics."""
    made: set[Node] = set()
    of_statistics: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or is_backward(node):
            continue
        inputs = node.all_input_nodes
        known = all(each in made or each in there for each in inputs)
        if known and node not in there and _reads_one_element(node):
            made.add(node)
        follows = not of_statistics.isdisjoint(inputs) and (node in made or node in there)
        if follows or _is_statistic(node):
            of_statistics.add(node)
    return made, of_statistics


def _without(returned: set[Node], nodes: list[Node]) -> set[Node]:
    """The `nodes` without returned inputs, other than inputs found here themselves."""
    found: set[Node] = set()
    for node in nodes:
        if returned.intersection(node.all_input_nodes) <= found:
            found.add(node)
    return found


def _is_statistic(node: Node) -> bool:
    if node.target is not operator.getitem:
        return False
    (source,) = node.all_input_nodes
    return source.target is slime_fused.row_stats.default


def _reads_one_element(node: Node) -> bool:
    """At each place, reads only the element at that place of each input."""
    if not is_pure(node):
        return False
    return not node.all_input_nodes or node.target in VIEWS or is_elementwise(node)


def _is_stored(node: Node) -> bool:
    """Whether a reader needs it in memory: the caller, or a node of backward other than arithmetic."""
    return any(
        _stores(reader) or (reader.target in VIEWS and _is_stored(reader)) for reader in node.users
    )


def _stores(reader: Node) -> bool:
    if reader.op == "output" or reader.target is slime_fused.row_grad.default:
        return True
    absorbed = reader.target in VIEWS | REDUCTIONS or is_elementwise(reader)
    return is_backward(reader) and not absorbed
