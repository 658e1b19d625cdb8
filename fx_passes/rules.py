"""What is recognised: one row per ATen operator, its rule on forms and the algebra in the row's comment.

A rule takes the walk, the user's node and the node's arguments as forms, masks, row scalars and numbers. It answers
with a form, a mask or the new node of a row scalar; with None where the value is no affair of the pass; or it raises
`Refused` with the reason that the report shows. Rules are pure: they emit new nodes, they never edit the user's.

Operators that only move rows are in `row_maps.py`. Not handled on purpose: clamps and epsilons that change a
probability, top-k and sorting over the vocabulary, anything non-linear but exp and log.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fx_passes.algebra.arithmetic import Refused, add, only_known, product, scaled
from fx_passes.algebra.forms import Exp, Form, Guard, Mask, OneHot
from fx_passes.algebra.poly import ONE, ZERO, Poly
from fx_passes.builder import (
    RESHAPES,
    SAME_VALUE,
    guarded_same,
    is_float_tensor,
    same,
    same_shape,
    shape_of,
    value,
)
from fx_passes.row_maps import ROW_MAPS, is_iota, permute_dims, roll, slice_rows, write_rows
from fx_passes.walk import CREATORS, Value, Walk

aten = torch.ops.aten
prims = torch.ops.prims


# -- operands -----------------------------------------------------------------------------------------


def _as_form(w: Walk, found: Any, like: Form) -> Form:
    """An operand beside `like`: a form, or a row scalar spread over the vocabulary."""
    if isinstance(found, Mask):
        return _mask_form(found)
    if isinstance(found, Form):
        if len(found.shape) != len(like.shape):
            raise Refused("an operand varies over the vocabulary and is not made from the logits")
        return found
    return Form(like.shape, like.vdim, e=w.operand(found, like))


def _mask_form(mask: Mask) -> Form:
    """A column mask counts as one at its column."""
    if mask.guard is not Guard.COLUMN or mask.negated or mask.index is None:
        raise Refused(f"a mask is used as a number: {mask.guard.value}")
    return mask.form.with_(source=None, exps=(), e=ZERO, f=ZERO, hots=(OneHot((mask.index,), ONE),))


def _pair(w: Walk, node: Node, left: Any, right: Any) -> tuple[Form, Form]:
    like = left if isinstance(left, (Form, Mask)) else right
    like = like.form if isinstance(like, Mask) else like
    if isinstance(left, Form) and isinstance(right, Form) and left.source is None:
        like = right
    assert isinstance(like, Form)
    one, two = _as_form(w, left, like), _as_form(w, right, like)
    shape = shape_of(node)
    if len(shape) != len(like.shape) or not same(shape[like.vdim], like.shape[like.vdim]):
        raise Refused("the logits are broadcast against a larger value")
    for form in (one, two):
        if form.source is not None and not all(map(same, form.shape, shape)):
            raise Refused("the logits are broadcast against a larger value")
    one, two = (_settled(form, like) for form in (one, two))
    return one.with_(shape=shape), two.with_(shape=shape)


def _settled(form: Form, like: Form) -> Form:
    """Constants have no vocabulary dimension of their own."""
    return form.with_(vdim=like.vdim) if _is_constant(form) else form


def _is_constant(form: Form) -> bool:
    """The same number in all rows and columns."""
    return form.is_row and all(
        same(size, 1) for a in form.e.atoms() for size in getattr(value(a), "shape", ())
    )


def _only_forms(*found: Any) -> None:
    if any(isinstance(one, Mask) for one in found):
        raise Refused("a full-vocabulary mask is used in arithmetic")


# -- pointwise ----------------------------------------------------------------------------------------


def same_value(w: Walk, node: Node, form: Any, *_: Any, **__: Any) -> Value:
    return form


def cast(w: Walk, node: Node, form: Any, *_: Any, **__: Any) -> Value:
    if isinstance(form, Mask):
        return _mask_form(form)
    if not is_float_tensor(node):
        raise Refused("a full-vocabulary value is cast to integers")
    w.note_rounding(node, form)
    return form


def neg(w: Walk, node: Node, form: Form) -> Value:
    return scaled(form, Poly.number(-1.0))


def _unknown_beside(w: Walk, node: Node, left: Any, right: Any) -> tuple[Any, Any]:
    """A gradient that meets a value of no known form (the gradient of another use of the logits) carries it along."""
    for gradient, other in ((left, right), (right, left)):
        if not isinstance(gradient, Form) or gradient.is_affine or gradient.source is None:
            continue
        if isinstance(other, Form) and other.is_identity and other.source is not gradient.source:
            other = other.source
        if (
            isinstance(other, Node)
            and is_float_tensor(other)
            and all(map(same, gradient.shape, shape_of(other)))
        ):
            known = Form(gradient.shape, gradient.vdim, others=((other, ONE),))
            return (left, known) if gradient is left else (known, right)
    return left, right


def plus(sign: float) -> Callable[..., Value]:
    def rule(w: Walk, node: Node, left: Any, right: Any, alpha: Any = 1) -> Value:
        _only_forms(left, right)
        left, right = _unknown_beside(w, node, left, right)
        one, two = _same_shifts(w, *_pair(w, node, left, right))
        return add(one, scaled(two, Poly.number(sign * alpha)), w.builder.embedded)

    return rule


def _same_shifts(w: Walk, one: Form, two: Form) -> tuple[Form, Form]:
    """exp(y - max) as exp(y - max - log_sum) exp(log_sum) where the other side has that: one exponential for both.

    The factor is at most V. A loss that sums its exponentials once by itself and once in a buffer with other sums (as
    Megatron's does) comes to both.
    """
    if one.source is not two.source or one.source is None:
        return one, two

    def grown(form: Form, towards: Form) -> Form:
        return form.with_(exps=tuple(_towards(w, form, term, towards) for term in form.exps))

    return grown(one, two), grown(two, one)


def _towards(w: Walk, form: Form, term: Exp, towards: Form) -> Exp:
    for other in towards.exps:
        if other.scale != term.scale or other.shift == term.shift:
            continue
        log_sum = w.stats(form, term.scale).log_sum
        if other.shift - term.shift == log_sum:
            assert form.source is not None
            factor = Poly.atom(w.mass(log_sum, form.source))
            return Exp(term.scale, other.shift, term.a * factor, term.b * factor, term.extent)
    return term


def rsub(w: Walk, node: Node, left: Any, right: Any, alpha: Any = 1) -> Value:
    return plus(-1.0)(w, node, right, left, alpha)


def mul(w: Walk, node: Node, left: Any, right: Any) -> Value:
    for mask, other in ((left, right), (right, left)):
        rows = isinstance(mask, Mask) and not isinstance(other, (Form, Mask))
        if rows and w.operand(other, mask.form).is_zero:  # what reaches a maximum that cancels
            return mask.form.with_(exps=(), e=ZERO, f=ZERO, hots=())
    one, two = _pair(w, node, left, right)
    return normal(w, product(one, two, w.column))


def fma(w: Walk, node: Node, left: Any, right: Any, addend: Any) -> Value:
    one, two = _pair(w, node, left, right)
    result = normal(w, product(one, two, w.column))
    return add(result, _as_form(w, addend, result), w.builder.embedded)


def div(w: Walk, node: Node, form: Any, divisor: Any, rounding_mode: Any = None) -> Value:
    if rounding_mode is not None or not isinstance(form, Form):
        raise Refused("a division that rounds, or by a full-vocabulary value")
    if isinstance(divisor, Form):
        form, divided = _pair(w, node, form, divisor)
        return normal(w, product(form, _reciprocal(w, divided), w.column))
    return normal(w, scaled(form, _inverse(w, w.operand(divisor, form), form)))


def _inverse(w: Walk, poly: Poly, form: Form) -> Poly:
    inverse = poly.inverse()
    if inverse is None:
        like = form.source or next(iter(poly.atoms()))
        made = w.builder.emit_node(poly, w.dtype_of(form.source), like)
        inverse = Poly.atom(made).inverse()
    assert inverse is not None
    return inverse


def _reciprocal(w: Walk, form: Form) -> Form:
    """1 / W where W is a row scalar or one pure exponential: exp(-(y - c)) / a."""
    if form.is_row:
        return form.with_(e=_inverse(w, form.e, form))
    if not form.is_exp or len(form.exps) != 1 or not form.exps[0].b.is_zero:
        raise Refused("a division by a full-vocabulary value")
    (term,) = form.exps
    return form.with_(exps=(Exp(-term.scale, -term.shift, _inverse(w, term.a, form)),))


def exp(w: Walk, node: Node, form: Any) -> Value:
    _only_forms(form)
    if form.is_row:
        like = form.source or next(iter(form.e.atoms()), None)
        if like is None:
            return form.with_(e=Poly.number(math.exp(form.e.as_number() or 0.0)))
        return form.with_(e=Poly.atom(_exp_node(w, form, like)))
    if not form.is_affine:
        raise Refused("exp of a value that is not linear in the logits")
    return form.with_(exps=(_exponential(w, form, ONE),), e=ZERO, f=ZERO)


def _exp_node(w: Walk, form: Form, like: Node) -> Node:
    found = w.builder.emit_node(form.e, w.dtype_of(form.source), like)
    return w.builder.call(aten.exp.default, found)


def _exponential(w: Walk, form: Form, a: Poly) -> Exp:
    """exp(f x + e), with factors `exp(-log s)` as `1 / s`, so that equal softmaxes are equal terms however spelled."""
    shift = -form.e
    for monomial, number in form.e.terms.items():
        if (
            len(monomial) == 1
            and monomial[0][1] == 1
            and float(number).is_integer()
            and abs(number) <= 4
        ):
            inner = _log_argument(w, monomial[0][0])
            if inner is not None:
                shift += Poly({monomial: number})
                a = a * Poly({((inner, int(number)),): 1.0})
    return Exp(form.f, shift, a)


def _log_argument(w: Walk, atom: Node) -> Node | None:
    """s where the row scalar is log(s), seen through views."""
    inner = atom
    while inner.op == "call_function" and inner.target in RESHAPES:
        inner = inner.args[0]  # type: ignore[assignment]
    if inner.op != "call_function" or inner.target is not aten.log.default:
        return None
    argument = inner.args[0]
    assert isinstance(argument, Node)
    return w.builder.reshape(w.builder.represents.get(argument, argument), w.builder.sizes(atom))


def normal(w: Walk, form: Form) -> Form:
    """Softmaxes in one spelling: a factor that is a sum of exponentials of the same logits goes into the shift.

    `exp(y - max) / sum` becomes `exp(y - max - log_sum)`, so that it is the same term as `exp(log_softmax)`.
    """
    return form.with_(exps=tuple(_normal_term(w, term) for term in form.exps))


def _normal_term(w: Walk, term: Exp) -> Exp:
    shift, undo = term.shift, ONE
    for atom, power in _common_factors(term):
        exponent = w.mass_exponent(atom)
        if exponent is not None:
            shift -= exponent * Poly.number(power)
            undo = undo * Poly({((atom, -power),): 1.0})
    if undo is ONE:
        return term
    return Exp(term.scale, shift, term.a * undo, term.b * undo, term.extent)


def _common_factors(term: Exp) -> list[tuple[Node, int]]:
    """Atoms that every monomial of a and b has, with the same power."""
    monomials = [dict(monomial) for monomial in (*term.a.terms, *term.b.terms)]
    first = monomials[0] if monomials else {}
    return [
        (atom, power)
        for atom, power in first.items()
        if all(m.get(atom) == power for m in monomials)
    ]


def log(w: Walk, node: Node, form: Any) -> Value:
    if isinstance(form, Node):
        return _log_of_mass(w, node, form)
    _only_forms(form)
    if form.is_row and form.source is None and not form.e.is_zero:
        return form.with_(e=_log_row(w, form, form.e))
    if not form.is_exp or len(form.exps) != 1 or not form.exps[0].b.is_zero:
        raise Refused("log of a value that is not one softmax")
    (term,) = form.exps
    return form.with_(exps=(), f=term.scale, e=_log_row(w, form, term.a) - term.shift)


def _log_of_mass(w: Walk, node: Node, mass: Node) -> Node | None:
    """log of a row's sum of exponentials is its exponent: not rounded by an exp and a log."""
    mass = w.builder.represents.get(mass, mass)
    exponent = w.mass_exponent(mass) if is_float_tensor(mass) else None
    if exponent is None:
        return None
    found = w.builder.emit_node(exponent, value(node).dtype, mass)
    if not same_shape(shape_of(found), shape_of(node)):
        return None
    made = w.builder.cast(found, value(node).dtype)
    w.replacements[node] = w.builder.represents[node] = made
    return made


def _log_row(w: Walk, form: Form, poly: Poly) -> Poly:
    number = poly.as_number()
    if number is not None:
        return Poly.number(math.log(number)) if number > 0 else Poly.number(math.nan)
    like = form.source or next(iter(poly.atoms()))
    found = w.builder.emit_node(poly, w.dtype_of(form.source), like)
    return w.builder.meaning(w.builder.call(aten.log.default, found))


def power(w: Walk, node: Node, form: Any, exponent: Any) -> Value:
    if exponent == 1:
        return form
    if exponent == 2:
        return product(form, form, w.column)
    raise Refused(f"a power of {exponent} of a full-vocabulary value")


# -- masks and guards ---------------------------------------------------------------------------------


def compare(guards: Callable[[Form, float], tuple[Guard, bool] | None]) -> Callable[..., Value]:
    def rule(w: Walk, node: Node, form: Any, other: Any) -> Value:
        number = other
        if isinstance(other, Node):
            found = w.builder.operand(other, 0)
            number = found.as_number() if found is not None else None
        if isinstance(form, Form) and isinstance(number, (int, float)):
            known = guards(form, float(number))
            if known is not None:
                return Mask(known[0], form, known[1])
        raise Refused("a comparison over the vocabulary that is not a known guard")

    return rule


def _is_zero(form: Form, number: float) -> tuple[Guard, bool] | None:
    if form.is_exp and number == 0:
        return Guard.NULL, False
    return (Guard.MINUS_INF, False) if form.is_affine and number == -math.inf else None


def _not(found: tuple[Guard, bool] | None) -> tuple[Guard, bool] | None:
    return None if found is None else (found[0], not found[1])


def _at_least(form: Form, number: float) -> tuple[Guard, bool] | None:
    """`x >= finfo.min` fails only for -inf (and NaN)."""
    return (Guard.MINUS_INF, True) if form.is_affine and number <= _lowest(form) else None


def _lowest(form: Form) -> float:
    """The smallest finite logit; bfloat16's stands for float32's."""
    if form.source is None:
        return -math.inf
    return max(torch.finfo(value(form.source).dtype).min, torch.finfo(torch.bfloat16).min)


def _above(form: Form, number: float) -> tuple[Guard, bool] | None:
    return (Guard.NULL, True) if form.is_exp and number == 0 else _at_least(form, number)


def isnan(w: Walk, node: Node, form: Any) -> Value:
    _only_forms(form)
    return Mask(Guard.NAN, form)


def equals(w: Walk, node: Node, left: Any, right: Any) -> Value:
    """eq of a column number 0..V-1 with one index per row: the row's column."""
    if isinstance(left, (Form, Mask)) or isinstance(right, (Form, Mask)):
        return _at_peak(w, node) or compare(_is_zero)(w, node, left, right)
    shape = shape_of(node)
    if not (len(shape) >= 2 and w.is_vocabulary(shape[-1])):
        return None
    for columns, index in ((left, right), (right, left)):
        wide = (
            isinstance(columns, Node)
            and is_iota(columns)
            and same(shape_of(columns)[-1], shape[-1])
        )
        if wide and isinstance(index, Node) and value(index).ndim:
            index = w.builder.align(index, len(shape))
            if same(shape_of(index)[-1], 1):
                return Mask(Guard.COLUMN, Form(shape, len(shape) - 1), index=index)
    return None


def _at_peak(w: Walk, node: Node) -> Mask | None:
    """eq of a value with its own maximum, a derivative of amax.

    Where it stays, it compares with a maximum of its own: the statistics' may be rounded otherwise.
    """
    for wide, peak in (node.args[:2], node.args[1::-1]):
        while isinstance(peak, Node) and peak.target in SAME_VALUE:
            peak = peak.args[0]
        if not isinstance(peak, Node) or peak.target is not aten.amax.default:
            continue
        form = w.read(wide)
        if isinstance(form, Form) and form.is_affine and form == w.read(peak.args[0]):
            w.keep(wide)  # type: ignore[arg-type]
            made = w.builder.call(aten.amax.default, wide, *peak.args[1:])
            w.replacements[node] = w.builder.call(aten.eq.Tensor, wide, made)
            return Mask(Guard.PEAK, form)
    return None


def invert(w: Walk, node: Node, mask: Any) -> Value:
    if not isinstance(mask, Mask):
        raise Refused("a logical operator on a full-vocabulary value")
    return mask.invert()


def where(w: Walk, node: Node, condition: Any, chosen: Any, other: Any) -> Value:
    if isinstance(condition, Form):
        raise Refused("a full-vocabulary value is used as a condition")
    if isinstance(condition, Mask):
        if condition.negated:
            condition, chosen, other = condition.invert(), other, chosen
        return _where_guard(w, node, condition, chosen, other)
    return _where_rows(w, node, condition, chosen, other)


def _where_guard(w: Walk, node: Node, mask: Mask, inside: Any, outside: Any) -> Value:
    """The value at the guarded elements is what the form has there anyway, or the mask is the row's column."""
    like = mask.form
    if isinstance(inside, Form) or isinstance(outside, Form):
        like = inside if isinstance(inside, Form) and inside.source is not None else outside
        like = like if isinstance(like, Form) else mask.form
    left, right = _as_form(w, inside, like), _as_form(w, outside, like)
    if mask.guard is Guard.COLUMN:
        return _at_column(w, mask, left, right)
    constant = left.e.as_number() if left.is_row else None
    if mask.guard is Guard.NAN and constant is not None and math.isnan(constant):
        return right
    if mask.guard in (Guard.NULL, Guard.MINUS_INF) and constant == 0 and right.is_exp:
        return right
    raise Refused(f"where {mask.guard.value}, another value than the limit is put")


def _at_column(w: Walk, mask: Mask, inside: Form, outside: Form) -> Form:
    """outside + [v == index] * (inside - outside)."""
    assert mask.index is not None
    index = (mask.index,)
    weight = w.column(inside, index) - w.column(outside, index)
    column = outside.with_(exps=(), e=ZERO, f=ZERO, hots=(OneHot(index, weight),))
    return add(outside, column, w.builder.embedded)


def _where_rows(w: Walk, node: Node, condition: Any, chosen: Any, other: Any) -> Value:
    """A row mask chooses between two values: each coefficient times the mask or its complement."""
    left, right = _pair(w, node, chosen, other)
    like = left if left.source is not None else right
    if not isinstance(condition, Node):
        raise Refused("a condition that is not a row mask")
    w.operand(condition, like)
    rank, dtype = len(like.shape), w.dtype_of(like.source)
    rows = w.builder.align(condition, rank) if value(condition).ndim else condition
    yes = Poly.atom(w.builder.cast(rows, dtype))
    no = Poly.atom(w.builder.cast(w.builder.call(aten.logical_not.default, rows), dtype))
    for flag in (*yes.atoms(), *no.atoms()):
        w.builder.embedded.add(flag)
    return add(_masked(left, yes), _masked(right, no), w.builder.embedded)


def _masked(form: Form, rows: Poly) -> Form:
    constant = form.e.as_number() if form.is_row else None
    if constant is not None and not math.isfinite(constant):
        raise Refused("rows are filled with an infinite value")
    return scaled(form, rows)


def clamp_min(w: Walk, node: Node, form: Any, low: Any = None, high: Any = None) -> Value:
    """clamp(min=finfo.min): nothing but -inf is below in the dtype of the logits."""
    if not isinstance(form, Form) or high is not None or not isinstance(low, (int, float)):
        raise Refused("a clamp over the vocabulary from above, or to a value per row")
    if _at_least(form, float(low)):
        return form
    raise Refused("a clamp over the vocabulary changes values")


# -- reductions over the vocabulary -------------------------------------------------------------------


def _reduced_dims(form: Form, dims: Any) -> list[int]:
    rank = len(form.shape)
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(rank))
    return [d % rank for d in ([dims] if isinstance(dims, int) else dims)]


