"""Reductions over the vocabulary: row statistics, and arithmetic on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fx_passes.algebra.arithmetic import only_everywhere, only_known, scaled
from fx_passes.algebra.forms import Exp, Form, OneHot
from fx_passes.algebra.poly import ZERO, Poly
from fx_passes.graph.facts import is_float_tensor, same, shape_of
from fx_passes.refused import Refused
from fx_passes.rules.pointwise import normal, times
from fx_passes.rules.row_moves import permute_dims
from fx_passes.walk.columns import index_node
from fx_passes.walk.context import Context
from fx_passes.walk.near import is_centered, near
from fx_passes.walk.results import (
    EXPECTED,
    NORMALISER,
    Instead,
    Operand,
    Result,
    RowValue,
    as_form,
)
from fx_passes.walk.spelled_out import arithmetic
from fx_passes.walk.statistics import dtype_of

aten = torch.ops.aten


# -- sums -----------------------------------------------------------------------------------------


def sum_(
    c: Context,
    node: Node,
    operand: Operand,
    dims: Operand = None,
    keepdim: bool = False,
    dtype: Operand = None,
) -> Result:
    form = as_form(operand)
    _check_dtype(dtype)
    over = _reduced_dims(form, dims)
    if form.vdim not in over:
        raise Refused("rows of full-vocabulary values are summed")
    if form.x is None and (not is_float_tensor(node) or not (form.e.atoms() or form.hots)):
        return None
    poly, label = row_sum(c, form)
    return _then_rows(c, node, form, poly, label, over, keepdim)


def mean(
    c: Context,
    node: Node,
    operand: Operand,
    dims: Operand = None,
    keepdim: bool = False,
    dtype: Operand = None,
) -> Result:
    form = as_form(operand)
    over = _reduced_dims(form, dims)
    if form.vdim not in over:
        raise Refused("rows of full-vocabulary values are averaged")
    if form.x is None:
        return None
    poly, label = row_sum(c, form)
    inverse = c.vocabulary(form).inverse()
    assert inverse is not None  # one size
    return _then_rows(c, node, form, poly * inverse, label, over, keepdim, aten.mean.dim)


def _check_dtype(dtype: Operand) -> None:
    if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
        raise Refused("each element is cut to an integer before it is summed")


def _reduced_dims(form: Form, dims: Operand) -> list[int]:
    rank = len(form.shape)
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(rank))
    listed = dims if isinstance(dims, (list, tuple)) else [dims]
    return [dim % rank for dim in listed if isinstance(dim, int)]


def _then_rows(
    c: Context,
    node: Node,
    form: Form,
    poly: Poly,
    label: str,
    over: Sequence[int],
    keepdim: bool,
    reduction: Callable[..., Any] = aten.sum.dim_IntList,
) -> Result:
    """The row scalar, further reduced over the other dimensions of the user's reduction."""
    if list(over) == [form.vdim]:
        return c.row_value(node, poly, label, form, keepdim)
    rows = c.emitter.expand(c.emit_sum(poly, form, node), c.lead_sizes(form))
    return RowValue(c.emitter.call(reduction, rows, list(over), keepdim), label, form)


def row_sum(c: Context, form: Form) -> tuple[Poly, str]:
    """sum_v W: exponentials by their statistics, the affine part by the total, columns by their weights."""
    only_known(form)
    only_everywhere(form)
    total, label = ZERO, "row value"
    for term in form.exps:
        total += _exp_sum(c, form, term)
        label = NORMALISER if term.b.is_zero else EXPECTED
    total += _affine_sum(c, form)
    for hot in form.hots:
        total += _columns_sum(c, form, hot)
    return total, label


def _affine_sum(c: Context, form: Form) -> Poly:
    """sum_v (e + f x): by the statistics if e cancels the maximum, otherwise a plain sum of the program's values."""
    if form.f.is_zero:
        return form.e * c.vocabulary(form) if not form.e.is_zero else ZERO
    if is_centered(c, form):
        return form.e * c.vocabulary(form) + c.total(form)
    if form.e.is_zero:
        return Poly.atom(_plain_sum(c, form, form.x)) * form.f
    # whether e takes an offset of the logits away cannot be seen, and a difference of two sums would keep it
    affine = form.with_(exps=(), hots=())
    return Poly.atom(_plain_sum(c, form, arithmetic(c, affine, dtype_of(form))))


def _plain_sum(c: Context, form: Form, wide: Node | None) -> Node:
    return c.emitter.call(aten.sum.dim_IntList, wide, [form.vdim], True, dtype=dtype_of(form))


def _exp_sum(c: Context, form: Form, term: Exp) -> Poly:
    """sum_v exp(y - c)(a + b y) = exp(max + log_sum - c) (a + b (mean + max))."""
    assert form.x is not None
    stats, dtype = c.stats(form, term.scale), dtype_of(form)
    around = near(c, form, term.scale, term.shift)
    apart = stats.peak - around.center
    if not around.center.is_zero and not apart.is_zero:
        apart = Poly.atom(c.rows.emit_node(apart, dtype, form.x))
    top = apart * term.scale + around.value  # max, relative to the subtracted value
    weighted = term.a + term.b * (stats.mean + top)
    if term.shift == stats.logsumexp:
        return weighted
    mass = c.mass(stats.max - term.shift, stats.log_sum, form.x, top - term.shift)
    if term.b.is_zero:
        return Poly.atom(mass) * term.a
    return Poly.atom(c.weighted(mass, weighted))


