"""Masks over the vocabulary: comparisons guarding a limit, and selections by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.fx import Node

from fx_passes.algebra.arithmetic import add, is_infinite, only_everywhere, scaled
from fx_passes.algebra.forms import Exp, Form, Guard, Mask
from fx_passes.algebra.poly import Poly
from fx_passes.graph.facts import rank_of, same, same_shape, shape_of, value
from fx_passes.graph.operators import RESHAPES, SAME_VALUE, under
from fx_passes.graph.per_row import reduced_dims
from fx_passes.refused import Refused
from fx_passes.rules.indices import counting_axis, is_integer
from fx_passes.rules.operands import (
    form_beside,
    masked_column,
    masked_rows,
    nan_by_row,
    no_softmax,
    pair,
)
from fx_passes.rules.two_numbers import are_integers, compared_with, nowhere, two_numbers
from fx_passes.walk.columns import column, with_column
from fx_passes.walk.context import Context
from fx_passes.walk.results import Instead, Operand, Result, as_form, as_number
from fx_passes.walk.statistics import compute_dtype, dtype_of

aten = torch.ops.aten

_TRUE_OF_NAN = {aten.ne.Scalar}
"""Comparisons with the result True at NaN."""

_LIMITS = {Guard.NULL, Guard.MINUS_INF, Guard.LOWEST}
"""Guards that hold at zeros of an exponential."""

Seen = tuple[Guard, bool]
"""A guard, and whether the comparison is its negation."""


# -- comparisons --------------------------------------------------------------------------------------


def compare(guards: Callable[[Context, Node, Form, float], Seen | None]) -> Callable[..., Result]:
    def rule(c: Context, node: Node, operand: Operand, other: Operand) -> Result:
        number = as_number(other)
        if isinstance(other, Node):
            poly = c.rows.operand(other, 0)
            number = poly.as_number() if poly is not None else None
        exact = number == 0 or are_integers(node.args[0])
        numbers = two_numbers(node.args[0], operand) if exact else None
        if numbers is not None and number is not None:
            return compared_with(c, node, numbers, number)
        if isinstance(operand, Form) and operand.is_row and number is not None:
            return _compare_rows(c, node, operand)
        if isinstance(operand, Form) and number is not None:
            known = None if operand.clamped else guards(c, node, operand, number)
            if known is not None:
                return Mask(known[0], operand, known[1], at_nan=node.target in _TRUE_OF_NAN)
        raise Refused("a comparison over the vocabulary that is not a known guard")

    return rule


def _compare_rows(c: Context, node: Node, form: Form) -> Mask:
    """A comparison of a number per row, expanded over the vocabulary by the program: made before expanding."""
    rows = under(node.args[0], {aten.expand.default})  # type: ignore[arg-type]
    if isinstance(c.read(rows), (Form, Mask)):
        raise Refused("a comparison over the vocabulary that is not a known guard")
    c.operand(rows, form)
    return Mask(Guard.ROW, form, index=c.emitter.call(node.target, rows, node.args[1]))


def is_zero(c: Context, node: Node, form: Form, number: float) -> Seen | None:
    if form.is_exp and number == 0:
        return Guard.NULL, False
    return (Guard.MINUS_INF, False) if form.is_affine and number == -math.inf else None


def is_not_zero(c: Context, node: Node, form: Form, number: float) -> Seen | None:
    seen = is_zero(c, node, form, number)
    return None if seen is None else (seen[0], not seen[1])


def at_least(c: Context, node: Node, form: Form, number: float) -> Seen | None:
    """`x >= finfo.min` fails only for -inf (and NaN); `x >= -inf` fails for neither."""
    known = form.is_affine and -math.inf < number <= _lowest(node, form)
    return (Guard.MINUS_INF, True) if known else None


def above(c: Context, node: Node, form: Form, number: float) -> Seen | None:
    """`x > number` for a number of at most finfo.min; `p > 0` unless `p` may be negative."""
    if form.is_exp and number == 0:
        positive = all(term.b.is_zero and c.rows.is_positive(term.a) for term in form.exps)
        return (Guard.NULL, True) if positive else None
    lowest = _lowest(node, form)
    if not form.is_affine or number > lowest:
        return None
    return Guard.LOWEST if number == lowest else Guard.MINUS_INF, True


def at_most(c: Context, node: Node, form: Form, number: float) -> Seen | None:
    """`p <= 0` unless `p` may be negative."""
    seen = above(c, node, form, number) if form.is_exp else None
    return None if seen is None else (seen[0], not seen[1])


def _lowest(node: Node, form: Form) -> float:
    """The smallest finite number in the dtype of the compared value, or of the logits if that is narrower."""
    dtypes = [value(each).dtype for each in (node.args[0], form.x) if each is not None]
    return max(torch.finfo(d).min if d.is_floating_point else -math.inf for d in dtypes)


def isnan(c: Context, node: Node, operand: Operand) -> Result:
    if two_numbers(node.args[0], operand) is not None:
        return nowhere(as_form(operand))
    return Mask(Guard.NAN, as_form(operand))


def isinf(c: Context, node: Node, operand: Operand) -> Result:
    """Of log-probs: -inf, since in a row with +inf all of them are NaN."""
    form = as_form(operand)
    only_everywhere(form)
    if not _is_log_probs(c, form):
        raise Refused("isinf of a value other than log-probs")
    return Mask(Guard.MINUS_INF, form)


def _is_log_probs(c: Context, form: Form) -> bool:
    factor = form.f.as_number()
    if not form.is_affine or factor is None or factor <= 0 or not c.statistics.shifts(form):
        return False
    return form.e == -c.stats(form, form.f).logsumexp


def both(c: Context, node: Node, left: Operand, right: Operand) -> Result:
    """Two guards with the same meaning: torch's derivative of xlogy asks for `p == 0` and `p <= 0`."""
    if not isinstance(left, Mask) or not isinstance(right, Mask) or left.guard is Guard.ROW:
        return logical(c, node, left, right)
    if left != replace(right, at_nan=left.at_nan):
        raise Refused("a logical operator on two masks over the vocabulary")
    return replace(left, at_nan=left.at_nan and right.at_nan)


