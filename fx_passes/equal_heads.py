"""Merges equal head matmuls into one, and equal computations on their results too.

Entry point: `share_heads`, on Dynamo's graph: torch finds equal values after differentiation only, when each has a
gradient of its own. A program that reads deferred logits twice has their matmul twice (`slime_compile.deferred`). The
pass shares the matmul, and slices, views, casts, temperatures of it. Two values stay two where the graph writes to one
of them or hooks its gradient, where it writes between them to what they are made of, where the graph returns one, and
in different modes.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from fx_passes.graph.order import following
from fx_passes.graph.writes import Writes, example
from fx_passes.row_demand.heads import heads_of
from fx_passes.row_demand.modes import with_modes
from fx_passes.row_demand.moves import kind_of
from fx_passes.row_demand.region import POINTWISE

__all__ = ["share_heads"]


def share_heads(graph: Graph, min_vocab: int) -> int:
    """Makes equal matmuls in `graph` one.

    Args:
        graph: one of Dynamo's, with `meta["example_value"]`.
        min_vocab: the smallest last dimension that is taken for a vocabulary.

    Returns:
        How many matmuls are gone.
    """
    heads = {head.node for head in heads_of(graph, min_vocab)}
    if len(heads) < 2:
        return 0
    writes = Writes(graph)
    made = heads.copy()  # and what is made of them
    known: dict[Any, Node] = {}
    shared = 0
    for node, mode in with_modes(graph):
        if node not in heads and not _is_made(node, made):
            continue
        made.add(node)
        key = mode, _key(node)
        first = known.get(key)
        if first is None or not _stay_equal(writes, first, node):
            known[key] = node
        else:
            shared += node in heads
            node.replace_all_uses_with(first)
            graph.erase_node(node)
    return shared


def _stay_equal(writes: Writes, first: Node, second: Node) -> bool:
    """They are made of what has not changed in between, and neither the graph nor its caller changes one of them."""
    own = writes.memory([first, second])
    between = itertools.takewhile(lambda each: each is not second, following(first))
    return (
        own.isdisjoint(writes.returned())
        and not writes.change(following(first), own)
        and not writes.change(between, writes.memory(second.all_input_nodes))
    )


def _is_made(node: Node, made: set[Node]) -> bool:
    """A function of one of `made` and of values beside it, that has no effects."""
    inner = node.args[0] if node.args else None
    if not isinstance(inner, Node) or inner not in made:
        return False
    if node.op not in ("call_function", "call_method"):
        return False
    return node.target in POINTWISE or kind_of(node, inner) is not None


def _key(node: Node) -> tuple[Any, ...]:
    value = example(node)
    facts = (value.dtype, value.requires_grad) if isinstance(value, Tensor) else None
    return node.op, node.target, _frozen(node.args), _frozen(node.kwargs), facts


def _frozen(value: Any) -> Any:
    """`value` as something that can be compared and hashed; numbers of different types differ."""
    if isinstance(value, tuple | list):
        return type(value).__name__, *(_frozen(each) for each in value)
    if isinstance(value, dict):
        return tuple(sorted((key, _frozen(each)) for key, each in value.items()))
    if isinstance(value, slice):
        return "slice", _frozen(value.start), _frozen(value.stop), _frozen(value.step)
    return (type(value), value) if not isinstance(value, Node) else value
