"""A full-vocabulary value at a column (or several) per row: one gather from the logits, and arithmetic."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from fx_passes.algebra.arithmetic import add, only_everywhere, only_known
from fx_passes.algebra.forms import Exp, Form, OneHot
from fx_passes.algebra.poly import ONE, ZERO, Poly
from fx_passes.graph.facts import same, shape_of
from fx_passes.refused import Refused
from fx_passes.walk.context import Context
from fx_passes.walk.known import Guarded
from fx_passes.walk.left import softmax_left
from fx_passes.walk.near import Near, affine_center, near
from fx_passes.walk.statistics import dtype_of

aten = torch.ops.aten


LARGE = 1e2
"""From this size of a constant on, a number written next to it loses digits."""


def index_node(c: Context, index: tuple[Node, ...]) -> Node:
    """The columns of a one-hot term: the sum of its nodes."""
    total = index[0]
    for part in index[1:]:
        total = c.emitter.call(aten.add.Tensor, total, part)
    return total


def column(c: Context, form: Form, index: tuple[Node, ...]) -> Poly:
    """W at one column (or K columns) per row."""
    only_known(form)
    only_everywhere(form)
    dtype, chosen = dtype_of(form), index_node(c, index)
    taken, result = ZERO, ZERO
    left = softmax_left(c, form) if form.f.is_zero else None
    if form.exps or not form.f.is_zero:
        everywhere = c.spread(
            form, c.emitter.cast(chosen, torch.int64)
        )  # gather reads as many rows as the index has
        if left is not None:
            found = c.emitter.call(aten.gather.default, left.node, form.vdim, everywhere)
            result = _left_column(c, left.term, c.emitter.cast(found, dtype), dtype)
            form = form.with_(exps=())
        elif form.x is not None:
            logit = c.emitter.cast(c.gather(form.x, form.vdim, everywhere), dtype)
            c.rows.tell(logit, logits=c.roots.root_of[form.x])
            taken = Poly.atom(logit)
    if not form.f.is_zero:
        # `RowNodes.emit` computes (x - max) - log_sum, never x + (...), if the factor is a number
        around = affine_center(c, form) if form.f.as_number() is None else Near()
        result = result + _scaled(c, form, taken, around, form.f) + around.value
    result = result + form.e
    for term in form.exps:
        result = result + _exp_column(c, form, term, taken, dtype)
    for hot in form.hots:
        result = result + _hot_column(c, hot, index, form, dtype)
    return result


def plus_column(c: Context, form: Form, index: Node, weight: Poly, rounded: bool = False) -> Form:
    """W + [v == index] * weight; `rounded`: see `OneHot`."""
    hot = OneHot((index,), weight, rounded=rounded)
    return add(form, form.with_(exps=(), e=ZERO, f=ZERO, hots=(hot,)), c.rows.zero_outside)


def with_column(c: Context, form: Form, index: Node, written: Poly, hit: Poly = ONE) -> Form:
    """W with `written` at one column of every row with `hit` = 1; rows with `hit` = 0 stay.

    Raises:
        Refused: W is a constant so much larger that `written` would be lost in it.
    """
    if form.is_row and form.e.exceeds(LARGE):
        raise Refused("a number is added to larger ones and would be lost in them")
    return plus_column(c, form, index, (written - column(c, form, (index,))) * hit)


def _scaled(c: Context, form: Form, taken: Poly, around: Near, scale: Poly) -> Poly:
    """scale * (x - center) at the column. As in the operators, x is not read in a row of scale 0."""
    number, difference = scale.as_number(), taken - around.center
    if number is not None and abs(number) == 1:
        return difference * scale
    dtype, like = dtype_of(form), next(iter(taken.atoms()))
    if not around.center.is_zero:
        difference = Poly.atom(c.rows.emit_node(difference, dtype, like))
    if number is not None or _is_quotient(scale):
        return difference * scale
    scaled = c.rows.emit_node(difference * c.as_one(form, scale), dtype, like)
    scaled = c.where_any([scale], scaled, c.rows.emit_node(ZERO, dtype, like))
    guarded = Guarded(difference * scale, scale)
    c.rows.tell(scaled, guarded=guarded, level_free=not around.center.is_zero)
    return Poly.atom(scaled)


def _is_quotient(scale: Poly) -> bool:
    """Whether numbers per row are divisors only. It is then 0 at an infinite divisor, and such a row still counts."""
    _, monomial = scale.as_monomial() or (0.0, ())
    return bool(monomial) and all(power < 0 for _, power in monomial)


def _exp_column(c: Context, form: Form, term: Exp, taken: Poly, dtype: torch.dtype) -> Poly:
    around = near(c, form, term.scale, term.shift)
    z = _scaled(c, form, taken, around, term.scale)
    exponent = c.rows.emit(z - (term.shift - around.value), dtype)
    term = replace(term, a=term.a + term.b * around.value)
    return _weighted(c, term, z, c.emitter.call(aten.exp.default, exponent), dtype)


def _left_column(c: Context, term: Exp, probability: Node, dtype: torch.dtype) -> Poly:
    """From the exponential at the column: its logarithm is y - shift."""
    y = ZERO
    if not term.b.is_zero:
        y = Poly.atom(c.emitter.call(aten.log.default, probability)) + term.shift
    return _weighted(c, term, y, probability, dtype)


def _weighted(c: Context, term: Exp, y: Poly, probability: Node, dtype: torch.dtype) -> Poly:
    """probability * (a + b y), and 0 for a probability of 0."""
    factor = Poly.atom(probability) * (term.a + term.b * y)
    if term.b.is_zero:
        return factor
    zero = c.rows.emit_node(ZERO, dtype, probability)
    null = c.emitter.call(aten.eq.Scalar, probability, 0)
    weighted = c.emitter.where(null, zero, c.rows.emit_node(factor, dtype, probability))
    c.rows.tell(weighted, guarded=Guarded(factor, Poly.atom(probability)))
    return Poly.atom(weighted)


def _hot_column(
    c: Context, hot: OneHot, index: tuple[Node, ...], form: Form, dtype: torch.dtype
) -> Poly:
    if hot.index == index and all(same(shape_of(node)[form.vdim], 1) for node in index):
        return hot.weight
    if hot.multiplied:
        raise Refused("a one-hot multiple of a full-vocabulary value is read at other columns")
    mine, theirs = index_node(c, hot.index), index_node(c, index)
    held = c.rows.emit_node(hot.weight, dtype, mine)
    zero = c.rows.emit_node(ZERO, dtype, mine)
    if not all(same(shape_of(node)[form.vdim], 1) for node in (mine, theirs)):
        raise Refused("many columns of two index tensors are combined")
    hit = c.emitter.call(aten.eq.Tensor, mine, theirs)
    return Poly.atom(c.emitter.where(hit, held, zero))
