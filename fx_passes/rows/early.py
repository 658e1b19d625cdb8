"""Can forward compute a region's backward, in the loop with the values at hand?

Entry point: `tangent_of`. The gradient of a scalar loss is a multiple of one number, the tangent, known in backward.
Torch's derivatives are linear in the tangent. Exception: a program's own change of gradients (a hook clamping them, an
`autograd.Function`). If each operator between the tangent and the results maps multiples to multiples, forward computes
the results for a tangent of 1, and backward multiplies them. A head's logits are then computed once instead of twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fx_passes.graph.backward import is_tangent
from fx_passes.graph.facts import is_backward, same, shape_of, value
from fx_passes.graph.operators import (
    CASTS,
    MATMULS,
    RESHAPES,
    SAME_ROWS,
    TURNS,
    WRITES,
    is_collective,
    is_zero,
    name_of,
)
from fx_passes.graph.order import ancestors, descendants
from fx_passes.graph.user_lines import source_of
from fx_passes.refused import Refused
from fx_passes.rows.loops import Loop
from fx_passes.rows.region import Region

__all__ = ["tangent_of"]

aten = torch.ops.aten

ZERO, PLAIN, MULTIPLE = "zero", "plain", "multiple"
"""A constant 0; independent of backward's number; a multiple of it. 0 is either."""


_LINEAR: set[Any] = (
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

_OF_FIRST: set[Any] = _LINEAR | {
    aten.gather.default, aten.index_select.default, aten.index.Tensor, aten.slice_backward.default,
    aten.select_backward.default, aten.flip.default, aten.cumsum.default, aten.mean.dim, aten.mean.default,
}  # fmt: skip
"""Linear in the first operand, whatever the others are."""

_INTO: dict[Any, tuple[int, int]] = {
    aten.scatter.src: (0, 3),
    aten.scatter_add.default: (0, 3),
    aten.index_put.default: (0, 2),
}
"""Linear in a base and in what is written into it together."""


def tangent_of(graph: Graph, region: Region, loops: Sequence[Loop]) -> Node:
    """The tangent: each result of `loops` depending on a tangent is a multiple of this one.

    Raises:
        Refused: there is none, with the reason.
    """
    tangents = [n for n in graph.find_nodes(op="placeholder") if is_tangent(n)]
    results = [n for loop in loops if loop.backward for n in loop.results]
    above = ancestors(results)
    reached = [n for n in tangents if n in above]
    if len(reached) != 1 or shape_of(reached[0]):
        raise Refused("the gradient does not come from one scalar loss")
    _check_kept(region, results)
    moving = descendants(reached)
    degrees = _Degrees(reached[0])
    for node in graph.nodes:
        if node in moving and node in above:
            degrees.enter(node)
    for node in results:
        if node in moving:
            degrees.enter(node)
    if any(is_collective(n) and is_backward(n) for n in above):
        raise Refused("it needs a collective of backward; other ranks may not run it in forward")
    return reached[0]


def _check_kept(region: Region, results: Iterable[Node]) -> None:
    """Results of forward are kept until backward."""
    for node in results:
        if region.is_wide(node):
            raise Refused("the gradient is as large as the logits")
        if value(node).dtype == torch.float16:
            raise Refused("float16 has no room for a gradient before the loss is scaled")
    if any("recompute" in node.meta for node in region.steps):
        raise Refused("a checkpoint recomputes it in backward")


def _is_linear(target: Any, found: Sequence[str]) -> bool:
    """Whether operands of these degrees, a multiple among them, give a multiple."""
    if target in _OF_FIRST:
        return found[0] == MULTIPLE and MULTIPLE not in found[1:]
    if target in _INTO:
        return PLAIN not in [found[at] for at in _INTO[target]]
    if target in MATMULS:
        return PLAIN not in found[:-2] and sorted(found[-2:]) == sorted([MULTIPLE, PLAIN])
    # a * b + c; torch 2.11 has none
    fma = name_of(target) == "prims::fma"
    return fma and found[:2].count(MULTIPLE) == 1 and found[2] != PLAIN


_MIXED = "mixed"
"""Multiples and others, joined: the coefficients of a fused gradient."""


class _Degrees:
    """How each value depends on the tangent."""

    def __init__(self, tangent: Node) -> None:
        self.known: dict[Node, str] = {tangent: MULTIPLE}

    def of(self, arg: Any) -> str:
        if isinstance(arg, Node):
            return self.known.get(arg) or (ZERO if is_zero(arg) else PLAIN)
        if isinstance(arg, (list, tuple)):
            found = {self.of(each) for each in arg} - {ZERO}
            return _MIXED if len(found) > 1 else found.pop() if found else ZERO
        return ZERO if isinstance(arg, (int, float)) and arg == 0 else PLAIN

    def enter(self, node: Node) -> None:
        if node not in self.known and node.op == "call_function":
            self.known[node] = self._found(node)

    def _found(self, node: Node) -> str:
        target: Any = node.target
        if name_of(target) == "slime_fused::row_grad":
            return self._of_gradient(node)
        if not isinstance(value(node), Tensor):
            raise Refused(f"{_line_of(node)} depends on the loss's gradient")
        if target is aten.cat.default:
            return self.of(node.args[0])
        found = [self.of(arg) for arg in node.args]
        if _MIXED in found:
            return _MIXED if target in RESHAPES else self._refused(node)
        if MULTIPLE in found and _is_linear(target, found):
            return MULTIPLE
        return self._refused(node) if target in MATMULS else _degree_of_result(node, found)

    def _refused(self, node: Node) -> str:
        raise Refused(f"{_line_of(node)} is not linear in the loss's gradient")

    def _of_gradient(self, node: Node) -> str:
        """Coefficients are multiples, exponentials are not: see docs/ops.md."""
        x, terms, affine, index, weight = node.args[:5]
        self._check_cells(node, terms, [PLAIN] * 3 + [MULTIPLE] * 2)
        self._check_cells(node, affine, [MULTIPLE, PLAIN, MULTIPLE])  # f * (x - center) + e
        self._check_cells(node, weight, [MULTIPLE])
        if MULTIPLE in (self.of(x), self.of(index)):
            self._refused(node)
        return MULTIPLE

    def _check_cells(self, node: Node, packed: Any, degrees: Sequence[str]) -> None:
        while packed.target in RESHAPES:
            packed = packed.args[0]
        parts = packed.args[0] if packed.target is aten.cat.default else [packed]
        if any(same(size, 0) for size in shape_of(packed)):
            return
        for at, part in enumerate(parts):
            if self.of(part) not in (ZERO, degrees[at % len(degrees)]):
                self._refused(node)


def _line_of(node: Node) -> str:
    where = source_of(node)
    return f"{node.target}{f' at {where}' if where else ''}"


def _degree_of_result(node: Node, found: Sequence[str]) -> str:
    """The degree of a pointwise result of operands of the degrees `found`."""
    target = node.target
    if MULTIPLE not in found:
        zero = target in _HOMOGENEOUS and ZERO in found
        return ZERO if zero and _zero_result(target, found) else PLAIN
    rule = _HOMOGENEOUS.get(target)
    if rule is None or not rule(node, found):
        raise Refused(f"{_line_of(node)} is not linear in the loss's gradient")
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
    """One of two multiples, by a condition independent of the tangent."""
    return found[0] != MULTIPLE and PLAIN not in found[1:]


def _with_zero(node: Node, found: Sequence[str]) -> bool:
    """A multiple compared with 0: no other than the number's being 0 changes that, and then all is 0."""
    return found[1] == ZERO


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
