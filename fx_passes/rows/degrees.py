"""The dependence of a value on the upstream gradient: none, or a multiple of it.

Entry points: `Units`, the values that no logits are in, and `degree_of_result`, of a pointwise operator. The gradient
can be taken in forward of multiples only, with 1 in that number's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import value
from fx_passes.graph.operators import CASTS, SAME_ROWS, TURNS, WRITES, is_zero
from fx_passes.graph.user_lines import source_of
from fx_passes.refused import Refused

aten = torch.ops.aten

ZERO, PLAIN, MULTIPLE = "zero", "plain", "multiple"
"""A constant 0; independent of backward's number; a multiple of it. 0 is either."""


def line_of(node: Node) -> str:
    where = source_of(node)
    return f"{node.target}{f' at {where}' if where else ''}"


class Units:
    """Values that follow from backward's number and not from the logits, computed with 1 in its place."""

    def __init__(self, tangent: Node, moving: set[Node], emit: Emitter) -> None:
        self.tangent = tangent
        self.moving = moving
        self.emit = emit
        self._made: dict[Node, Node] = {}
        self._degrees: dict[Node, str] = {tangent: MULTIPLE}

    def of(self, node: Node) -> Node:
        if node not in self.moving:
            return node
        if node not in self._made:
            if node is self.tangent:
                made = self.emit.full([], 1.0, value(node).dtype, node)
            else:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self.of)
                made = self.emit.call(node.target, *args, **kwargs)
            self._made[node] = made
        return self._made[node]

    def known(self, node: Node, made: Node) -> None:
        """`made` is `node` with 1 in the number's place."""
        self._made[node] = made

    def degree(self, node: Any) -> str:
        """Raises Refused where the value is no multiple of the number."""
        if not isinstance(node, Node):
            return ZERO if isinstance(node, int | float) and node == 0 else PLAIN
        if node not in self.moving:
            return ZERO if is_zero(node) else PLAIN
        if node not in self._degrees:
            self._degrees[node] = self._found(node)
        return self._degrees[node]

    def _found(self, node: Node) -> str:
        found = [self.degree(arg) for arg in node.args]
        if node.target in LINEAR and found[0] == MULTIPLE:
            return MULTIPLE
        return degree_of_result(node, found)


def degree_of_result(node: Node, found: Sequence[str], operator: Any = None) -> str:
    """The degree of a pointwise result of operands of the degrees `found`.

    Args:
        operator: that of the result, if not that of `node`, whose line is told.
    """
    target = operator or node.target
    if MULTIPLE not in found:
        zero = target in _HOMOGENEOUS and ZERO in found
        return ZERO if zero and _zero_result(target, found) else PLAIN
    rule = _HOMOGENEOUS.get(target)
    if rule is None or not rule(node, found):
        raise Refused(f"{line_of(node)} is not linear in the loss's gradient")
    return PLAIN if target in _COMPARED else MULTIPLE


def _both(node: Node, found: Sequence[str]) -> bool:
    """A sum of multiples."""
    return PLAIN not in found[:2]


def _one(node: Node, found: Sequence[str]) -> bool:
    """A product with one multiple."""
    return found[:2].count(MULTIPLE) == 1


def _above(node: Node, found: Sequence[str]) -> bool:
    return found[1] == PLAIN


def _alone(node: Node, found: Sequence[str]) -> bool:
    return True


def _chosen(node: Node, found: Sequence[str]) -> bool:
    """One of two multiples, by a condition that is none."""
    return found[0] != MULTIPLE and PLAIN not in found[1:]


def _with_zero(node: Node, found: Sequence[str]) -> bool:
    """A multiple compared with 0: no other than the number's being 0 changes that, and then all is 0."""
    return found[1] == ZERO


LINEAR: set[Any] = (
    SAME_ROWS
    | CASTS
    | TURNS
    | {
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.sum.dim_IntList,
        aten.sum.default,
    }
)
"""Multiples of the first operand where that is one, in any shape."""

_COMPARED: set[Any] = {aten.eq.Scalar, aten.ne.Scalar}
_HOMOGENEOUS: dict[Any, Any] = {
    aten.add.Tensor: _both,
    aten.sub.Tensor: _both,
    aten.mul.Tensor: _one,
    aten.mul.Scalar: _one,
    aten.div.Tensor: _above,
    aten.div.Scalar: _above,
    aten.neg.default: _alone,
    aten.where.self: _chosen,
    **dict.fromkeys(WRITES.values(), _both),
    **dict.fromkeys(_COMPARED, _with_zero),
}


def _zero_result(target: Any, found: Sequence[str]) -> bool:
    if target in (aten.add.Tensor, aten.sub.Tensor) or target in WRITES.values():
        return set(found[:2]) == {ZERO}
    if target is aten.where.self:
        return set(found[1:]) == {ZERO}
    return target is aten.neg.default
