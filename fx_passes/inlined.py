"""Fused operators on few elements become their formulas; the compiler fuses these with their neighbours.

Entry points: `inline` on a graph after partitioning, when saved and recomputed values are decided; `is_small`, also for
the joint graph. With few elements an operator call takes longer than its work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import shape_of, value
from fx_passes.graph.formulas import Formulas
from fx_passes.graph.operators import RESHAPES, under
from fx_passes.torch_private import detect_fake_mode

aten = torch.ops.aten


def is_small(node: Node, fewer_than: int) -> bool:
    """Whether the logits of a fused operator are on the CPU and have fewer elements, for any fused operator."""
    logits = value(node.args[0])
    known = logits.device.type == "cpu" and all(isinstance(size, int) for size in logits.shape)
    return known and math.prod(logits.shape) < fewer_than


def inline(graph: Graph, nodes: Sequence[Node], formulas: Formulas) -> None:
    """Replaces fused operators for which `is_small` is true by their formulas."""
    fake_mode = detect_fake_mode([value(node) for node in graph.nodes])
    assert fake_mode is not None, graph
    emitter = Emitter(graph, fake_mode)
    for node in nodes:
        emitter.origin = node
        with graph.inserting_before(node):
            _replace(emitter, node, formulas)
    graph.eliminate_dead_code()


def _replace(emitter: Emitter, node: Node, formulas: Formulas) -> None:
    x, *coefficients, _ = node.args
    columns = [_columns(emitter, each, shape_of(x)[:-1]) for each in coefficients]
    results = tree_leaves(formulas.emit(emitter, node.target, x, *columns, **node.kwargs))
    if isinstance(value(node), torch.Tensor):
        node.replace_all_uses_with(*results)
        return
    for user in list(node.users):  # getitem, of a tuple
        _, number = user.args
        assert isinstance(number, int), user
        user.replace_all_uses_with(results[number])


def _columns(emitter: Emitter, coefficient: Any, rows: Sequence[Any]) -> Any:
    """A concatenation of columns as `Formulas` take it; whatever else as it is.

    Args:
        rows: their sizes.
    """
    if not isinstance(coefficient, Node):
        return coefficient
    joined = under(coefficient, RESHAPES)
    if joined.target is not aten.cat.default:
        return coefficient
    columns: Any = joined.args[0]
    single = all(shape_of(column)[-1] == 1 for column in columns)
    counted = shape_of(joined)[-1] == len(columns)  # joined along the last dimension
    if not (single and counted and math.prod(shape_of(coefficient)[len(rows) :]) == len(columns)):
        return coefficient
    return [_number(emitter, column, [*rows, 1]) for column in columns]


def _number(emitter: Emitter, column: Node, sizes: Sequence[Any]) -> Node | float:
    """The number in all rows of `column`; otherwise the column itself, in these sizes."""
    filled = under(column, RESHAPES | {aten.expand.default})
    number = filled.args[1] if filled.target is aten.full.default else None
    return number if isinstance(number, int | float) else emitter.reshape(column, sizes)
