"""Families of operators, each named once: their effect on any value.

Their effect on forms is in `rules/`.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch.fx import Node

from fx_passes.graph.facts import ranks_of, same_shape, shape_of, value

aten = torch.ops.aten
prims = torch.ops.prims
c10d = torch.ops._c10d_functional

Target = Any  # an OpOverload or a Python function: the target of a node

MATMULS: set[Target] = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
}
TO_SHAPE: set[Target] = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
"""The same numbers in the order of memory, in a given shape."""

RESHAPES: set[Target] = TO_SHAPE | {
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
}
SAME_VALUE: set[Target] = {aten.clone.default, aten.alias.default, aten.detach.default}
SAME_ROWS: set[Target] = RESHAPES | SAME_VALUE
"""The same rows in the same order; the last dimension stays."""

EXACT: set[Target] = SAME_VALUE | {
    aten.neg.default,
    aten.where.self,
    aten.clamp_min.default,
    aten.clamp.default,
}
"""Element-wise operators without rounding."""

CASTS: set[Target] = {prims.convert_element_type.default, aten._to_copy.default}
SPLITS: set[Target] = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
TURNS: set[Target] = {aten.permute.default, aten.transpose.int, aten.t.default}
VIEWS: set[Target] = (
    RESHAPES
    | SPLITS
    | TURNS
    | {aten.alias.default, aten.detach.default}
    | {aten.expand.default, aten.slice.Tensor, aten.select.int}
)
"""Show a tensor's memory, or a part of it, in another shape or order."""

SHOWN: set[Target] = VIEWS | SAME_VALUE
"""The same numbers, or some of them, in another shape or order."""

WHOLE_VIEWS: set[Target] = (
    RESHAPES - {aten.squeeze.default, aten.reshape.default}
    | TURNS
    | {aten.alias.default, aten.detach.default}
)
"""Show all of a tensor's memory, once."""

COMPARISONS: set[Target] = {
    aten.eq.Tensor,
    aten.ne.Tensor,
    aten.ge.Tensor,
    aten.gt.Tensor,
    aten.le.Tensor,
    aten.lt.Tensor,
}
REDUCTIONS: set[Target] = {
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.any.default,
    aten.any.dim,
    aten.any.dims,
    aten.argmax.default,
    aten.argmin.default,
    aten.prod.default,
    aten.prod.dim_int,
}
ALL_REDUCE: set[Target] = {c10d.all_reduce.default, c10d.wait_tensor.default}


def under(node: Node, targets: Container[Target]) -> Node:
    """The node below operators of `targets`, along their first arguments; `node` itself if it is none of them."""
    while node.op == "call_function" and node.target in targets:
        inner = node.args[0]
        if not isinstance(inner, Node):
            break
        node = inner
    return node


def name_of(target: Any) -> str:
    """The name of an operator's schema, which may not be registered here; nothing of what is no operator."""
    schema = getattr(target, "_schema", None)
    return "" if schema is None else str(schema.name)


def turns(node: Node) -> bool:
    """Swaps the last two dimensions, and nothing else."""
    if node.target not in TURNS:  # with tensors as results
        return False
    rank = len(shape_of(node))
    if node.target is aten.t.default:
        return rank == 2
    if node.target is aten.transpose.int:
        return {dim % rank for dim in node.args[1:]} == {rank - 2, rank - 1}  # type: ignore[operator]
    if rank < 2:
        return False
    order = [dim % rank for dim in node.args[1]]  # type: ignore[operator, union-attr]
    return order == [*range(rank - 2), rank - 1, rank - 2]


def is_zero(node: Node) -> bool:
    """A constant 0, under views."""
    node = under(node, SAME_ROWS | {aten.expand.default})
    if node.target is aten.full.default:
        return bool(node.args[1] == 0)
    return node.target is aten.scalar_tensor.default and bool(node.args[0] == 0)


def is_elementwise(node: Node) -> bool:
    """Each element of the result is computed from the elements at its place, views and copies aside."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or node.target in CASTS | SAME_VALUE or _shows_bits(node)


def _shows_bits(node: Node) -> bool:
    """An element's bits as a number of another dtype."""
    if node.target is not aten.view.dtype:
        return False
    given: torch.Tensor = node.all_input_nodes[0].meta["val"]
    return bool(given.dtype.itemsize == node.meta["val"].dtype.itemsize)


def is_collective(node: Node) -> bool:
    """A functional collective; not the wait for its result."""
    functional = getattr(node.target, "namespace", "") == "_c10d_functional"
    return functional and node.target is not c10d.wait_tensor.default


def is_pure(node: Node) -> bool:
    """The same arguments give the same value, and nothing else happens."""
    target = node.target
    schema = getattr(target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:  # type: ignore[union-attr]
        return False
    plain = not node.is_impure() and target.namespace in ("aten", "prims")  # type: ignore[union-attr]
    return plain or target in ALL_REDUCE


def same_value(node: Node) -> Node | None:
    """The node with the same value as `node`: below an alias, a copy, or an all-reduce over one rank."""
    if node.target in SAME_VALUE:
        return node.all_input_nodes[0]
    if node.target is aten.copy.default:
        into, written = node.args[:2]
        same = isinstance(written, Node) and same_shape(shape_of(into), shape_of(written))
        return written if same else None  # type: ignore[return-value]
    if node.target is c10d.wait_tensor.default:
        reduce = node.all_input_nodes[0]
        if reduce.target is c10d.all_reduce.default and ranks_of(reduce.args[2]) == 1:
            return reduce.all_input_nodes[0]
    return None


WRITES: dict[Target, Target] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}
"""A view, and the operator that writes through it."""


def read_back(node: Node) -> Node | None:
    """The value written exactly where the view `node` reads: the program changes a tensor through a view and reads it
    again.
    """
    if node.target not in WRITES:
        return None
    whole = _first_with_value(node.args[0])
    if whole.target is not WRITES[node.target] or _where(whole, 2) != _where(node, 1):
        return None
    return whole.args[1]  # type: ignore[return-value]


def written_over(node: Node) -> Node | None:
    """The value overwritten by the write `node`, without earlier writes to the same place; None for any other node."""
    if node.target not in WRITES.values():
        return None
    base = _first_with_value(node.args[0])
    while base.target is node.target and _where(base, 2) == _where(node, 2):
        base = _first_with_value(base.args[0])
    return base


def _where(node: Node, first: int) -> tuple[Any, ...]:
    return node.args[first:], node.kwargs


def _first_with_value(node: Any) -> Node:
    """The value below copies, and below views that read their own writes."""
    found: Node = node
    while True:
        below = same_value(found) or read_back(found)
        if below is None or value(below).dtype != value(found).dtype:
            return found
        found = below