def logical(c: Context, node: Node, left: Operand, right: Operand) -> Result:
    """Of two row masks: the operator itself, before they are spread over the vocabulary."""
    mask = left if isinstance(left, Mask) else right
    if not isinstance(mask, Mask) or value(node).dtype is not torch.bool:
        raise Refused("a logical operator on a full-vocabulary value")
    one, two = (_row_mask(c, each, mask.form) for each in (left, right))
    return Mask(Guard.ROW, mask.form, index=c.emitter.call(node.target, one, two))


def _row_mask(c: Context, operand: Operand, form: Form) -> Node:
    if isinstance(operand, Mask) and operand.guard is Guard.ROW:
        if not same_shape(operand.form.shape, form.shape):
            raise Refused("a logical operator on two masks over the vocabulary")
        operand = masked_rows(c, operand)
    if not isinstance(operand, Node):
        raise Refused("a logical operator on a full-vocabulary value")
    c.operand(operand, form)
    return c.emitter.align(operand, len(form.shape))


def invert(c: Context, node: Node, operand: Operand) -> Result:
    if not isinstance(operand, Mask):
        raise Refused("a logical operator on a full-vocabulary value")
    return operand.invert()


def equals(c: Context, node: Node, left: Operand, right: Operand) -> Result:
    """eq of a column number 0..V-1 with one index per row: the row's column."""
    if isinstance(left, (Form, Mask)) or isinstance(right, (Form, Mask)):
        return _at_peak(c, node) or compare(is_zero)(c, node, left, right)
    shape = shape_of(node)
    if not (len(shape) >= 2 and c.is_vocabulary(shape[-1])):
        return None
    for columns, index in ((left, right), (right, left)):
        if not isinstance(columns, Node) or not isinstance(index, Node) or not rank_of(index):
            continue
        last = counting_axis(columns) == rank_of(columns) - 1
        if not last or not same(shape_of(columns)[-1], shape[-1]) or not is_integer(index):
            continue
        index = c.emitter.align(index, len(shape))
        if same(shape_of(index)[-1], 1):
            return Mask(Guard.COLUMN, Form(shape, len(shape) - 1), index=index)
    return None