def _columns_sum(c: Context, form: Form, hot: OneHot) -> Poly:
    index = index_node(c, hot.index)
    if same(shape_of(index)[form.vdim], 1):
        return hot.weight
    weights = c.rows.emit_node(hot.weight, dtype_of(form), index)
    weights = c.emitter.expand(weights, c.emitter.sizes(index))
    return Poly.atom(c.emitter.call(aten.sum.dim_IntList, weights, [form.vdim], True))


# -- maxima ---------------------------------------------------------------------------------------


def amax(
    c: Context, node: Node, operand: Operand, dims: Operand = (), keepdim: bool = False
) -> Result:
    form = as_form(operand)
    return c.row_value(node, _maximum(c, form, dims), "maximum", form, keepdim)


def max_dim(
    c: Context, node: Node, operand: Operand, dim: Operand, keepdim: bool = False
) -> Result:
    """(values, indices): the indices are those of `argmax`."""
    form = as_form(operand)
    poly = _maximum(c, form, dim)
    taken = {user.args[1] for user in node.users if user.users}
    places = Instead(_argmax(c, form, keepdim)) if 1 in taken else None
    values = {user.args[1]: user for user in node.users}.get(0)
    if 0 not in taken or values is None:
        return (None, places)
    return (c.row_value(values, poly, "maximum", form, keepdim), places)


def argmax(
    c: Context, node: Node, operand: Operand, dim: Operand = None, keepdim: bool = False
) -> Result:
    """The logits' own argmax, if the scale is a positive number: a reduction without a full-vocabulary result."""
    form = as_form(operand)
    if not isinstance(dim, int) or dim % len(form.shape) != form.vdim:
        raise Refused("argmax over other dimensions than the vocabulary")
    return Instead(_argmax(c, form, keepdim))


def _maximum(c: Context, form: Form, dims: Operand) -> Poly:
    if _reduced_dims(form, dims) != [form.vdim]:
        raise Refused("a maximum over other dimensions than the vocabulary")
    if not form.is_affine or form.f.is_zero:
        raise Refused("a maximum of a value that is not linear in the logits")
    only_everywhere(form)
    stats = c.stats(form, form.f)
    maximum = stats.max + form.e
    if not set(stats.peak.atoms()) <= set(maximum.atoms()):  # -inf - -inf is NaN
        maximum += Poly.atom(c.nothing(form, stats))
    return maximum


def _argmax(c: Context, form: Form, keepdim: bool) -> Node:
    """Argmax of the logits, and column 0 for a row of NaN, which has no softmax."""
    factor = form.f.as_number()
    if not (form.is_affine and factor and factor > 0):
        raise Refused("argmax of a value other than a positive multiple of the logits")
    if not all(map(c.statistics.is_one, form.e.atoms())):
        raise Refused("argmax of logits plus a number per row")
    only_everywhere(form)
    assert form.x is not None
    call, shifted = c.emitter.call, bool(form.e.atoms())
    place = call(aten.argmax.default, form.x, form.vdim, keepdim or shifted)
    if not shifted:
        return place
    shift = c.emit_rows(form.e, form, form.x)
    known = call(aten.eq.Tensor, shift, shift)
    place = c.emitter.where(known, place, c.emitter.full([], 0, torch.int64, place))
    return place if keepdim else call(aten.squeeze.dim, place, form.vdim)


def getitem(c: Context, node: Node, items: Operand, at: int) -> Result:
    return items[at] if isinstance(items, tuple) else None


# -- products with one row or column ----------------------------------------------------------------


def bmm(c: Context, node: Node, left: Operand, right: Operand) -> Result:
    """[N, 1, V] @ [N, V, 1]: a sum over the vocabulary; [N, V, 1] @ [N, 1, 1] and its mirror: times a row scalar."""
    if isinstance(left, Form) and isinstance(right, Form):
        return _dot(c, node, left, right)
    form, other = (left, right) if isinstance(left, Form) else (right, left)
    rows = shape_of(other) if isinstance(other, Node) else ()
    if len(rows) != 3 or not (same(rows[1], 1) and same(rows[2], 1)):
        raise Refused("a matrix product with full-vocabulary values")
    form = as_form(form)
    return normal(c, scaled(form, c.operand(other, form)))


def _dot(c: Context, node: Node, left: Form, right: Form) -> Result:
    turned = left.vdim == 2 and right.vdim == 1
    if not (turned and same(left.shape[1], 1) and same(right.shape[2], 1)):
        raise Refused("a matrix product with full-vocabulary values")
    row = permute_dims(c, right, (right.shape[0], 1, right.shape[1]), [0, 2, 1])
    product = times(c, left, row)
    poly, label = row_sum(c, product)
    return c.row_value(node, poly, label, product, keepdim=True)
