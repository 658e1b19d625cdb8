"""Refuses to remove a column from a softmax or from the logits: the difference would lose precision to cancellation.

Entry point: `only_with_its_columns`, for every form from a rule.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from fx_passes.algebra.forms import Form, OneHot
from fx_passes.algebra.poly import ZERO, Monomial, Poly
from fx_passes.graph.facts import same, shape_of, value
from fx_passes.refused import Refused
from fx_passes.walk.columns import column
from fx_passes.walk.context import Context

_LEAST = 0.1
"""Least remaining share of an element at a column; below it, the element's rounding matters."""


def only_with_its_columns(c: Context, form: Form) -> None:
    """Refuses one-hot terms that may remove their columns from exponentials or from logits.

    The difference would have the rounding of the removed element, and the remaining ones may be far smaller: `1 - p` of
    a probability near one is not the sum of the others, nor is the sum of all log-probs minus the target's, possibly a
    million times theirs. Two columns may coincide. No part of a logit may be removed: -inf would become NaN.
    """
    hots = [hot for hot in form.hots if _may_have_a_column(c, hot.weight)]
    for kind, part in _wide_parts(form) if hots else ():
        taken = [share for hot in hots if (share := _share_taken(c, part, hot))]
        together = sum(share for share in taken if share > 0) if len(taken) > 1 else 0.0
        infinite = not part.f.is_zero and any(share > 0 for share in taken)
        near = together > 1 - _LEAST or any(_apart_from_all(share) < _LEAST for share in taken)
        if infinite or near:
            raise Refused(
                f"a column may be removed from the {kind}, and computing the rest would cancel"
            )


def _wide_parts(form: Form) -> Iterator[tuple[str, Form]]:
    """The parts of a form in every column: exponentials, and the part linear in the logits."""
    if form.exps:
        yield "softmaxes", Form(form.shape, form.vdim, form.x, form.exps)
    if not form.f.is_zero:
        yield "logits", Form(form.shape, form.vdim, form.x, e=form.e, f=form.f)


def _may_have_a_column(c: Context, weight: Poly) -> bool:
    """False for a weight computed from no logits: computing an element to find that out takes long."""
    return not all(map(c.is_free_of_logits, weight.atoms()))


def _share_taken(c: Context, part: Form, hot: OneHot) -> float:
    """The share of `part`'s element removed by a one-hot term; 1 if a number per row may make it so.

    Columns of a row may coincide. Rows told apart by masks have separate elements.
    """
    there = _known(c, column(c, part, hot.index))
    factors = {each for atom in part.atoms() for each in _meant_by(c, atom).atoms()}
    own, masks = set(there.atoms()) - factors, c.rows.zero_outside.intersection(there.atoms())
    weight = _by_element(_without(c.rows.zero_outside - masks, _known(c, hot.weight)), own | masks)
    found, elements = 0.0, _by_element(there, own | masks)
    for element, whole in elements.items():
        if own.isdisjoint(dict(element)):
            continue
        less = weight.get(element, ZERO)
        if not less.terms.keys() <= whole.terms.keys():
            return 1.0
        shares = [
            -less.terms.get(monomial, 0.0) / number for monomial, number in whole.terms.items()
        ]
        found = min(found, max(shares, key=_apart_from_all), key=_apart_from_all)
    everywhere = {_masked_out(element, masks) for element in elements}
    elsewhere = (each for each in weight if each not in elements and not own.isdisjoint(dict(each)))
    if any(_masked_out(each, masks) in everywhere for each in elsewhere):
        return 1.0
    repeats = not all(same(shape_of(node)[part.vdim], 1) for node in hot.index)
    return 1.0 if repeats and found > 0 else found


def _apart_from_all(share: float) -> float:
    return abs(1 - share)


def _by_element(poly: Poly, own: set[Node]) -> dict[Monomial, Poly]:
    """The factors of each product of the element's own numbers; comparing sizes in them adds a guard."""
    found: dict[Monomial, Poly] = {}
    for monomial, number in poly.terms.items():
        element, rest = [], []
        for atom, power in monomial:
            size = value(atom)
            symbolic = isinstance(size, (torch.SymInt, torch.SymFloat)) and size.node.has_hint()
            if atom in own:
                element.append((atom, power))
            elif symbolic:
                number *= size**power if power > 0 else 1 / size**-power
            else:
                rest.append((atom, power))
        key = tuple(element)
        found[key] = found.get(key, ZERO) + Poly({tuple(rest): number})
    return found


def _meant(c: Context, poly: Poly) -> Poly:
    """With each factor replaced by its meaning, such as `p - 1` for a written value."""
    return poly.spelled_out(lambda atom: _meant_by(c, atom))


def _meant_by(c: Context, atom: Node) -> Poly:
    guarded = c.rows.fact(atom, ()).guarded
    inner = c.rows.meaning(atom) if guarded is None else guarded.poly
    return inner if inner == Poly.atom(atom) else _meant(c, inner)


def _known(c: Context, poly: Poly) -> Poly:
    """Its meaning, assuming that no row is NaN."""
    terms = _meant(c, poly).terms.items()
    return Poly({m: n for m, n in terms if not any(c.rows.fact(a, ()).nothing for a, _ in m)})


def _without(masks: set[Node], poly: Poly) -> Poly:
    """In the rows outside of the masks."""
    result = ZERO
    for monomial, number in poly.terms.items():
        result += Poly({_masked_out(monomial, masks): number})
    return result


def _masked_out(monomial: Monomial, masks: set[Node]) -> Monomial:
    return tuple(each for each in monomial if each[0] not in masks)