def sum_(
    w: Walk, node: Node, form: Any, dims: Any = None, keepdim: bool = False, dtype: Any = None
) -> Value:
    _only_forms(form)
    over = _reduced_dims(form, dims)
    if form.vdim not in over:
        raise Refused("rows of full-vocabulary values are summed")
    if form.source is None and form.is_row and not form.e.atoms():
        return None
    poly, label = row_sum(w, form)
    return _then_rows(w, node, form, poly, label, over, keepdim)


def mean(
    w: Walk, node: Node, form: Any, dims: Any = None, keepdim: bool = False, dtype: Any = None
) -> Value:
    _only_forms(form)
    over = _reduced_dims(form, dims)
    if form.vdim not in over:
        raise Refused("rows of full-vocabulary values are averaged")
    if form.source is None:
        return None
    poly, label = row_sum(w, form)
    for dim in over:
        size = w.builder.size(form.source, dim)
        poly = poly * (
            Poly.number(1.0 / size) if isinstance(size, int) and size else _inverse_size(size)
        )
    return _then_rows(w, node, form, poly, label, over, keepdim)


def _inverse_size(size: Any) -> Poly:
    if not isinstance(size, Node):
        return Poly.number(math.nan)
    return Poly({((size, -1),): 1.0})


def _then_rows(
    w: Walk, node: Node, form: Form, poly: Poly, label: str, over: Sequence[int], keepdim: bool
) -> Value:
    """The row scalar, summed over the other dimensions where the user's reduction takes them too."""
    others = [dim for dim in over if dim != form.vdim]
    if not others:
        return w.row_result(node, poly, label, form, keepdim)
    like = form.source if form.source is not None else node
    dtype = w.dtype_of(form.source)
    rows = w.builder.expand(w.builder.emit_node(poly, dtype, like), w.lead_sizes(form))
    total = w.builder.call(aten.sum.dim_IntList, rows, list(over), keepdim)
    return w.replace(node, total, label, form)


