"""Columns gathered of a part of the rows that a matmul makes: gathered of all its rows, and the part taken of them.

    gather(z[:, 1:], -1, index)  ->  gather(z, -1, zeros; zeros[:, 1:] = index)[:, 1:]

Entry point: `gather_of_all`. A loop over all rows, for their statistics, then gathers too; the other rows' columns are
a few numbers.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.fx import Graph, Node

from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import is_wide, rank_of, shape_of
from fx_passes.graph.operators import MATMULS, SAME_ROWS, name_of, under
from fx_passes.graph.order import tidy
from fx_passes.rows.parts import Part, span, taken
from fx_passes.torch_private import FakeTensorMode

aten = torch.ops.aten
Gathers = list[tuple[Node, Part]]


def gather_of_all(graph: Graph, min_vocab: int, fake_mode: FakeTensorMode) -> None:
    """Rewrites the gathers of matmuls' results that fused operators read all rows of."""
    found: dict[tuple[Node, Any], list[Gathers]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=aten.gather.default):
        wide: Any = node.args[0]
        part = taken(wide) if is_wide(wide, min_vocab) and _of_columns(node) else None
        if part is not None and _is_read_all(part.every):
            groups = found[part.every, shape_of(node)[-1]]
            group = next((each for each in groups if _is_apart(part, each)), None)
            if group is None:
                groups.append(group := [])
            group.append((node, part))
    if not found:
        return
    emit = Emitter(graph, fake_mode)
    emit.adopt_all()  # no size is asked of what a matmul makes
    with graph.inserting_before(graph.output_node()):
        for (every, columns), groups in found.items():
            for group in groups:
                _rewrite(emit, every, columns, group)
    tidy(graph)


def _is_apart(part: Part, others: Gathers) -> bool:
    """Whether it has no row of theirs, as numbers in one dimension tell."""
    mine = span(part.moves[0])
    for _, other in others:
        theirs = span(other.moves[0])
        if mine is None or theirs is None or mine[0] != theirs[0]:
            return False
        if mine[1] < theirs[2] and theirs[1] < mine[2]:
            return False
    return True


def _of_columns(node: Node) -> bool:
    dim: Any = node.args[1]
    return dim % rank_of(node) == rank_of(node) - 1


def _is_read_all(every: Node) -> bool:
    head = under(every, SAME_ROWS)
    return head.target in MATMULS and _has_statistics(head)


def _has_statistics(head: Node) -> bool:
    """Fused operators read all rows of what a matmul makes."""
    waiting = [head]
    while waiting:
        for user in waiting.pop().users:
            if name_of(user.target) == "slime_fused::row_stats":
                return True
            if user.target in SAME_ROWS:
                waiting.append(user)
    return False


def _rewrite(emit: Emitter, every: Node, columns: Any, gathers: Gathers) -> None:
    *lead, vocab = emit.sizes(every)
    rows = emit.product(lead)
    wide = emit.reshape(every, [rows, vocab])
    emit.origin = gathers[0][0]
    index = emit.full([rows, columns], 0, torch.int64, every)
    numbers = [part.numbers(emit) for _, part in gathers]
    for (node, _), places in zip(gathers, numbers, strict=True):
        own: Any = node.args[2]
        flat = emit.reshape(own, [emit.size(places, 0), columns])
        index = emit.call(aten.index_put.default, index, [places], flat)
    found = emit.reshape(emit.call(aten.gather.default, wide, 1, index), [*lead, columns])
    for node, part in gathers:
        emit.origin = node
        mine = part.take(emit, found, [columns])
        mine = emit.reshape(mine, emit.sizes(node.args[2]))  # type: ignore[arg-type]
        packed = emit.call(aten.clone.default, mine, memory_format=torch.contiguous_format)
        node.replace_all_uses_with(packed)
