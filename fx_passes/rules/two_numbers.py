"""One number everywhere but at a column of the row, as a smoothed target: a function of it is another such value."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fx_passes.algebra.forms import Form, Guard, Mask, OneHot
from fx_passes.algebra.poly import ONE, Poly
from fx_passes.graph.facts import same, shape_of, value
from fx_passes.graph.operators import CASTS, RESHAPES, under
from fx_passes.rules.indices import is_integer
from fx_passes.walk.columns import index_node
from fx_passes.walk.context import Context
from fx_passes.walk.results import Operand

aten = torch.ops.aten

_HOLDS: dict[object, Callable[[float, float], bool]] = {
    aten.eq.Scalar: operator.eq,
    aten.eq.Tensor: operator.eq,
    aten.ne.Scalar: operator.ne,
    aten.gt.Scalar: operator.gt,
    aten.ge.Scalar: operator.ge,
    aten.le.Scalar: operator.le,
}

_LARGEST_INTEGER = 2**31 - 1  # sums and products of these are exact as floats
_DIGITS = 1e-9
"""Least size of the other number relative to `elsewhere`; below it, their difference has lost too many digits."""


@dataclass(frozen=True)
class TwoNumbers:
    """`elsewhere + (there - elsewhere) * hit * [v == index]`, with numbers and a `hit` that is 0 or 1 in each row.

    `column` is None if all elements are one number.
    """

    form: Form
    elsewhere: float
    there: float
    column: OneHot | None
    hit: Poly

    def map(self, function: Callable[[float], float]) -> Form:
        """The function of every element, if it is finite for both numbers."""
        elsewhere, there = function(self.elsewhere), function(self.there)
        weight = self.hit * Poly.number(there - elsewhere)
        constant = self.form.with_(e=Poly.number(elsewhere), hots=())
        if self.column is None or weight.is_zero:
            return constant
        return constant.with_(hots=(replace(self.column, weight=weight),))


def two_numbers(node: object, operand: Operand) -> TwoNumbers | None:
    """`operand`, the meaning of `node`, if it is two numbers that are as good as exact in the node's dtype."""
    if not isinstance(operand, Form) or not isinstance(node, Node) or len(operand.hots) > 1:
        return None
    rest, column = operand.with_(hots=()), next(iter(operand.hots), None)
    elsewhere = rest.e.as_number() if rest.is_row else None
    if elsewhere is None:
        return None
    there, hit = elsewhere, ONE
    if column is not None:
        weight, flags = column.weight.as_monomial() or (math.nan, ())
        if not (_is_one_column(operand, column) and all(map(_is_flag, flags))):
            return None
        there, hit = elsewhere + weight, Poly({flags: 1.0})
    lost = elsewhere != 0 and abs(there) <= _DIGITS * abs(elsewhere)
    if lost or not all(_is_exact(node, number) for number in (elsewhere, there)):
        return None
    return TwoNumbers(operand, elsewhere, there, column, hit)


def _is_one_column(form: Form, hot: OneHot) -> bool:
    plain = not (hot.multiplied or hot.rounded or hot.extent)
    return plain and all(same(shape_of(index)[form.vdim], 1) for index in hot.index)


def _is_flag(factor: tuple[Node, int]) -> bool:
    return value(under(factor[0], CASTS | RESHAPES)).dtype is torch.bool and factor[1] == 1


def _is_exact(node: Node, number: float) -> bool:
    """0, or a number that rounds to neither 0 nor an infinity in the node's dtype."""
    dtype = value(node).dtype
    if not dtype.is_floating_point:
        fits = torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max
        return number.is_integer() and fits and abs(number) <= _LARGEST_INTEGER
    limits = torch.finfo(dtype)
    return number == 0 or limits.tiny <= abs(number) <= limits.max


def are_integers(node: object) -> bool:
    return isinstance(node, Node) and is_integer(node)


def compared_with(c: Context, node: Node, numbers: TwoNumbers, other: float) -> Mask:
    """The mask of a comparison. For numbers that may be rounded `other` is 0; a cast to bool compares with 0, too."""
    holds = operator.ne if node.target in CASTS else _HOLDS[node.target]
    elsewhere, there = (holds(number, other) for number in (numbers.elsewhere, numbers.there))
    if elsewhere == there or numbers.column is None:
        return nowhere(numbers.form, negated=elsewhere)
    index = _index_or_none(c, numbers.column, numbers.hit)
    return Mask(Guard.COLUMN, numbers.form, negated=elsewhere, index=index, at_nan=elsewhere)


def nowhere(form: Form, negated: bool = False) -> Mask:
    return Mask(Guard.NEVER, form, negated=negated, at_nan=negated)


def _index_or_none(c: Context, column: OneHot, hit: Poly) -> Node:
    """The column, or -1 in rows without a hit."""
    index = index_node(c, column.index)
    for atom in hit.atoms():
        missed = c.emitter.call(aten.eq.Scalar, atom, 0)
        index = c.emitter.where(missed, c.emitter.full([], -1, torch.int64, index), index)
    return index