def row_sum(w: Walk, form: Form) -> tuple[Poly, str]:
    """sum_v W: exponentials by their statistics, the affine part by the total, columns by their weights."""
    only_known(form)
    total, label = ZERO, "row value"
    for term in form.exps:
        total += _exp_sum(w, form, term)
        label = "entropy or expected value" if not term.b.is_zero else "normaliser"
    total += _affine_sum(w, form)
    for hot in form.hots:
        total += _columns_sum(w, form, hot)
    return total, label


def _affine_sum(w: Walk, form: Form) -> Poly:
    """sum_v (e + f x): by the statistics where e takes the maximum away again, else by a plain sum of the logits."""
    rows = form.e * w.vocabulary(form) if not form.e.is_zero else ZERO
    if form.f.is_zero:
        return rows
    if not form.e.is_zero:
        total = w.total(form)
        result = rows + total
        if len(result.terms) < len(rows.terms) + len(total.terms):
            return result
    dtype = w.dtype_of(form.source)
    plain = w.builder.call(aten.sum.dim_IntList, form.source, [form.vdim], True, dtype=dtype)
    return Poly.atom(plain) * form.f + rows


def _exp_sum(w: Walk, form: Form, term: Exp) -> Poly:
    """sum_v exp(y - c)(a + b y) = exp(max + log_sum - c) (a + b (mean + max))."""
    stats = w.stats(form, term.scale)
    w.softmax_roots.add(w.root_of[form.source])  # type: ignore[index]
    weighted = term.a + term.b * (stats.mean + stats.max)
    exponent = (stats.max - term.shift) + stats.log_sum
    if exponent.is_zero:
        return weighted
    assert form.source is not None
    dtype = w.dtype_of(form.source)
    mass = w.mass(exponent, form.source)
    if term.b.is_zero:
        return Poly.atom(mass) * term.a
    null = w.builder.call(aten.eq.Scalar, mass, 0)
    zero = w.builder.emit_node(ZERO, dtype, form.source)
    value_ = w.builder.emit_node(Poly.atom(mass) * weighted, dtype, form.source)
    return Poly.atom(w.builder.call(aten.where.self, null, zero, value_))


