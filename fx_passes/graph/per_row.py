"""Finds numbers per row by their computation: their sizes may equal those of logits by chance.

Entry points: `numbers_per_row`, `exchanges`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from fx_passes.graph.facts import is_backward, rank_of, ranks_of, same, same_shape, shape_of
from fx_passes.graph.operators import (
    ALL_REDUCE,
    REDUCTIONS,
    SPLITS,
    VIEWS,
    is_elementwise,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

REDUCES = REDUCTIONS | {aten.max.dim, aten.min.dim, aten.logsumexp.default}
_KEEPS = ALL_REDUCE | VIEWS - {aten.expand.default} | {aten.cat.default, operator.getitem}


def exchanges(node: Node) -> bool:
    """An all-reduce of forward over more than one rank."""
    return (
        node.target is c10d.all_reduce.default
        and not is_backward(node)
        and ranks_of(node.args[2]) > 1
    )


def numbers_per_row(graph: Graph) -> frozenset[Node]:
    """Values reduced over their columns, single columns, and values computed from these in the same shape."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and (_starts(node) or _goes_on(node, found)):
            found.add(node)
    return frozenset(found)


def _starts(node: Node) -> bool:
    if node.target is torch.ops.slime_fused.row_stats.default:
        return True
    if node.target is aten.gather.default:
        return rank_of(node) > 1 and same(shape_of(node)[-1], 1)
    return node.target in REDUCES and rank_of(node.args[0]) - 1 in reduced_dims(node)


def reduced_dims(node: Node) -> list[int]:
    """The dimensions reduced by a reduction, counted from the first."""
    rank, given = rank_of(node.args[0]), node.args[1] if len(node.args) > 1 else ()
    dims = given if isinstance(given, Sequence) else [given]
    return [dim % rank for dim in dims if isinstance(dim, int)] if rank and dims else [*range(rank)]


def _goes_on(node: Node, found: set[Node]) -> bool:
    made = [arg for arg in node.all_input_nodes if arg in found]
    if node.target in _KEEPS or node.target in SPLITS:
        return bool(made)
    puts = node.target in (aten.index_put.default, aten.copy.default)
    if not (puts or is_elementwise(node)):
        return False
    return any(rank_of(arg) and same_shape(shape_of(arg), shape_of(node)) for arg in made)
