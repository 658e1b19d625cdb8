"""Arithmetic on forms. Each function is closed over the normal form of `forms.py` or raises `Refused`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from dataclasses import replace

from torch.fx import Node

from fx_passes.algebra.forms import Exp, Extent, Form, OneHot
from fx_passes.algebra.poly import ZERO, Poly
from fx_passes.refused import Refused

MAX_EXPONENTIALS = 6
MAX_COLUMNS = 16


TWO_LOGITS = "values over two different logits are combined"
"""The refusal's text. `walk.py` replaces it if the graph shows that the second logits are computed from the first."""


def only_known(*forms: Form) -> None:
    if any(form.others for form in forms):
        raise Refused("it contains a value not computed from the logits")


def only_everywhere(*forms: Form) -> None:
    if any(form.clamped for form in forms):
        raise Refused("a clamped value may be at its lowest number there instead of -inf")
    if any(form.beside is not None for form in forms):
        raise Refused("a value valid only where a softmax is non-zero is used elsewhere")


def is_infinite(form: Form) -> bool:
    """A constant value: infinity or NaN."""
    return form.is_row and form.e.exceeds(sys.float_info.max)


def common_logits(left: Form, right: Form) -> Node | None:
    if left.x is not None and right.x is not None and left.x is not right.x:
        raise Refused(TWO_LOGITS)
    return left.x if left.x is not None else right.x


def join(left: Form, right: Form) -> Form:
    """An empty form with the root, shape and vocabulary dimension shared by both operands."""
    if left.vdim != right.vdim:
        raise Refused("the operands keep the vocabulary in different dimensions")
    return Form(left.shape, left.vdim, common_logits(left, right))


def scaled(form: Form, factor: Poly) -> Form:
    """factor * W, coefficient by coefficient."""
    if factor.is_zero:
        nothing = form.with_(exps=(), e=ZERO, f=ZERO, hots=(), others=())
        return nothing.with_(clamped=False, beside=None)
    return form.with_(
        exps=tuple(Exp(t.scale, t.shift, t.a * factor, t.b * factor, t.extent) for t in form.exps),
        e=form.e * factor,
        f=form.f * factor,
        hots=tuple(replace(t, weight=t.weight * factor) for t in form.hots),
        others=tuple((node, weight * factor) for node, weight in form.others),
    )


def add(left: Form, right: Form, zero_outside: Container[Node] = ()) -> Form:
    """W1 + W2. Equal exponentials and equal columns are merged, also if they are non-zero in different rows."""
    base = join(left, right)
    for one, two in ((left, right), (right, left)):
        if one.clamped and not two.is_row:
            only_everywhere(one)
    beside = _beside(left, right)
    exps = list(left.exps)
    for term in right.exps:
        _merge_exp(exps, term, zero_outside)
    hots = list(left.hots)
    for hot in right.hots:
        _merge_hot(hots, hot, zero_outside)
    exps = [t for t in exps if not (t.a.is_zero and t.b.is_zero)]
    hots = [t for t in hots if not t.weight.is_zero]
    if len(exps) > MAX_EXPONENTIALS:
        raise Refused(
            f"more than {MAX_EXPONENTIALS} different softmaxes of the same logits are added"
        )
    if len(hots) > MAX_COLUMNS:
        raise Refused(
            f"more than {MAX_COLUMNS} different target columns of the same logits are added"
        )
    return base.with_(
        exps=tuple(exps),
        e=left.e + right.e,
        f=left.f + right.f,
        hots=tuple(hots),
        others=left.others + right.others,
        clamped=left.clamped or right.clamped,
        beside=beside,
    )


def _beside(left: Form, right: Form) -> tuple[Poly, Poly] | None:
    if left.beside is not None and right.beside is not None and left.beside != right.beside:
        only_everywhere(left, right)
    return right.beside if left.beside is None else left.beside


def _merge_exp(exps: list[Exp], term: Exp, zero_outside: Container[Node]) -> None:
    for at, other in enumerate(exps):
        if other.scale == term.scale and other.shift == term.shift:
            extent = other.extent.union(term.extent) if other.extent and term.extent else None
            exps[at] = Exp(term.scale, term.shift, other.a + term.a, other.b + term.b, extent)
            return
    for at, other in enumerate(exps):
        if other.extent and term.extent and other.extent.disjoint(term.extent):
            scale = _overlay(other.scale, term.scale, zero_outside)
            shift = _overlay(other.shift, term.shift, zero_outside)
            if scale is not None and shift is not None:
                extent = other.extent.union(term.extent)
                exps[at] = Exp(scale, shift, other.a + term.a, other.b + term.b, extent)
                return
    exps.append(term)


def _merge_hot(hots: list[OneHot], hot: OneHot, zero_outside: Container[Node]) -> None:
    for at, other in enumerate(hots):
        extent = other.extent.union(hot.extent) if other.extent and hot.extent else None
        if other.index == hot.index:
            hots[at] = _both(hot.index, other, hot, extent)
            return
        apart = extent and other.extent.disjoint(hot.extent)  # type: ignore[union-attr, arg-type]
        if apart and all(node in zero_outside for node in other.index + hot.index):
            hots[at] = _both(other.index + hot.index, other, hot, extent)
            return
    hots.append(hot)


