"""A full-vocabulary value leaving the algebra: its coefficients for `row_grad`, one read of the logits and one write.

Entry point: `row_grad`. The operator's arguments are described in docs/ops.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from fx_passes.algebra.forms import Exp, Form
from fx_passes.algebra.poly import ONE, ZERO, Poly
from fx_passes.graph.backward import is_tangent
from fx_passes.graph.facts import BACKWARD, TAG, SizeArg, is_backward, same, shape_of, value
from fx_passes.graph.operators import VIEWS, under
from fx_passes.walk.columns import index_node
from fx_passes.walk.context import Context
from fx_passes.walk.left import in_backward, softmax_left
from fx_passes.walk.near import affine_center, near
from fx_passes.walk.statistics import dtype_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Leaving:
    """A value leaving the algebra.

    Attributes:
        node: the value.
        form: its form.
        operators: the `row_grad`s emitted for it.
        from_softmax: computed from a softmax saved by forward, not from the logits.
    """

    node: Node
    form: Form
    operators: tuple[Node, ...]
    from_softmax: bool


def row_grad(c: Context, form: Form, dtype: torch.dtype) -> Leaving:
    """The full-vocabulary value itself, in `dtype`."""
    assert form.x is not None
    wanted, dtype = dtype, _dtype_of_sum(form, dtype)
    kept = _kept_softmax(c, form, dtype)
    x, made, form = (form.x, (), form) if kept is None else kept
    packer = Coefficients(c, form)
    operator = c.emitter.call(
        torch.ops.slime_fused.row_grad.default,
        packer.ordered(x),
        *packer.joined(),
        kept is not None,
        dtype,
        "",
    )
    if in_backward(c):  # also without a dependence on an upstream gradient
        operator.meta[TAG] = BACKWARD
    node = with_others(c, packer.back(operator), form, wanted)
    return Leaving(node, form, (operator, *made), kept is not None)


def _dtype_of_sum(form: Form, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a sum: summands are rounded once, after the sum."""
    return functools.reduce(torch.promote_types, (value(o).dtype for o, _ in form.others), dtype)


def adds_what_comes_in(form: Form) -> bool:
    """Whether autograd passes in a summand: the gradient of logits returned by the function."""
    return bool(what_comes_in(form))


def what_comes_in(form: Form) -> list[Node]:
    """The tangents among the summands."""
    added = (under(other, VIEWS) for other, _ in form.others)
    return [node for node in added if is_tangent(node)]


def with_others(c: Context, node: Node, form: Form, dtype: torch.dtype) -> Node:
    """`node` and the form's `others`, in `dtype`."""
    of_sum = _dtype_of_sum(form, dtype)
    for other, weight in form.others:
        factor = c.rows.emit(weight, of_sum)
        term = other if factor == 1 else c.emitter.call(aten.mul.Tensor, other, factor)
        single = weight.as_monomial()
        if single is not None:
            term = c.rows.zero_where_placed(single[1], term)
        node = c.emitter.call(aten.add.Tensor, node, term)
    return c.emitter.cast(node, dtype)


def _kept_softmax(
    c: Context, form: Form, dtype: torch.dtype
) -> tuple[Node, tuple[Node, ...], Form] | None:
    """A softmax computed by forward, its operators, and the form to compute over it instead.

    For logits changed by forward it is the softmax written into them (`left.py`). With save="softmax" it is exp(y -
    shift) computed in forward, and the gradient may overwrite it. None if it cannot serve: several softmaxes, logits in
    the gradient, a shift computed in backward.
    """
    if len(form.exps) != 1 or not form.f.is_zero or not in_backward(c):
        return None
    left = softmax_left(c, form)
    if left is not None:
        return left.node, (), form.with_(exps=(left.term,))
    if c.config.save != "softmax" or not _may_be_saved(c, form, dtype):
        return None
    (term,) = form.exps
    softmax = form.with_(exps=(Exp(term.scale, term.shift, ONE),), e=ZERO, hots=(), others=())
    at, c.emitter.origin = c.emitter.origin, None
    try:
        made = row_grad(c, softmax, dtype)
    finally:
        c.emitter.origin = at
    return made.node, made.operators, form