def differs(c: Context, node: Node, left: Operand, right: Operand) -> Result:
    """ne of a column number with one index per row: all other columns."""
    if isinstance(left, (Form, Mask)) or isinstance(right, (Form, Mask)):
        raise Refused("a comparison over the vocabulary that is not a known guard")
    found = equals(c, node, left, right)
    return found.invert() if isinstance(found, Mask) else found


def _at_peak(c: Context, node: Node) -> Instead | None:
    """eq of a value with its own maximum, a derivative of amax.

    An unfused comparison uses the value's own maximum, because the statistics' maximum may be rounded differently.
    """
    for wide, peak in (node.args[:2], node.args[1::-1]):
        while isinstance(peak, Node) and (peak.target in SAME_VALUE or peak.target in RESHAPES):
            peak = peak.args[0]
        if not isinstance(peak, Node) or peak.target is not aten.amax.default:
            continue
        form = c.read(wide)
        whole = isinstance(wide, Node) and same_shape(shape_of(wide), shape_of(node))
        whole = whole and isinstance(form, Form) and reduced_dims(peak) == [form.vdim]
        if whole and isinstance(form, Form) and form.is_affine and form == c.read(peak.args[0]):
            maximum = c.emitter.call(aten.amax.default, wide, [form.vdim], True)
            mask = c.emitter.call(aten.eq.Tensor, wide, maximum)
            return Instead(mask, Mask(Guard.PEAK, form), keeps=(wide,))  # type: ignore[arg-type]
    return None


# -- choices ------------------------------------------------------------------------------------------


def where(c: Context, node: Node, condition: Operand, chosen: Operand, other: Operand) -> Result:
    if isinstance(condition, Form):
        raise Refused("a full-vocabulary value is used as a condition")
    if isinstance(condition, Mask):
        inside = node.args[1]
        if condition.negated:
            condition, chosen, other = condition.invert(), other, chosen
            inside = node.args[2]
        if condition.guard is Guard.NEVER:
            return form_beside(c, other, condition.form)
        condition, chosen = _chosen_within(c, condition, inside, chosen, other)
        if condition.guard is Guard.ROW:
            if not isinstance(chosen, (Form, Mask)) and not isinstance(other, (Form, Mask)):
                chosen = form_beside(c, chosen, condition.form)
            return _where_rows(c, node, condition.index, chosen, other)
        return _where_guard(c, node, condition, chosen, other)
    return _where_rows(c, node, condition, chosen, other)


def _chosen_within(
    c: Context, mask: Mask, place: object, inside: Operand, outside: Operand
) -> tuple[Mask, Operand]:
    """Simplifies a choice by the same guard inside `inside` (torch's entr: 0 where p == 0, else -inf).

    At a NaN of the compared value the inner choice may give an infinite value if `outside` is NaN there: no difference.
    """
    if not isinstance(place, Node) or place.target is not aten.where.self:
        return mask, inside
    within, taken, left = map(c.read, place.args)
    if isinstance(within, Mask) and within.negated:
        within, taken, left = within.invert(), left, taken
    if not isinstance(within, Mask) or within != replace(mask, at_nan=within.at_nan):
        return mask, inside
    if within.at_nan == mask.at_nan:
        return mask, taken
    infinite = is_infinite(form_beside(c, left, mask.form))
    if infinite and isinstance(outside, Form) and _is_nan_too(c, mask.form, outside):
        return replace(mask, at_nan=False), taken
    return mask, inside