def _columns_sum(w: Walk, form: Form, hot: OneHot) -> Poly:
    index = w.index_node(hot.index)
    if same(shape_of(index)[form.vdim], 1):
        return hot.weight
    dtype = w.dtype_of(form.source)
    weights = w.builder.expand(
        w.builder.emit_node(hot.weight, dtype, index), w.builder.sizes(index)
    )
    return Poly.atom(w.builder.call(aten.sum.dim_IntList, weights, [form.vdim], True))


def _max_poly(w: Walk, form: Any, dims: Any) -> Poly:
    _only_forms(form)
    if _reduced_dims(form, dims) != [form.vdim]:
        raise Refused("a maximum over other dimensions than the vocabulary")
    if not form.is_affine or form.f.is_zero:
        raise Refused("a maximum of a value that is not linear in the logits")
    result: Poly = w.stats(form, form.f).max + form.e
    return result


def amax(w: Walk, node: Node, form: Any, dims: Any = (), keepdim: bool = False) -> Value:
    return w.row_result(node, _max_poly(w, form, dims), "maximum", form, keepdim)


def max_dim(w: Walk, node: Node, form: Any, dim: int, keepdim: bool = False) -> Value:
    """(values, indices): the indices are the source's own argmax, which a positive scale does not move."""
    poly = _max_poly(w, form, dim)
    items = {user.args[1]: user for user in node.users if user.users}
    result: list[Any] = [None, None]
    if 1 in items:
        result[1] = _argmax(w, form, keepdim)
        w.replacements[items[1]] = result[1]
    if 0 in items:
        result[0] = w.row_result(items[0], poly, "maximum", form, keepdim)
    return tuple(result)


