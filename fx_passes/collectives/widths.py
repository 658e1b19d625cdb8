"""The width of a vocabulary in a graph over shards: the columns the ranks reduce.

Entry point: `least_vocabulary`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from fx_passes.graph.backward import mark_backward
from fx_passes.graph.facts import hint, is_float_tensor, rank_of, shape_of
from fx_passes.graph.operators import CASTS, MATMULS, VIEWS, Target, is_collective, under
from fx_passes.graph.per_row import REDUCES, exchanges, reduced_dims
from fx_passes.outcome import CannotExchange

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

PEAKS: set[Target] = {aten.amax.default, aten.max.dim}


def least_vocabulary(graph: Graph, min_vocab: int) -> int:
    """The smallest last dimension treated as a vocabulary in `graph`: `min_vocab` or less.

    A shard belongs to a vocabulary, however narrow it is: see NOTE [The same on all ranks]. Shards are values that
    forward reduces over their columns for an all-reduce over more than one rank.

    Raises:
        CannotExchange: a shard of less than two columns.
    """
    if not any(map(is_collective, graph.nodes)):
        return min_vocab
    mark_backward(graph)
    widths = list(_widths(graph))
    for width in (0, 1):
        reduced = {target for target, size in widths if size == width}
        if aten.exp.default in reduced and (width == 0 or reduced & PEAKS):
            raise CannotExchange(
                f"a shard of a vocabulary must have two columns or more on each rank, this one has {width}: "
                "give merge_collectives=False on all ranks"
            )
    return min([min_vocab, *(size for _, size in widths if size >= 2)])


def _widths(graph: Graph) -> Iterator[tuple[Target, int]]:
    """The columns of reduced values, each with its reduction; with `exp` if exponentials are summed."""
    waiting = [node.all_input_nodes[0] for node in graph.nodes if exchanges(node)]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.target in MATMULS or node.target is c10d.wait_tensor.default:
            continue  # a layer of the model; an exchange of its own
        if node.target in REDUCES:
            yield from _reduced(node)
        new = set(node.all_input_nodes) - seen
        seen |= new
        waiting += new


def _reduced(node: Node) -> Iterator[tuple[Target, int]]:
    """Columns of the values reduced by `node`, if they are also columns of the value below its views."""
    operand = node.args[0]
    assert isinstance(operand, Node)
    if not is_float_tensor(operand) or rank_of(operand) < 2 or len(node.args) < 2:
        return
    columns = hint(shape_of(under(operand, VIEWS))[-1])
    sizes = [hint(shape_of(operand)[dim]) for dim in reduced_dims(node)]
    made = under(operand, VIEWS | CASTS | {aten.where.self}).target
    target = made if made is aten.exp.default else node.target
    yield from ((target, size) for size in sizes if size == columns)
