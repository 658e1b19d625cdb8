"""Arithmetic, exp and log of full-vocabulary values."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from fx_passes.algebra.arithmetic import (
    add,
    is_infinite,
    only_everywhere,
    product,
    quotient,
    scaled,
)
from fx_passes.algebra.forms import Exp, Form, Mask
from fx_passes.algebra.poly import ONE, ZERO, Poly
from fx_passes.graph.facts import is_backward, is_float_tensor, same_shape, shape_of, value
from fx_passes.graph.operators import CASTS, VIEWS, under
from fx_passes.graph.order import ancestors
from fx_passes.refused import Refused
from fx_passes.rules.operands import form_beside, mask_form, pair
from fx_passes.rules.row_scalars import stays_rounded
from fx_passes.rules.two_numbers import compared_with, two_numbers
from fx_passes.walk.columns import column
from fx_passes.walk.context import Context, dtype_name
from fx_passes.walk.results import Instead, Operand, Result, as_form, as_number
from fx_passes.walk.statistics import dtype_of

aten = torch.ops.aten

SWALLOWS = 1e15
"""Added to a larger constant, logits would lose most digits even in float64."""

VANISHES = -1e3
"""The exponential of a number below is 0, in float64 too."""


def same_value(c: Context, node: Node, operand: Form | Mask, *_: object, **__: object) -> Result:
    return operand


def cast(c: Context, node: Node, operand: Operand, *_: object, **__: object) -> Result:
    if isinstance(operand, Mask):
        return mask_form(c, operand)
    if not is_float_tensor(node):
        numbers = two_numbers(node.args[0], operand) if value(node).dtype is torch.bool else None
        if numbers is None:
            raise Refused("a full-vocabulary value is cast to integers")
        return compared_with(c, node, numbers, 0.0)
    form = as_form(operand)
    narrow, linear = value(node).dtype, form.is_affine and not form.f.is_zero
    rounded = narrow.itemsize < dtype_of(form).itemsize
    if form.x is not None and linear and rounded and narrow is not value(form.x).dtype:
        # this value would be rounded, and statistics of the logits would not
        raise Refused(f"the logits are rounded to {dtype_name(node)}")
    if form.is_row and stays_rounded(node, form.e, dtype_of(form)):
        return form.with_(e=Poly.atom(c.emitter.cast(_emitted(c, form.e, form), narrow)))
    return form


def copy(c: Context, node: Node, into: Operand, written: Operand, *_: object) -> Result:
    """The written value, in the dtype of the overwritten one."""
    if not isinstance(written, (Form, Mask)):
        return None
    source = node.args[1]
    if not same_shape(shape_of(source), shape_of(node)):
        raise Refused("a value overwrites one of another shape")
    return written if value(source).dtype is value(node).dtype else cast(c, node, written)


def neg(c: Context, node: Node, operand: Operand) -> Result:
    return scaled(as_form(operand), Poly.number(-1.0))


# -- sums -----------------------------------------------------------------------------------------


def plus(sign: float) -> Callable[..., Result]:
    def rule(c: Context, node: Node, left: Operand, right: Operand, alpha: Operand = 1) -> Result:
        factor = as_number(alpha)
        if isinstance(left, Mask) or isinstance(right, Mask) or factor is None:
            raise Refused("a full-vocabulary mask is used in arithmetic")
        if not factor:
            raise Refused("alpha=0 drops a value, and its NaN and infinities with it")
        one, two = pair(c, node, *_with_unknown(left, right))
        one, two = _same_shifts(c, one, two)
        other = scaled(two, Poly.number(sign * factor))
        return _kept(c, node, add(one, other, c.rows.zero_outside), one, two, summed=True)

    return rule


# NOTE [Not a number stays]
# x - x is 0 for numbers and NaN for NaN and infinities. A NaN loss is how people learn of bad logits, so logits must
# not vanish from a value of forward: a softmax of the row, or the logits themselves, must remain in it. (For a number
# per row, such as a softmax's sum of 1, see `Context.emit_sum`.) In backward, terms may cancel for a while: they come
# back with the gradient of another use.
#
# The same holds for the program's own numbers per row: `r` in a softmax of `x + r`, `w` in `x * w / w`, a column
# subtracted from the logits. If one would vanish, the value is computed as in the program. It may then be logits
# itself, with rows near zero as in the program. A factor of zero removes the NaN and infinities of the other factor.


def _kept(c: Context, node: Node, result: Form, *operands: Form, summed: bool = False) -> Form:
    """`result` of a sum or a product, as long as neither the logits nor a number per row vanished from it."""
    if summed and any(form.is_row and form.e.exceeds(SWALLOWS) for form in operands):
        raise Refused("a constant is added, and the logits would be lost in it")
    if summed and any(map(_may_cancel, operands)):
        raise Refused("a sum of a fused and an unfused value meets a third, and may cancel first")
    if summed and value(node).dtype.itemsize < torch.float32.itemsize and _may_cancel(result):
        raise Refused("half precision rounds a fused and an unfused operand before adding them")
    if _loses_rows(c, result, operands, in_a_sum=summed and is_backward(node)):
        raise Refused("a number per row cancels there, and its NaN and infinities would be lost")
    if is_backward(node) or result.exps or all(form.is_row for form in operands):
        return result
    told = any(c.statistics.any_in(form.e) for form in operands)
    if result.is_row or (told and not c.statistics.any_in(result.e)):
        raise Refused("the logits cancel there, and their NaN and infinities would be lost")
    return result


def _may_cancel(form: Form) -> bool:
    """Whether a known value is added to an unknown one. Exception: a gradient from outside of the graph."""
    made = any(
        under(other, VIEWS | CASTS).op != "placeholder" or not is_backward(other)
        for other, _ in form.others
    )
    return made and not form.with_(others=()).is_zero


def _loses_rows(c: Context, result: Form, operands: Sequence[Form], in_a_sum: bool) -> bool:
    """Whether a number per row cancels; with `in_a_sum` (of backward), only scales and shifts of logits count."""
    if any(form.is_zero for form in (result, *operands)):
        return False
    read = Form.inner_atoms if in_a_sum else Form.atoms
    gone = {atom for form in operands for atom in read(form)} - result.atoms()
    return any(_is_programs_own(c, under(atom, VIEWS)) for atom in gone)


def _is_programs_own(c: Context, atom: Node) -> bool:
    """Given, and not to backward; or a column of the logits."""
    if atom.target is aten.gather.default:
        return True
    return c.rows.is_given(atom) and not is_backward(atom)


def rsub(c: Context, node: Node, left: Operand, right: Operand, alpha: Operand = 1) -> Result:
    result: Result = plus(-1.0)(c, node, right, left, alpha)
    return result


def _with_unknown(left: Operand, right: Operand) -> tuple[Operand, Operand]:
    """A gradient added to a value of unknown form (the gradient of another use of the logits) keeps it as a summand."""
    for gradient, other in ((left, right), (right, left)):
        if not isinstance(gradient, Form) or gradient.is_affine or gradient.x is None:
            continue
        if isinstance(other, Form) and other.is_identity and other.x is not gradient.x:
            other = other.x
        full = isinstance(other, Node) and is_float_tensor(other)
        if full and same_shape(gradient.shape, shape_of(other)):
            known = Form(gradient.shape, gradient.vdim, others=((other, ONE),))  # type: ignore[arg-type]
            return (left, known) if gradient is left else (known, right)
    return left, right


def _same_shifts(c: Context, one: Form, two: Form) -> tuple[Form, Form]:
    """exp(y - max) as exp(y - max - log_sum) exp(log_sum) if the other side has the latter: one exponential for both.

    The factor is at most V. Such a pair comes from a loss that sums its exponentials once alone and once in a buffer
    with other sums, as Megatron's does.
    """
    if one.x is not two.x or one.x is None:
        return one, two

    def grown(form: Form, towards: Form) -> Form:
        return form.with_(exps=tuple(_towards(c, form, term, towards) for term in form.exps))

    return grown(one, two), grown(two, one)


def _towards(c: Context, form: Form, term: Exp, towards: Form) -> Exp:
    for other in towards.exps:
        if other.scale != term.scale or other.shift == term.shift:
            continue
        log_sum = c.stats(form, term.scale).log_sum
        if other.shift - term.shift == log_sum:
            assert form.x is not None
            factor = Poly.atom(c.mass(ZERO, log_sum, form.x))
            return Exp(term.scale, other.shift, term.a * factor, term.b * factor, term.extent)
    return term


# -- products and quotients -------------------------------------------------------------------------


def times(c: Context, left: Form, right: Form) -> Form:
    """W1 * W2, softmaxes in one spelling."""
    return normal(c, product(left, right, lambda form, index: column(c, form, index)))


def mul(c: Context, node: Node, left: Operand, right: Operand) -> Result:
    for mask, other in ((left, right), (right, left)):
        if not isinstance(mask, Mask) or isinstance(other, (Form, Mask)):
            continue
        if c.operand(other, mask.form).is_zero:  # the gradient of a maximum that cancels
            return scaled(mask.form, ZERO)
    one, two = pair(c, node, left, right)
    if is_infinite(one) or is_infinite(two):
        raise Refused("a product with an infinite or NaN constant")
    result = times(c, one, two)
    if not is_backward(node) and not result.exps and any(hot.multiplied for hot in result.hots):
        return result.with_(e=result.e + _nothing(c, one) + _nothing(c, two))
    return _kept(c, node, result, one, two)


def _nothing(c: Context, factor: Form) -> Poly:
    """0 times NaN is NaN: a value times a column mask is NaN at all columns of a row with NaN.

    An exponential without a shift is 0 in a row of -inf only. A row with factors of zero is not looked at.
    """
    scale = factor.exps[0].scale if factor.exps else factor.f
    if scale.is_zero:
        return ZERO
    stats = c.stats(factor, scale)
    nothing = c.nothing(factor, stats)
    if factor.exps:
        assert factor.x is not None
        zero, term = c.rows.emit_node(ZERO, dtype_of(factor), factor.x), factor.exps[0]
        if not c.statistics.any_in(term.shift):
            nothing = c.emitter.where(c.is_empty(factor, stats), zero, nothing)
        nothing = c.where_any([term.a, term.b], nothing, zero)
        c.rows.tell(nothing, nothing=True)
    return Poly.atom(nothing)


def fma(c: Context, node: Node, left: Operand, right: Operand, addend: Operand) -> Result:
    if not isinstance(left, (Form, Mask)) and not isinstance(right, (Form, Mask)):
        form = as_form(addend)
        product_of_rows = c.operand(left, form) * c.operand(right, form)
        rows = Form(form.shape, form.vdim, e=product_of_rows)
        total = add(form, rows, c.rows.zero_outside)
        return _kept(c, node, total, form, rows, summed=True)
    one, two = pair(c, node, left, right)
    result = _kept(c, node, times(c, one, two), one, two)
    beside = form_beside(c, addend, result)
    total = add(result, beside, c.rows.zero_outside)
    return _kept(c, node, total, result, beside, summed=True)


def div(
    c: Context, node: Node, left: Operand, divisor: Operand, rounding_mode: Operand = None
) -> Result:
    if rounding_mode is not None or not isinstance(left, Form):
        raise Refused("a division that rounds, or by a full-vocabulary value")
    if isinstance(divisor, Form):
        form, divided = pair(c, node, left, divisor)
        return _kept(c, node, _over(c, form, divided), form, divided)
    by = c.operand(divisor, left)
    result = normal(c, scaled(left, _inverse(c, _limited(c, by, left), left)))
    return _kept(c, node, result, left, Form(left.shape, left.vdim, e=by))


def _limited(c: Context, by: Poly, form: Form) -> Poly:
    """A divisor of logits, limited to finite numbers: dividing infinite logits by infinity must not remove the row."""
    if form.x is None or not form.is_affine or form.is_row:
        return by
    if c.roots.root_of[form.x] not in ancestors(by.atoms()):
        return by
    dtype = dtype_of(form)
    largest = torch.finfo(dtype).max / 16  # its inverse is a normal number
    divisor = c.rows.emit_node(by, dtype, form.x)
    for limit, bound in ((aten.minimum.default, largest), (aten.maximum.default, -largest)):
        divisor = c.emitter.call(limit, divisor, c.emitter.full([], bound, dtype, divisor))
    return Poly.atom(divisor)


def power(c: Context, node: Node, operand: Operand, exponent: Operand) -> Result:
    form = as_form(operand)
    if exponent == 1:
        return form
    if exponent == 2:
        return product(form, form, lambda each, index: column(c, each, index))
    raise Refused(f"a power of {exponent} of a full-vocabulary value")


def _inverse(c: Context, poly: Poly, form: Form) -> Poly:
    inverse = poly.inverse()
    if poly.is_zero or poly.exceeds(sys.float_info.max):
        raise Refused("a division by zero, infinity or NaN")
    if inverse is None:
        inverse = Poly.atom(_emitted(c, poly, form)).inverse()
    assert inverse is not None
    return inverse


def _over(c: Context, form: Form, divisor: Form) -> Form:
    same = quotient(form, divisor)
    if same is None:
        return times(c, form, _reciprocal(c, divisor))
    _check_unmasked(c, divisor)
    return same


def _check_unmasked(c: Context, divisor: Form) -> None:
    """A divisor with a factor of zero in a row is zero there, whatever the exponential is."""
    if not c.rows.is_positive(divisor.exps[0].a):
        raise Refused("a division by a softmax that may be masked")


def _reciprocal(c: Context, form: Form) -> Form:
    """1 / W for a row scalar or one pure exponential: exp(-(y - c)) / a."""
    if form.is_row:
        return form.with_(e=_inverse(c, form.e, form))
    if not form.is_exp or len(form.exps) != 1 or not form.exps[0].b.is_zero:
        raise Refused("a division by a full-vocabulary value")
    _check_unmasked(c, form)
    (term,) = form.exps
    return form.with_(exps=(Exp(-term.scale, -term.shift, _inverse(c, term.a, form)),))


# -- exp and log --------------------------------------------------------------------------------------


def exp(c: Context, node: Node, operand: Operand) -> Result:
    form = as_form(operand)
    if form.is_row:
        return form.with_(e=_exp_of_row(c, form))
    if not form.is_affine:
        raise Refused("exp of a value that is not linear in the logits")
    if form.clamped and not _vanishes_at_lowest(c, form):
        only_everywhere(form)
    return form.with_(exps=(_exponential(c, form, ONE),), e=ZERO, f=ZERO, clamped=False)


def _vanishes_at_lowest(c: Context, form: Form) -> bool:
    """The exponential of a clamped value is 0 at logits of -inf, or NaN in a row of -inf only."""
    factor, shift = form.f.as_number(), form.e.as_number()
    if form.x is None or factor is None:
        return False
    lowest = factor * torch.finfo(value(form.x).dtype).min
    return lowest + max(shift or 0.0, 0.0) < VANISHES and (
        shift is not None or c.statistics.shifts(form)
    )


def _exp_of_row(c: Context, form: Form) -> Poly:
    like = form.x or next(iter(form.e.atoms()), None)
    if like is None:
        return Poly.number(math.exp(form.e.as_number() or 0.0))
    exponent = c.rows.emit_node(form.e, dtype_of(form), like)
    return Poly.atom(c.emitter.call(aten.exp.default, exponent))


def _exponential(c: Context, form: Form, a: Poly) -> Exp:
    """exp(f x + e), with factors `exp(-log s)` as `1 / s`: equal softmaxes are equal terms in any spelling."""
    shift = -form.e
    for monomial, number in form.e.terms.items():
        whole = float(number).is_integer() and abs(number) <= 4
        if whole and len(monomial) == 1 and monomial[0][1] == 1:
            inner = c.rows.log_argument(monomial[0][0])
            if inner is not None and c.rows.is_positive(Poly.atom(inner)):
                shift += Poly({monomial: number})
                a = a * Poly({((inner, int(number)),): 1.0})
    return Exp(form.f, shift, a)


def normal(c: Context, form: Form) -> Form:
    """Softmaxes in one spelling: a factor that is a sum of exponentials of the same logits moves into the shift.

    `exp(y - max) / sum` becomes `exp(y - max - log_sum)`, the same term as `exp(log_softmax)`.
    """
    return form.with_(exps=tuple(_normal_term(c, term) for term in form.exps))


def _normal_term(c: Context, term: Exp) -> Exp:
    shift, undo = term.shift, ONE
    for atom, power in _common_factors(term):
        exponent = c.rows.mass_exponent(atom)
        if exponent is None:
            continue
        step = 1 if power > 0 else -1
        for _ in range(abs(power)):
            moved = shift - exponent * Poly.number(step)
            if not _is_centered(moved, exponent):
                break
            shift, undo = moved, undo * Poly({((atom, -step),): 1.0})
    if undo is ONE:
        return term
    return Exp(term.scale, shift, term.a * undo, term.b * undo, term.extent)


def _is_centered(shift: Poly, exponent: Poly) -> bool:
    """The shift contains the exponent of a sum of exponentials once at most: exp(y - 2 log_sum) rounds more."""
    shares = [shift.terms.get(m, 0.0) / number for m, number in exponent.terms.items()]
    return all(0 <= share <= 1 for share in shares)


def _common_factors(term: Exp) -> list[tuple[Node, int]]:
    """Atoms in every monomial of a and b, with the same power."""
    monomials = [dict(monomial) for monomial in (*term.a.terms, *term.b.terms)]
    first = monomials[0] if monomials else {}
    return [
        (atom, power)
        for atom, power in first.items()
        if all(each.get(atom) == power for each in monomials)
    ]


def log(c: Context, node: Node, operand: Operand) -> Result:
    if isinstance(operand, Node):
        return _log_of_mass(c, node, operand)
    form = as_form(operand)
    if form.is_row and form.x is None and not form.e.is_zero:
        return form.with_(e=_log_of_row(c, form, form.e))
    numbers = two_numbers(node.args[0], form)
    if numbers is not None and min(numbers.elsewhere, numbers.there) > 0:
        return numbers.map(math.log)
    if not form.is_exp or len(form.exps) != 1 or not form.exps[0].b.is_zero:
        raise Refused("log of a value that is not one softmax")
    (term,) = form.exps
    number = term.a.as_number()
    if number is not None and not number > 0:
        raise Refused("log of a negative multiple of a softmax")
    if c.rows.is_placed(term.a):
        raise Refused("log of a masked softmax: -inf there for all logits")
    return form.with_(exps=(), f=term.scale, e=_log_of_row(c, form, term.a) - term.shift)


def _log_of_mass(c: Context, node: Node, mass: Node) -> Result:
    """log of a row's sum of exponentials is its exponent: not rounded by an exp and a log."""
    mass = c.emitter.represents.get(mass, mass)
    exponent = c.rows.mass_exponent(mass) if is_float_tensor(mass) else None
    if exponent is None:
        return None
    emitted = c.rows.emit_node(exponent, value(node).dtype, mass)
    if not same_shape(shape_of(emitted), shape_of(node)):
        return None
    return Instead(c.emitter.cast(emitted, value(node).dtype))


def _log_of_row(c: Context, form: Form, poly: Poly) -> Poly:
    number = poly.as_number()
    if number is not None:
        return Poly.number(math.log(number)) if number > 0 else Poly.number(math.nan)
    return c.rows.meaning(c.emitter.call(aten.log.default, _emitted(c, poly, form)))


def _emitted(c: Context, poly: Poly, form: Form) -> Node:
    """`poly` as a tensor on the current node's device, also if it is computed from sizes alone."""
    assert c.emitter.origin is not None
    return c.rows.emit_node(poly, dtype_of(form), c.emitter.origin)