def _where_guard(c: Context, node: Node, mask: Mask, inside: Operand, outside: Operand) -> Result:
    """A choice in two cases: the form already has the chosen value at the guarded elements, or the mask is a column."""
    shape = shape_of(node)
    if len(shape) != len(mask.form.shape) and mask.index is not None:
        vdim = mask.form.vdim + len(shape) - len(mask.form.shape)
        index = c.emitter.align(mask.index, len(shape))
        mask = replace(mask, form=mask.form.with_(shape=shape, vdim=vdim), index=index)
    if isinstance(inside, Form) or isinstance(outside, Form):
        left, right = pair(c, node, inside, outside)
    else:
        left, right = (form_beside(c, each, mask.form) for each in (inside, outside))
    if mask.guard is Guard.COLUMN:
        return _at_column(c, mask, left, right)
    constant = left.e.as_number() if left.is_row else None
    if mask.guard is Guard.NAN and (left == mask.form or _is_nan(constant)):
        if _is_nan_too(c, mask.form, right):
            return right
        return _nan_in_rows(c, mask.form, right)
    if mask.guard is Guard.NAN and constant == 0 and right == mask.form and nan_by_row(c, right):
        rows = c.emitter.call(aten.eq.Scalar, no_softmax(c, right), 0)
        return scaled(right, Poly.atom(c.rows.place(c.emitter.cast(rows, dtype_of(right)))))
    if mask.guard in _LIMITS and constant == 0 and right.is_exp:
        if right.x is mask.form.x and all(_vanishes(c, mask, term) for term in right.exps):
            return _beside_guarded_rows(c, mask, right)
        raise Refused(f"where {mask.guard.value}, another value is set to zero")
    softmax = _zero_softmax(c, mask)
    put = constant is not None and math.isfinite(constant) and right.x in (None, mask.form.x)
    # log-probs of -inf replaced by a number are a new value: a softmax of it is another one
    known = softmax is not None and right.beside in (None, softmax)
    if put and known and (mask.guard is Guard.NULL or right.f.is_zero):
        return right.with_(x=mask.form.x, beside=softmax)
    raise Refused(f"a mask chooses between two values: {mask.guard.value}")


def _is_nan_too(c: Context, guarded: Form, form: Form) -> bool:
    """`form` is NaN wherever `guarded` is: the same, or the same softmax times a factor that is zero in no row."""
    if form == guarded:
        return True
    if not (form.is_exp and guarded.is_exp) or len(form.exps) != 1 or len(guarded.exps) != 1:
        return False
    (mine,), (theirs,) = form.exps, guarded.exps
    same_softmax = (mine.scale, mine.shift) == (theirs.scale, theirs.shift)
    return same_softmax and bool(mine.a.as_number() or mine.b.as_number())


def _is_nan(number: float | None) -> bool:
    return number is not None and math.isnan(number)


def _nan_in_rows(c: Context, guarded: Form, form: Form) -> Form:
    """`form`, and NaN in the rows where the guarded softmax is NaN."""
    softmax = nan_by_row(c, guarded) and guarded.exps[0].b.is_zero
    if not softmax or not form.is_affine or form.x not in (None, guarded.x):
        raise Refused("NaN is written at the NaN of another value")
    return form.with_(x=guarded.x, e=form.e + Poly.atom(no_softmax(c, guarded)))


def _vanishes(c: Context, mask: Mask, term: Exp) -> bool:
    """The exponential is zero, or as good as zero, exactly where the mask holds."""
    form = mask.form
    if mask.guard is Guard.NULL:  # only of one softmax without zero weights
        (*others, guarded) = form.exps
        plain = not others and guarded.b.is_zero and c.rows.is_positive(guarded.a)
        return plain and (term.scale, term.shift) == (guarded.scale, guarded.shift)
    if (term.scale, term.shift) == (form.f, -form.e):
        return True  # exp of the compared value; finfo.min, too, has an exponential of 0
    if mask.guard is Guard.LOWEST:
        return False
    scale, factor = term.scale.as_number(), form.f.as_number()
    # with a factor of at most 1, nothing but -inf is -inf
    both = scale is not None and factor is not None and scale > 0 and 0 < factor <= 1
    return both and form.e.is_zero