def _may_be_saved(c: Context, form: Form, dtype: torch.dtype) -> bool:
    """False if saving would round too much: an exponential that is no probability, float16, float64 in a narrower
    dtype.
    """
    (term,) = form.exps
    stats = c.stats(form, term.scale)
    if dtype_of(form) is torch.float64 and dtype is not torch.float64:
        return False
    if term.shift != stats.logsumexp or dtype is torch.float16:
        return False
    known = (term.scale, term.shift)
    return not any(is_backward(atom) for poly in known for atom in poly.atoms())


class Coefficients:
    """Of a form, as `row_grad` takes them: its vocabulary is the last dimension."""

    def __init__(self, c: Context, form: Form) -> None:
        rank = len(form.shape)
        self.c, self.form = c, form
        self.dtype = dtype_of(form)
        self.order = [dim for dim in range(rank) if dim != form.vdim] + [form.vdim]

    def ordered(self, node: Node) -> Node:
        """`node`, of the form's dimensions, as the operator takes it."""
        return self.c.emitter.permute(node, self.order)

    def back(self, node: Node) -> Node:
        """The operator's result, in the form's dimensions."""
        return self.c.emitter.permute(node, [self.order.index(dim) for dim in sorted(self.order)])

    def apart(self) -> Iterator[list[Node | float]]:
        """terms, affine, index and weight, column by column; a number if equal in all rows."""
        for polys in self._polys():
            yield [self._cell(p) if (n := p.as_number()) is None else n for p in polys]
        for part in self._hots():
            yield [column for columns in part for column in self._single(columns)]

    def joined(self) -> Iterator[Node]:
        """[..., K, 5], [..., 3], and [..., M] twice."""
        terms, affine = ([self._cell(poly) for poly in polys] for polys in self._polys())
        packed = self._joined(terms)
        sizes = [*self.c.emitter.sizes(packed)[:-1], len(self.form.exps), 5]
        yield self.c.emitter.reshape(packed, sizes)
        yield self._joined(affine)
        index, weight = self._hots()
        yield self._joined(index, torch.int64)
        yield self._joined(weight)

    def _polys(self) -> tuple[list[Poly], list[Poly]]:
        """Of the exponential terms, and (f, center, e)."""
        around = affine_center(self.c, self.form)
        terms = [p for t in self.form.exps for p in coefficients(self.c, self.form, t)]
        return terms, [self.form.f, around.center, self.form.e + around.value]

    def _hots(self) -> tuple[list[Node], list[Node]]:
        """index and weight, [..., columns], of the one-hot terms."""
        indices, weights = [], []
        for hot in self.form.hots:
            index = index_node(self.c, hot.index)
            count = self.c.emitter.size(index, self.form.vdim)
            indices.append(self._expanded(self.c.emitter.cast(index, torch.int64), count))
            weights.append(self._cell(hot.weight, count))
        return indices, weights

    def _cell(self, poly: Poly, columns: SizeArg = 1) -> Node:
        """`[..., columns]`"""
        assert self.form.x is not None
        return self._expanded(self.c.rows.emit_node(poly, self.dtype, self.form.x), columns)

    def _expanded(self, node: Node, columns: SizeArg) -> Node:
        sizes = self.c.lead_sizes(self.form)
        sizes[self.form.vdim] = columns
        return self.ordered(self.c.emitter.expand(node, sizes))

    def _single(self, columns: Node) -> list[Node]:
        count = shape_of(columns)[-1]
        if same(count, 1):
            return [columns]
        cut = functools.partial(self.c.emitter.call, aten.slice.Tensor, columns, -1)
        return [cut(at, at + 1) for at in range(count)]

    def _joined(self, cells: list[Node], dtype: torch.dtype | None = None) -> Node:
        if len(cells) == 1:
            return cells[0]
        if cells:
            return self.c.emitter.call(aten.cat.default, cells, -1)
        assert self.form.x is not None
        sizes = [*self.c.emitter.sizes(self.ordered(self.form.x))[:-1], 0]
        return self.c.emitter.full(sizes, 0, dtype or self.dtype, self.form.x)


def coefficients(c: Context, form: Form, term: Exp) -> tuple[Poly, Poly, Poly, Poly, Poly]:
    """(scale, center, shift, a, b) relative to a value `near` y: a + b y = (a + b near) + b (y - near)."""
    assert form.x is not None
    c.stats(form, term.scale)  # `near` finds the statistics of moved rows
    around = near(c, form, term.scale, term.shift)
    a = term.a + term.b * around.value
    return term.scale, around.center, term.shift - around.value, a, term.b
