"""Operands as forms of one shape: the first step of a rule on two values."""

from __future__ import annotations

import torch
from torch.fx import Node

from fx_passes.algebra.forms import Form, Guard, Mask, OneHot
from fx_passes.algebra.poly import ZERO, Poly
from fx_passes.graph.facts import same, shape_of, value
from fx_passes.refused import Refused
from fx_passes.walk.context import Context
from fx_passes.walk.results import Operand
from fx_passes.walk.statistics import dtype_of

aten = torch.ops.aten


def form_beside(c: Context, operand: Operand, like: Form) -> Form:
    """An operand combined with `like`: a form, or a row scalar spread over the vocabulary."""
    if isinstance(operand, Mask):
        return mask_form(c, operand)
    if isinstance(operand, Form):
        if len(operand.shape) != len(like.shape):
            raise Refused(
                "an operand varies over the vocabulary and is not computed from the logits"
            )
        return operand
    return Form(like.shape, like.vdim, e=c.operand(operand, like))


def mask_form(c: Context, mask: Mask) -> Form:
    """The mask as 1 and 0: a row's column, a row mask, or `not isnan`, which ignores elements with p = 0."""
    if mask.guard is Guard.NAN and mask.negated and nan_by_row(c, mask.form):
        (term,) = mask.form.exps
        nan = c.emitter.call(aten.isnan.default, no_softmax(c, mask.form))
        rows = c.emitter.cast(c.emitter.call(aten.logical_not.default, nan), dtype_of(mask.form))
        beside = None if term.b.is_zero else (term.scale, term.shift)
        return mask.form.with_(exps=(), e=Poly.atom(rows), beside=beside)
    if mask.guard is Guard.ROW:
        rows = c.emitter.align(masked_rows(c, mask), len(mask.form.shape))
        return mask.form.with_(e=Poly.atom(rows))
    if mask.guard is not Guard.COLUMN or mask.negated:
        raise Refused(f"a mask is used as a number: {mask.guard.value}")
    index, hit = masked_column(c, mask)
    return mask.form.with_(x=None, exps=(), e=ZERO, f=ZERO, hots=(OneHot((index,), hit),))


def no_softmax(c: Context, form: Form) -> Node:
    """0 for each row, NaN for a row without a softmax, for a form accepted by `nan_by_row`."""
    return c.nothing(form, c.stats(form, form.exps[0].scale))


def nan_by_row(c: Context, form: Form) -> bool:
    """`k p` or `k p log(p)`: NaN in a complete row or nowhere. Exception: the second may be NaN at p = 0."""
    if not form.is_exp or len(form.exps) != 1:
        return False
    (term,) = form.exps
    plain = term.b.is_zero or term.a == -(term.b * term.shift)
    factor = term.a if term.b.is_zero else term.b
    if not plain or not factor.as_number():
        return False
    return term.shift == c.stats(form, term.scale).logsumexp


def masked_column(c: Context, mask: Mask) -> tuple[Node, Poly]:
    """The column of `[v == index]`, or 0 if the compared index is no column, and whether it is one."""
    assert mask.index is not None, mask
    call, index = c.emitter.call, c.emitter.cast(mask.index, torch.int64)
    inside = call(aten.lt.Scalar, index, c.size_of(mask.form, mask.form.vdim))
    hits = call(aten.bitwise_and.Tensor, call(aten.ge.Scalar, index, 0), inside)
    zero = c.emitter.full([], 0, torch.int64, index)
    return c.emitter.where(hits, index, zero), Poly.atom(c.rows.place(hits))


def masked_rows(c: Context, mask: Mask) -> Node:
    """The condition per row of a row mask."""
    assert mask.index is not None, mask
    return c.emitter.call(aten.logical_not.default, mask.index) if mask.negated else mask.index


def pair(c: Context, node: Node, left: Operand, right: Operand) -> tuple[Form, Form]:
    """Both operands as forms of the result's shape."""
    like = left if isinstance(left, (Form, Mask)) else right
    like = like.form if isinstance(like, Mask) else like
    if isinstance(left, Form) and isinstance(right, Form) and left.x is None:
        like = right
    assert isinstance(like, Form), (left, right)
    one, two = form_beside(c, left, like), form_beside(c, right, like)
    shape = shape_of(node)
    if len(shape) != len(like.shape) or not same(shape[like.vdim], like.shape[like.vdim]):
        raise Refused("the logits are broadcast against a larger value")
    for form in (one, two):
        if form.x is not None and not all(map(same, form.shape, shape)):
            raise Refused("the logits are broadcast against a larger value")
    one, two = _settled(one, like), _settled(two, like)
    return one.with_(shape=shape), two.with_(shape=shape)


def _settled(form: Form, like: Form) -> Form:
    """Constants have no vocabulary dimension of their own."""
    return form.with_(vdim=like.vdim) if is_constant(form) else form


def is_constant(form: Form) -> bool:
    """The same number in all rows and columns."""
    return form.is_row and all(same(size, 1) for atom in form.e.atoms() for size in _shape(atom))


def _shape(atom: Node) -> tuple[object, ...]:
    return tuple(getattr(value(atom), "shape", ()))