def _zero_softmax(c: Context, mask: Mask) -> tuple[Poly, Poly] | None:
    """Scale and shift of the softmax that is zero at the mask."""
    form = mask.form
    if mask.guard is Guard.NULL and len(form.exps) == 1:
        (term,) = form.exps
        plain = term.b.is_zero and c.rows.is_positive(term.a)
        return (term.scale, term.shift) if plain else None
    known = mask.guard is Guard.MINUS_INF and _is_log_probs(c, form)
    return (form.f, -form.e) if known else None


def _beside_guarded_rows(c: Context, mask: Mask, form: Form) -> Form:
    """`form`, with zeros in rows completely covered by the mask; there a softmax is NaN.

    Masks of logits, and of exponentials without a shift, cover rows of -inf only. Normalised values are NaN in those
    rows; `p > 0` covers them and `p == 0` does not.
    """
    compared = -mask.form.exps[0].shift if mask.form.is_exp and mask.form.exps else mask.form.e
    normalised = c.statistics.any_in(compared)
    if not form.exps or (normalised and not mask.at_nan):
        return form
    assert form.x is not None
    stats, dtype = c.stats(form, form.exps[0].scale), dtype_of(form)
    if normalised:
        left = c.emitter.call(aten.eq.Scalar, c.nothing(form, stats), 0)
    else:
        left = c.emitter.call(aten.logical_not.default, c.is_empty(form, stats))
    return scaled(form, Poly.atom(c.rows.place(c.emitter.cast(left, dtype))))


def _at_column(c: Context, mask: Mask, inside: Form, outside: Form) -> Form:
    """outside + [v == index] * (inside - outside)."""
    if not outside.f.is_zero and outside.f != inside.f:
        raise Refused("a value linear in the logits is overwritten, and may be infinite there")
    if outside.x is None:  # a number: the element at the column still belongs to the logits
        outside = outside.with_(x=inside.x)
    at, hit = masked_column(c, mask)
    return with_column(c, outside, at, column(c, inside, (at,)), hit)


def _where_rows(
    c: Context, node: Node, condition: Operand, chosen: Operand, other: Operand
) -> Result:
    """A row mask chooses between two values: each coefficient times the mask or its complement."""
    left, right = pair(c, node, chosen, other)
    like = left if left.x is not None else right
    if not isinstance(condition, Node):
        raise Refused("a condition that is not a row mask")
    c.operand(condition, like)
    rows = c.emitter.align(condition, len(like.shape)) if rank_of(condition) else condition
    flags = rows, c.emitter.call(aten.logical_not.default, rows)
    dtype = compute_dtype(node) if like.x is None else dtype_of(like)
    yes, no = (Poly.atom(c.rows.place(c.emitter.cast(flag, dtype))) for flag in flags)
    return add(_masked(left, yes), _masked(right, no), c.rows.zero_outside)


def _masked(form: Form, rows: Poly) -> Form:
    if is_infinite(form):
        raise Refused("masked columns are filled with an infinite value")
    return scaled(form, rows)


def clamp_min(
    c: Context, node: Node, operand: Operand, low: Operand = None, high: Operand = None
) -> Result:
    """clamp(min=finfo.min): nothing but -inf is below in the dtype of the value."""
    number = as_number(low)
    if not isinstance(operand, Form) or high is not None or number is None:
        raise Refused("a clamp over the vocabulary from above, or to a value per row")
    factor = operand.f.as_number()
    if not at_least(c, node, operand, number) or factor is None or factor <= 0:
        raise Refused("a clamp over the vocabulary changes values")
    return operand.with_(clamped=True)
