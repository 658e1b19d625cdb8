"""Equal matmuls that make logits are one, and what is made of them in the same way is one too.

Entry point: `share_heads`, on Dynamo's graph, before AOTAutograd. Who reads deferred logits twice has their matmul
twice in the graph (`slime_compile.deferred`); torch finds that after differentiation only, when each has a gradient of
its own. Shared are the matmul, and slices, views, casts, temperatures of it. A graph that changes any of this in place
stays as it was; nothing is shared between gradient modes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from fx_passes.graph.order import descendants
from fx_passes.row_demand.heads import example, heads_of
from fx_passes.row_demand.modes import with_modes
from fx_passes.row_demand.moves import kind_of
from fx_passes.row_demand.region import POINTWISE, is_change

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
    operands = {each for head in heads for each in head.all_input_nodes}
    changeable = descendants([*heads, *operands])
    if any(is_change(n) and not changeable.isdisjoint(n.all_input_nodes) for n in graph.nodes):
        return 0
    made = heads.copy()  # and what is made of them
    known: dict[Any, Node] = {}
    shared = 0
    for node, mode in with_modes(graph):
        if node not in heads and not _is_made(node, made):
            continue
        made.add(node)
        first = known.setdefault((mode, _key(node)), node)
        if first is not node:
            shared += node in heads
            node.replace_all_uses_with(first)
            graph.erase_node(node)
    return shared


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
    dtype = value.dtype if isinstance(value, Tensor) else None
    return node.op, node.target, _frozen(node.args), _frozen(node.kwargs), dtype


def _frozen(value: Any) -> Any:
    """`value` as something that can be compared and hashed; numbers of different types differ."""
    if isinstance(value, tuple | list):
        return type(value).__name__, *(_frozen(each) for each in value)
    if isinstance(value, dict):
        return tuple(sorted((key, _frozen(each)) for key, each in value.items()))
    if isinstance(value, slice):
        return "slice", _frozen(value.start), _frozen(value.stop), _frozen(value.step)
    return (type(value), value) if not isinstance(value, Node) else value