def _argmax(w: Walk, form: Form, keepdim: bool) -> Node:
    factor = form.f.as_number()
    if not (form.is_affine and factor and factor > 0):
        raise Refused(
            "the place of a maximum of a value that is not a positive multiple of the logits"
        )
    return w.builder.call(aten.argmax.default, form.source, form.vdim, keepdim)


def argmax(w: Walk, node: Node, form: Any, dim: Any = None, keepdim: bool = False) -> Value:
    """The source's own argmax where the scale is a positive number; a reduction, nothing full-vocabulary is made."""
    _only_forms(form)
    if dim is None or dim % len(form.shape) != form.vdim:
        raise Refused("the place of a maximum over other dimensions than the vocabulary")
    made = _argmax(w, form, keepdim)
    w.replacements[node] = made
    return made


def getitem(w: Walk, node: Node, items: Any, at: int) -> Value:
    return items[at] if isinstance(items, tuple) else None


# -- columns ------------------------------------------------------------------------------------------


def bmm(w: Walk, node: Node, left: Any, right: Any) -> Value:
    """[N, 1, V] @ [N, V, 1]: a sum over the vocabulary; [N, V, 1] @ [N, 1, 1] and its mirror: times a row scalar."""
    _only_forms(left, right)
    if isinstance(left, Form) and isinstance(right, Form):
        if not (
            left.vdim == 2
            and right.vdim == 1
            and same(left.shape[1], 1)
            and same(right.shape[2], 1)
        ):
            raise Refused("a matrix product with full-vocabulary values")
        turned = permute_dims(w, right, (right.shape[0], 1, right.shape[1]), [0, 2, 1])
        poly, label = row_sum(w, normal(w, product(left, turned, w.column)))
        return w.row_result(node, poly, label, left, keepdim=True)
    form, other = (left, right) if isinstance(left, Form) else (right, left)
    rows = shape_of(other) if isinstance(other, Node) else ()
    if len(rows) != 3 or not (same(rows[1], 1) and same(rows[2], 1)):
        raise Refused("a matrix product with full-vocabulary values")
    return normal(w, scaled(form, w.operand(other, form)))


