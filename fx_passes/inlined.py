"""Fused operators on few elements become their formulas; the compiler fuses these with their neighbours.

Entry points: `inline` on a graph after partitioning, where nothing is ever recomputed or saved anew; `is_small`, which
also the joint graph can be asked. A call of an operator takes longer than its work where the logits have few elements.
The formulas are given by who defines the operators; they are traced and put in the operator's place.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves, tree_map_only

from fx_passes.graph.emit import PROVENANCE
from fx_passes.graph.facts import rank_of, shape_of, value
from fx_passes.graph.operators import RESHAPES, is_pure, under
from fx_passes.torch_private import FakeTensorMode, detect_fake_mode, make_fx

aten = torch.ops.aten

Formulas = Mapping[Any, Callable[..., Any]]
"""What an operator computes, in torch calls; called with the operator's arguments but the last, its region.

A concatenation of columns is given as their list, with a number for a column of one number.
"""


def is_small(node: Node, fewer_than: int) -> bool:
    """Whether the logits that a fused operator reads are on the CPU and have fewer elements, whatever is called."""
    logits = value(node.args[0])
    known = logits.device.type == "cpu" and all(isinstance(size, int) for size in logits.shape)
    return known and math.prod(logits.shape) < fewer_than


def inline(
    graph: Graph, nodes: Sequence[Node], formulas: Formulas, decompositions: Mapping[Any, Any]
) -> None:
    """Puts formulas in the place of fused operators.

    Args:
        nodes: the operators, which `is_small` is true of.
        formulas: of their targets.
        decompositions: of what the formulas call, into what the compiler knows.
    """
    fake_mode = detect_fake_mode([value(node) for node in graph.nodes])
    assert fake_mode is not None, graph
    for node in nodes:
        _replace(graph, node, formulas[node.target], decompositions, fake_mode)


def _replace(
    graph: Graph,
    node: Node,
    formula: Callable[..., Any],
    decompositions: Mapping[Any, Any],
    fake_mode: FakeTensorMode,
) -> None:
    x, *coefficients, _ = node.args
    arguments = [x, *(_columns(each, rank_of(x) - 1) for each in coefficients)]

    def computed(*tensors: torch.Tensor) -> Any:
        given = dict(zip(inputs, tensors, strict=True))
        return formula(*tree_map_only(Node, given.get, arguments), **node.kwargs)

    inputs = list(dict.fromkeys(each for each in tree_leaves(arguments) if isinstance(each, Node)))
    with fake_mode, torch.no_grad():
        decomposed = make_fx(computed, decomposition_table=dict(decompositions))
        traced = decomposed(*map(value, inputs)).graph
    placeholders = traced.find_nodes(op="placeholder")
    copies: dict[Node, Node] = dict(zip(placeholders, inputs, strict=True))
    with graph.inserting_before(node):
        results = graph.graph_copy(traced, copies)
    made = [copies[each] for each in traced.nodes if each in copies and each not in placeholders]
    for new in made:
        new.meta |= {key: node.meta[key] for key in PROVENANCE if key in node.meta}
    found = tree_leaves(results)
    if isinstance(value(node), torch.Tensor):
        node.replace_all_uses_with(*found)
    else:
        for user in list(node.users):  # getitem, of a tuple
            _, number = user.args
            assert isinstance(number, int), user
            user.replace_all_uses_with(found[number])
            graph.erase_node(user)
    graph.erase_node(node)
    _erase_unread(graph, [*(each for each in coefficients if isinstance(each, Node)), *made])


def _erase_unread(graph: Graph, nodes: list[Node]) -> None:
    """Unread nodes, and nodes read by those alone."""
    erased: set[Node] = set()
    while nodes:
        node = nodes.pop()
        pure = node.target is operator.getitem or is_pure(node)
        if node not in erased and not node.users and pure:
            nodes += node.all_input_nodes
            graph.erase_node(node)
            erased.add(node)


def _columns(coefficient: Any, rows: int) -> Any:
    """A concatenation of columns as `Formulas` take it; whatever else as it is.

    Args:
        rows: how many dimensions are those of rows.
    """
    if not isinstance(coefficient, Node):
        return coefficient
    joined = under(coefficient, RESHAPES)
    if joined.target is not aten.cat.default:
        return coefficient
    columns: Any = joined.args[0]
    single = all(shape_of(column)[-1] == 1 for column in columns)
    counted = shape_of(joined)[-1] == len(columns)  # joined along the last dimension
    if not (single and counted and math.prod(shape_of(coefficient)[rows:]) == len(columns)):
        return coefficient
    return [_number(column) for column in columns]


def _number(column: Node) -> Node | float:
    """The number that all rows of `column` have; itself where that is not known."""
    filled = under(column, RESHAPES | {aten.expand.default})
    number = filled.args[1] if filled.target is aten.full.default else None
    return number if isinstance(number, int | float) else column
