"""Merges equal head matmuls into one, and equal computations on their results too.

Entry point: `share_heads`. A program that reads deferred logits twice has their matmul twice
(`slime_compile.deferred`), and autograd derives two gradients of it:

    d hidden = d first @ weight + d second @ weight  ->  (d first + d second) @ weight

The graph is functional: equal operators on equal operands are equal, also if the program has hooks or changes values in
place. Exception: returned values keep separate memory, since the caller may write to one of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from fx_passes.graph.aliases import Aliases
from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import is_backward, is_float_tensor, is_wide, same_shape, value
from fx_passes.graph.operators import CASTS, MATMULS, RESHAPES, TURNS, WRITES, is_zero
from fx_passes.graph.order import is_dead, tidy
from fx_passes.torch_private import detect_fake_mode

__all__ = ["share_heads"]

aten = torch.ops.aten
_LINEAR: dict[Any, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.mul.Tensor: (0, 1),
    aten.slice_scatter.default: (1,),
    aten.select_scatter.default: (1,),
    **dict.fromkeys(
        RESHAPES | TURNS | CASTS | {aten.sum.dim_IntList, aten.div.Tensor, aten.neg.default}, (0,)
    ),
}
"""The arguments in which an operator is linear; a scatter only if the other one is zero."""


def share_heads(graph: Graph, min_vocab: int) -> int:
    """Merges equal matmuls in forward.

    Args:
        graph: a joint or inference graph.
        min_vocab: the smallest last dimension treated as a vocabulary.

    Returns:
        The number of removed matmuls.
    """
    heads = [n for n in graph.nodes if _is_head(n, min_vocab)]
    fake_mode = detect_fake_mode([value(node) for node in heads])
    if len(heads) < 2 or fake_mode is None:
        return 0
    emit, returned = Emitter(graph, fake_mode), Aliases(graph).of_outputs(graph)
    equal = {node: emit.adopt(node) for node in graph.nodes if node not in returned}
    shared = sum(equal.get(node, node) is not node for node in heads)
    if not shared:
        return 0
    for node, first in equal.items():
        if node is not first and _are_computed_together(node, first):
            node.replace_all_uses_with(first)
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        _factor_out(emit, node)
    for node in [each for each in emit.created if each.target is aten.add.Tensor]:
        _factor_out(emit, node, of_products=False)
    tidy(graph)
    return shared


def _is_head(node: Node, min_vocab: int) -> bool:
    return node.target in MATMULS and is_wide(node, min_vocab) and not is_backward(node)


def _are_computed_together(node: Node, other: Node) -> bool:
    """Both in forward, and both or neither of them again in backward (a checkpoint)."""
    marks = [(is_backward(each), each.meta.get("recompute")) for each in (node, other)]
    return marks[0] == marks[1] and not marks[0][0]


def _factor_out(emit: Emitter, node: Node, of_products: bool = True) -> None:
    """f(one) + f(other) = f(one + other) for a linear f; with `of_products`, f must contain a matmul."""
    if node.kwargs or len(node.all_input_nodes) != 2:
        return
    one, other = node.all_input_nodes
    steps: list[tuple[Node, int]] = []
    while (at := _only_difference(emit, one, other)) is not None:
        steps.append((one, at))
        one, other = one.args[at], other.args[at]  # type: ignore[assignment]
    if not steps or (of_products and not any(step.target in MATMULS for step, _ in steps)):
        return
    emit.origin = node
    with node.graph.inserting_before(node):
        made = emit.call(aten.add.Tensor, one, other)
        for step, at in reversed(steps):
            args = [*step.args[:at], made, *step.args[at + 1 :]]
            made = emit.call(step.target, *args, **step.kwargs)
    node.replace_all_uses_with(made)


def _only_difference(emit: Emitter, one: Node, other: Node) -> int | None:
    """The one argument in which two calls of a linear operator differ. None if there is no such argument, or a call has
    another reader.
    """
    if one.target is not other.target or one.target not in _LINEAR or one.kwargs != other.kwargs:
        return None
    if len(one.args) != len(other.args) or not is_float_tensor(one):
        return None
    pairs = list(zip(one.args, other.args, strict=True))
    found = [at for at, pair in enumerate(pairs) if not _is_same(emit, *pair)]
    read_again = any(sum(not is_dead(user) for user in each.users) > 1 for each in (one, other))
    if read_again or len(found) != 1:
        return None
    operands = pairs[found[0]]
    if found[0] not in _LINEAR[one.target] or not all(isinstance(n, Node) for n in operands):
        return None
    if found[0] and one.target in WRITES.values() and not is_zero(one.args[0]):  # type: ignore[arg-type]
        return None
    left, right = map(value, operands)
    alike = left.dtype == right.dtype and same_shape(left.shape, right.shape)
    return found[0] if alike else None


def _is_same(emit: Emitter, one: Any, other: Any) -> bool:
    if isinstance(one, Node) and isinstance(other, Node):
        return emit.represents.get(one, one) is emit.represents.get(other, other)
    return type(one) is type(other) and bool(one == other)