def _index(w: Walk, form: Form, index: Any) -> tuple[Node, ...]:
    if not isinstance(index, Node) or not isinstance(value(index), torch.Tensor):
        raise Refused("columns that are chosen by a full-vocabulary value")
    return (index,)


def gather(
    w: Walk, node: Node, form: Any, dim: int, index: Any, sparse_grad: bool = False
) -> Value:
    _only_forms(form)
    if dim % len(form.shape) != form.vdim or not isinstance(index, Node):
        raise Refused("a gather over another dimension than the vocabulary")
    form = _first_rows(w, form, w.builder.sizes(index))
    poly = w.column(form, _index(w, form, index))
    return _columns_result(w, node, poly, form, shape_of(node), w.builder.sizes(index))


def _covers_rows(form: Form, shape: Sequence[Any]) -> bool:
    """The index has the form's rows, and any number of columns."""
    return len(shape) == len(form.shape) and all(
        at == form.vdim or guarded_same(size, whole)
        for at, (size, whole) in enumerate(zip(shape, form.shape, strict=True))
    )


def _first_rows(w: Walk, form: Form, sizes: Sequence[Any]) -> Form:
    """The rows that an index names: all, or the first of a dimension."""
    if len(sizes) != len(form.shape):
        raise Refused("an index of another rank than the logits")
    for dim, size in enumerate(sizes):
        if dim != form.vdim and not guarded_same(size, form.shape[dim]):
            whole = list(form.shape)
            whole[dim] = value(size)
            form = slice_rows(w, form, whole, dim, 0, size, 1)
    return form


def _columns_result(
    w: Walk, node: Node, poly: Poly, form: Form, shape: Sequence[Any], sizes: Sequence[Any]
) -> Value:
    like = form.source if form.source is not None else node
    dtype = w.dtype_of(form.source)
    label = (
        "log-prob"
        if not form.e.is_zero
        else "target logit"
        if form.is_affine
        else "target probability"
    )
    made = w.builder.expand(w.builder.emit_node(poly, dtype, like), list(sizes))
    return w.replace(node, made, label, form)


def _row_and_column(w: Walk, form: Form, indices: Sequence[Any]) -> tuple[Form, Node]:
    """[iota, ..., index]: one column of the first rows; those rows, and the index with the form's rank."""
    lead = len(form.shape) - 1
    if (
        len(indices) != lead + 1
        or form.vdim != lead
        or any(not isinstance(i, Node) for i in indices)
    ):
        raise Refused("the logits are indexed by something else than row number and column")
    column = indices[-1]
    if len(shape_of(column)) != lead:
        raise Refused("the logits are indexed by something else than row number and column")
    for dim, rows in enumerate(indices[:-1]):
        shape = shape_of(rows)
        place = dim - lead + len(shape)
        along = [at for at, size in enumerate(shape) if not same(size, 1)]
        if (
            not is_iota(rows)
            or along not in ([place], [])
            or not guarded_same(shape[place], shape_of(column)[dim])
        ):
            raise Refused("the logits are indexed by something else than row number and column")
    wanted = [*w.builder.sizes(column), 1]
    column = w.builder.call(aten.unsqueeze.default, column, lead)
    return _first_rows(w, form, wanted), _from_the_end(w, form, column)