def _both(index: tuple[Node, ...], one: OneHot, other: OneHot, extent: Extent | None) -> OneHot:
    return OneHot(
        index,
        one.weight + other.weight,
        extent,
        multiplied=one.multiplied or other.multiplied,
        rounded=one.rounded or other.rounded,
    )


def _overlay(left: Poly, right: Poly, zero_outside: Container[Node]) -> Poly | None:
    """One polynomial for two with disjoint rows: parts of one side only must be zero on the other side's rows."""
    result = Poly()
    for monomial in dict.fromkeys([*left.terms, *right.terms]):
        x, y = left.terms.get(monomial), right.terms.get(monomial)
        if x is not None and y is not None and x != y:
            return None
        if (x is None or y is None) and not any(
            atom in zero_outside and power > 0 for atom, power in monomial
        ):
            return None
        number = x if x is not None else y
        assert number is not None
        result += Poly({monomial: number})
    return result


def product(left: Form, right: Form, column: Callable[[Form, tuple[Node, ...]], Poly]) -> Form:
    """W1 * W2. One side is a row scalar, or one side is exponentials and the other affine or one-hot."""
    base = join(left, right)
    if right.is_row and right.x is None:
        return scaled(left, right.e)
    if left.is_row and left.x is None:
        return scaled(right, left.e)
    only_known(left, right)
    _check_clamped(left, right)
    beside = _beside(left, right)
    if beside is not None and (_is_made_of(left, beside) or _is_made_of(right, beside)):
        beside = None
    if (
        left.exps and right.exps
    ):  # the product's exponent may overflow although neither factor's does
        raise Refused("a product of two softmaxes")
    exps = _times_exps(left, right) + _times_exps(right, left)
    hots = _times_columns(left, right, column)
    hots += _times_columns(right, left.with_(hots=()), column)
    if not left.f.is_zero and not right.f.is_zero:
        raise Refused("a square of the logits")
    result = base.with_(
        e=left.e * right.e,
        f=left.e * right.f + left.f * right.e,
        beside=beside,
    )
    terms = base.with_(exps=exps, hots=tuple(hots))
    return add(result, terms)


def _is_made_of(form: Form, softmax: tuple[Poly, Poly]) -> bool:
    """A sum of multiples of that softmax only: zero wherever the softmax is zero."""
    return form.is_exp and all((term.scale, term.shift) == softmax for term in form.exps)


def quotient(form: Form, divisor: Form) -> Form | None:
    """W1 / W2 of one softmax: exp(y - c)(a + b y) / (exp(y - c) d) = (a + b y) / d. Where the softmax is 0 it is NaN.

    None if W1 or W2 is another value, or `d` has no inverse.
    """
    base = join(form, divisor)
    if not divisor.is_exp or len(divisor.exps) != 1:
        return None
    (term,) = divisor.exps
    softmax, by = (term.scale, term.shift), term.a.inverse()
    if by is None or not term.b.is_zero or not _is_made_of(form, softmax):
        return None
    a = sum((each.a for each in form.exps), ZERO) * by
    b = sum((each.b for each in form.exps), ZERO) * by
    return base.with_(e=a, f=b * term.scale, beside=softmax)


def _times_columns(
    form: Form, factor: Form, column: Callable[[Form, tuple[Node, ...]], Poly]
) -> list[OneHot]:
    if factor.exps and any(hot.rounded for hot in form.hots):
        raise Refused("a softmax times a sum of one-hot columns, rounded if two columns coincide")
    multiplied = factor.x is not None
    return [
        replace(t, weight=t.weight * column(factor, t.index), multiplied=t.multiplied or multiplied)
        for t in form.hots
    ]


def _check_clamped(left: Form, right: Form) -> None:
    """A clamped value may be multiplied only by exponentials: they are zero wherever the value was clamped."""
    for one, other in ((left, right), (right, left)):
        vanish = other.is_exp and all(map(_vanishes, other.exps))
        if one.clamped and not vanish:
            only_everywhere(one)


def _vanishes(term: Exp) -> bool:
    """The exponential is zero at logits of -inf: the clamped elements."""
    scale = term.scale.as_number()
    return scale is not None and scale > 0


def _times_exps(exp_side: Form, affine_side: Form) -> tuple[Exp, ...]:
    """exp(y - c)(a + b y) * (e + f x). As x = y / scale, b must be 0 unless f is."""
    result = []
    for term in exp_side.exps:
        a, b = term.a * affine_side.e, term.b * affine_side.e
        if not affine_side.f.is_zero:
            factor = affine_side.f.over(term.scale)
            if not term.b.is_zero:
                raise Refused("a softmax times the square of the logits")
            if factor is None:
                raise Refused(
                    "the logits are multiplied by their softmax of another scale, and the scale may be 0"
                )
            b = b + term.a * factor
        if not (a.is_zero and b.is_zero):
            result.append(Exp(term.scale, term.shift, a, b, term.extent))
    return tuple(result)
