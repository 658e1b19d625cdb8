"""The program's own sums of numbers per row in which an offset of the logits cancels: from what is left of them.

Entry point: `take_offsets_away`. `logsumexp - sum(p x)` is `log_sum - mean`, and `x[i] - logsumexp` is
`(x[i] - max) - log_sum`: as the program writes them, they have the roundings of numbers as large as the offset.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch.fx import Node

from fx_passes.algebra.poly import Poly
from fx_passes.graph.facts import is_float_tensor, same_shape, shape_of, value
from fx_passes.graph.operators import is_collective
from fx_passes.walk.context import Context
from fx_passes.walk.row_nodes import ROUNDING
from fx_passes.walk.statistics import compute_dtype
from fx_passes.walk.walk import Walk

aten = torch.ops.aten

_SUMS = {aten.add.Tensor, aten.sub.Tensor}


def take_offsets_away(walk: Walk, live: Container[Node]) -> None:
    """Finds what stands in for such sums among what is `live`.

    Nothing where ranks exchange numbers, which all of them must go on doing.
    """
    graph, account, c = walk.graph, walk.account, walk.context
    nodes = list(graph.nodes)
    if any(map(is_collective, nodes)):
        return
    with graph.inserting_before(nodes[-1]):
        for node in nodes:
            if node in live and node.target in _SUMS and node not in account.replacements:
                c.emitter.origin = node
                found = _without_offset(c, node)
                if found is not None:
                    account.replacements[node] = c.emitter.represents[node] = found


def _without_offset(c: Context, node: Node) -> Node | None:
    """None where nothing cancels, or what is left would hide that a row is NaN."""
    operands = node.all_input_nodes
    if not all(is_float_tensor(arg) and arg in c.rows.of_logits for arg in operands):
        return None
    if len(operands) != 2:
        return None
    left, right, poly = map(c.rows.meaning, (*operands, node))
    if max(len(left.terms), len(right.terms)) < 2:
        return None
    logits = _cancelled(c, left, right, poly)
    if logits is None or value(node).dtype.itemsize > compute_dtype(logits).itemsize:
        return None
    found = c.rows.emit_node(poly, compute_dtype(logits), node)
    if not same_shape(shape_of(found), shape_of(node)):
        return None
    return c.emitter.cast(found, value(node).dtype)


def _cancelled(c: Context, left: Poly, right: Poly, total: Poly) -> Node | None:
    """The logits, or the first of them, of which both have an offset and their sum has none.

    Of each, a difference of two levels has to be left, or a statistic, that is NaN where a row is nothing but -inf.
    """
    mine, theirs, kept = map(c.rows.offsets, (left, right, total))
    gone = [
        key
        for key, number in mine.items()
        if key in theirs and abs(kept.get(key, 0.0)) <= ROUNDING * abs(number)
    ]
    shown = {c.statistics.shows_empty_rows_of(atom) for atom in total.atoms()}
    if not gone or any(key not in kept and key[0] not in shown for key in gone):
        return None
    return gone[0][0]