def _from_the_end(w: Walk, form: Form, column: Node) -> Node:
    """Indexing takes -1 for the last column; gather does not."""
    vocabulary: Any = form.shape[form.vdim]
    if not isinstance(vocabulary, int):
        vocabulary = w.known_size(vocabulary)
    call = w.builder.call
    counted = call(aten.add.Tensor, column, vocabulary)
    return call(aten.where.self, call(aten.lt.Scalar, column, 0), counted, column)


def index(w: Walk, node: Node, form: Any, indices: Sequence[Any]) -> Value:
    _only_forms(form)
    if not isinstance(form, Form):
        raise Refused("a value is indexed with full-vocabulary values")
    if sum(i is not None for i in indices) == 1:
        return roll(w, node, form, indices)
    form, column = _row_and_column(w, form, indices)
    poly = w.column(form, (column,))
    return _columns_made(w, node, poly, form, column)


def _columns_made(w: Walk, node: Node, poly: Poly, form: Form, column: Node) -> Value:
    like = form.source if form.source is not None else node
    dtype = w.dtype_of(form.source)
    found = w.builder.expand(w.builder.emit_node(poly, dtype, like), w.builder.sizes(column))
    label = "log-prob" if not form.e.is_zero else "target logit"
    return w.replace(node, w.builder.reshape(found, w.builder.sizes(column)[:-1]), label, form)


def scatter(w: Walk, node: Node, form: Any, dim: int, index: Any, source: Any) -> Value:
    """W with `source` at one column per row: W + [v == index] (source - W[index])."""
    return _scattered(w, node, form, dim, index, source, accumulate=False)


def scatter_add(w: Walk, node: Node, form: Any, dim: int, index: Any, source: Any) -> Value:
    """W + [v == index] * source; any number of columns per row."""
    return _scattered(w, node, form, dim, index, source, accumulate=True)


def _scattered(
    w: Walk, node: Node, form: Any, dim: int, index: Any, source: Any, accumulate: bool
) -> Value:
    if not isinstance(form, Form) or not isinstance(index, Node):
        raise Refused("a scatter of full-vocabulary values")
    dim %= len(form.shape)
    if form.is_row and not form.e.atoms():
        form = form.with_(vdim=dim)
    if dim != form.vdim or not _covers_rows(form, shape_of(index)):
        raise Refused("a scatter over another dimension than the vocabulary")
    one = same(shape_of(index)[dim], 1)
    if not (one or accumulate):
        raise Refused("several columns per row are overwritten")
    weight = _weight(w, form, source)
    if isinstance(source, Node) and value(source).ndim and not _covers_rows(form, shape_of(source)):
        raise Refused("a scatter of only some of the rows")
    return _with_column(w, form, index, weight, accumulate)


def _weight(w: Walk, form: Form, source: Any) -> Poly:
    """What is written at a column; a sum that the user has computed stays as it is rounded.

    The user's sum over the vocabulary is of the very same numbers, and where they cancel only equal ones do.
    """
    weight = w.builder.operand(source, len(form.shape))
    if weight is None:
        raise Refused("full-vocabulary values are written at columns")
    if len(weight.terms) > 1 and isinstance(source, Node):
        return Poly.atom(w.builder.aligned(source, len(form.shape)))
    return weight


def _with_column(w: Walk, form: Form, index: Node, weight: Poly, accumulate: bool) -> Form:
    if not accumulate:
        weight = weight - w.column(form, (index,))
    column = form.with_(exps=(), e=ZERO, f=ZERO, hots=(OneHot((index,), weight),))
    return add(form, column, w.builder.embedded)


def index_put(
    w: Walk, node: Node, form: Any, indices: Any, values: Any, accumulate: bool = False
) -> Value:
    """As scatter and scatter_add, for [iota, ..., index]."""
    if not isinstance(form, Form):
        raise Refused("a full-vocabulary value is written by index")
    if form.is_row and not form.e.atoms():
        form = form.with_(vdim=len(form.shape) - 1)
    picked, column = _row_and_column(w, form, indices)
    if isinstance(values, Node) and value(values).ndim:
        values = w.builder.call(aten.unsqueeze.default, values, len(shape_of(values)))
    weight = _weight(w, form, values)
    written = _with_column(w, picked, column, weight, accumulate)
    return _put_back(w, form, written)


def _put_back(w: Walk, form: Form, rows: Form) -> Form:
    """`form` with its first rows replaced by `rows`."""
    short = [dim for dim in range(form.vdim) if not same(rows.shape[dim], form.shape[dim])]
    if not short:
        return rows
    if len(short) > 1 or form.source is not None or not isinstance(rows.shape[short[0]], int):
        raise Refused("some of the rows are written by index")
    key = ("slice", short[0], 0, rows.shape[short[0]], 1)
    return write_rows(w, form, rows, key, form.shape, form.vdim)


# -- values that start full-vocabulary ----------------------------------------------------------------


def filled(w: Walk, node: Node, sizes: Any, fill: Any = 0, *_: Any, **__: Any) -> Value:
    """full, zeros: a constant in every element, of no logits yet."""
    shape = shape_of(node)
    found = w.builder.operand(fill, 0)
    if len(shape) < 1 or found is None:
        return None
    wide = [dim for dim, size in enumerate(shape) if w.is_vocabulary(size)]
    if not wide:
        return None
    return Form(shape, wide[-1], e=found)


def full_like(w: Walk, node: Node, like: Any, fill: Any = 0, *_: Any, **__: Any) -> Value:
    found = w.builder.operand(fill, 0)
    if not isinstance(like, Form) or found is None:
        raise Refused("a constant of another type")
    return Form(like.shape, like.vdim, e=found)


def zeros_like(w: Walk, node: Node, like: Any, *_: Any, **__: Any) -> Value:
    return full_like(w, node, like, 0)


def ones_like(w: Walk, node: Node, like: Any, *_: Any, **__: Any) -> Value:
    return full_like(w, node, like, 1)


def expand(w: Walk, node: Node, found: Any, sizes: Sequence[Any], **_: Any) -> Value:
    """A row scalar spread over the vocabulary; a form keeps its rows."""
    shape = shape_of(node)
    if isinstance(found, (Form, Mask)):
        form = found.form if isinstance(found, Mask) else found
        if len(shape) == len(form.shape) and all(map(same, shape, form.shape)):
            return found
        if not (isinstance(found, Form) and _is_constant(found)):
            raise Refused("the logits are repeated")
        # one number over as many rows as a vocabulary has, say, and now over the vocabulary
        wide = [dim for dim, size in enumerate(shape) if w.is_vocabulary(size)]
        return Form(shape, wide[-1] if wide else len(shape) - 1, e=found.e)
    if not isinstance(found, Node) or not is_float_tensor(node):
        return None
    was = (1,) * (len(shape) - len(shape_of(found))) + shape_of(found)
    grown = [
        dim for dim, (old, new) in enumerate(zip(was, shape, strict=True)) if not same(old, new)
    ]
    wide = [dim for dim in grown if w.is_vocabulary(shape[dim])]
    if not wide:
        return None
    vdim = len(shape) - 1 if len(shape) - 1 in wide else wide[-1]
    form = Form(shape, vdim)
    return form.with_(e=w.operand(found, form))


RULES: dict[Any, Callable[..., Value]] = {
    # the same value: this is how clones vanish
    aten.clone.default: same_value,
    aten.alias.default: same_value,
    aten.detach.default: same_value,
    aten.lift_fresh_copy.default: same_value,
    prims.convert_element_type.default: cast,
    aten._to_copy.default: cast,
    # linear: coefficient by coefficient
    aten.neg.default: neg,
    aten.add.Tensor: plus(1.0),
    aten.add.Scalar: plus(1.0),
    aten.sub.Tensor: plus(-1.0),
    aten.sub.Scalar: plus(-1.0),
    aten.rsub.Scalar: rsub,
    aten.rsub.Tensor: rsub,
    aten.mul.Tensor: mul,  # row scalar * W; exponential * affine; one-hot * W = one-hot * W[index]
    aten.mul.Scalar: mul,
    aten.div.Tensor: div,
    aten.div.Scalar: div,
    prims.fma.default: fma,
    aten.pow.Tensor_Scalar: power,
    # exp(f x + e) -> exponential term; log(exp(y - c) a) = y - c + log a
    aten.exp.default: exp,
    aten.log.default: log,
    # guards: the limit that they put is what the form has there
    aten.eq.Scalar: compare(_is_zero),
    aten.ne.Scalar: compare(lambda form, number: _not(_is_zero(form, number))),
    aten.gt.Scalar: compare(_above),
    aten.ge.Scalar: compare(_at_least),
    aten.eq.Tensor: equals,  # [v == index]
    aten.isnan.default: isnan,
    aten.logical_not.default: invert,
    aten.bitwise_not.default: invert,
    aten.where.self: where,
    aten.clamp_min.default: clamp_min,
    aten.clamp.default: clamp_min,
    # over the vocabulary: row statistics
    aten.amax.default: amax,  # max(e + f x) = e + max(f x)
    aten.max.dim: max_dim,
    aten.argmax.default: argmax,
    aten.sum.dim_IntList: sum_,  # sum_v exp(y - c)(a + b y) = exp(max + log_sum - c)(a + b (mean + max))
    aten.sum.default: sum_,
    aten.mean.dim: mean,
    aten.mean.default: mean,
    operator.getitem: getitem,
    aten.bmm.default: bmm,
    # one column per row
    aten.gather.default: gather,
    aten.index.Tensor: index,
    aten.scatter.value: scatter,
    aten.scatter.src: scatter,
    aten.scatter_add.default: scatter_add,
    aten.index_put.default: index_put,
    # constants and row scalars over the vocabulary
    aten.full.default: filled,
    aten.full_like.default: full_like,
    aten.zeros_like.default: zeros_like,
    aten.ones_like.default: ones_like,
    aten.expand.default: expand,
    **ROW_MAPS,
}
CREATORS.update({filled, expand, equals, getitem, log})
