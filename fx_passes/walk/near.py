"""A value close to the logits, subtracted before scaling: a common offset then costs no digits.

Entry points: `near`, of an exponential; `affine_center`, `only_one_offset` and `is_centered`, of what is linear in the
logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fx_passes.algebra.forms import Form
from fx_passes.algebra.poly import ZERO, Monomial, Poly
from fx_passes.graph.facts import is_float_tensor
from fx_passes.graph.operators import CASTS, SHOWN, under
from fx_passes.refused import Refused
from fx_passes.walk.context import Context
from fx_passes.walk.row_nodes import ROUNDING
from fx_passes.walk.statistics import dtype_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Near:
    """A value close to `scale x`: `value` = `scale center`, subtracted as `scale (x - center)`."""

    center: Poly = ZERO
    value: Poly = ZERO


def affine_center(c: Context, form: Form) -> Near:
    """A value close to `f x`: the negative of the added constant."""
    return Near() if form.f.is_zero else near(c, form, form.f, -form.e)


def only_one_offset(c: Context, form: Form) -> None:
    """Refuses `f x + e` if more than one summand may cancel an offset of the logits.

    A single number per row from the user is subtracted before anything else (`near`). A constant is refused, because it
    is scaled with `e`; several numbers are, because `e` does not tell their order in the program. If the whole maximum
    is subtracted, no offset remains.
    """
    if form.f.is_zero or form.x is None or is_centered(c, form):
        return
    given = [monomial for monomial in form.e.terms if _is_programs_own(c, form, monomial)]
    constant = any(not any(c.rows.is_given(atom) for atom, _ in monomial) for monomial in given)
    if c.rows.is_placed(form.f):  # `near` does not find summands of some rows only
        given += [monomial for monomial in form.e.terms if _is_unknown_level(c, monomial)]
    levels = any(c.rows.fact(atom).logits is not None for atom in form.e.atoms())
    if constant or len(given) > 1 or (given and levels):
        raise Refused(
            "a constant, or a second number per row, is added to logits and may cancel their offset"
        )
    if any(c.rows.fact(atom).peak for atom in form.e.atoms()) and not c.rows.is_placed(form.f):
        raise Refused("a part of the maximum is subtracted from logits")


def is_centered(c: Context, form: Form) -> bool:
    """Whether `f x + e` takes the maximum away as often as the logits are in it; of all positive scales it is one."""
    assert form.x is not None
    root = c.roots.root_of[form.x]
    facts = {atom: c.rows.fact(atom) for atom in form.e.atoms()}
    peaks = [atom for atom, fact in facts.items() if fact.peak and fact.logits is root]
    if not peaks:
        return False
    whole = form.e + form.f * Poly.atom(peaks[0])
    rest = whole.map_atoms(lambda atom: peaks[0] if atom in peaks else atom)
    left = [abs(n) for monomial, n in rest.terms.items() if peaks[0] in dict(monomial)]
    return max(left, default=0.0) <= ROUNDING * max(map(abs, form.f.terms.values()))


def _is_programs_own(c: Context, form: Form, monomial: Monomial) -> bool:
    """A number computed without the logits; with a factor of zero in some rows, it may belong to these rows."""
    given = [atom for atom, _ in monomial if c.rows.is_given(atom)]
    others = {atom for atom, _ in monomial}.difference(given, c.rows.zero_outside)
    if any(is_float_tensor(under(atom, SHOWN | CASTS)) for atom in others):
        return False
    return bool(given) or not c.rows.is_placed(form.f)


def _is_unknown_level(c: Context, monomial: Monomial) -> bool:
    """A number computed from the logits in an unknown way: it may be as large as they are."""
    made = [atom for atom, _ in monomial if is_float_tensor(atom) and not c.rows.is_given(atom)]
    facts = [c.rows.fact(a) for a in made if under(a, SHOWN) not in c.rows.zero_outside]
    return any(fact.logits is None and not fact.level_free for fact in facts)


def _near_peak(c: Context, form: Form, scale: Poly, shift: Poly) -> Near | None:
    """The rows' peak, if the shift contains it times the scale.

    If rows are put together from pieces, each piece has its own peak, at its own rows.
    """
    stats = c.statistics.known(form, scale)
    parts = [Poly({monomial: factor}).over(scale) for monomial, factor in shift.terms.items()]
    wanted = [
        *([stats.peak] if stats else []),
        *(part for part in parts if part is not None and _is_peak(c, part)),
        *(Poly.atom(atom) for atom in shift.atoms() if c.rows.fact(atom).peak),
    ]
    found = [each for each in dict.fromkeys(wanted) if _has(shift, scale * each)]
    if not found:
        found = _shared_peak(c, form, scale, shift)
    if not found:
        return None
    together = all(map(c.rows.is_placed, found))
    center = sum(found[1:], found[0]) if together else found[0]
    return Near(center, scale * center)


def _shared_peak(c: Context, form: Form, scale: Poly, shift: Poly) -> list[Poly]:
    """The first peak of these logits that the shift contains, times a part of the scale or all of it.

    Peaks are equal for all positive scales. The rest of the shift is the distance of another value from the peak.
    """
    assert form.x is not None
    peaks, parts = [], ZERO
    for monomial, factor in shift.terms.items():
        mine = [atom for atom, power in monomial if power == 1 and c.rows.fact(atom).peak]
        if len(mine) == 1 and c.rows.fact(mine[0]).logits is c.roots.root_of[form.x]:
            peaks += mine
            parts += Poly({tuple(each for each in monomial if each[0] is not mine[0]): factor})
    away = any(scale.terms.get(part, 0.0) * number > 0 for part, number in parts.terms.items())
    return [Poly.atom(peaks[0])] if peaks and away and not c.rows.is_placed(scale) else []


def near(c: Context, form: Form, scale: Poly, shift: Poly) -> Near:
    """The rows' peak if it is subtracted, otherwise the first subtracted number."""
    found = _near_peak(c, form, scale, shift)
    if found is not None:
        return found
    for monomial, factor in shift.terms.items():
        share = (Poly({monomial: factor}).over(scale) or ZERO).as_share()
        if share is not None and share[0] == 1.0 and not c.rows.fact(share[1]).level_free:
            return Near(Poly.atom(share[1]), scale * Poly.atom(share[1]))
        if factor == 1.0 and monomial:
            return _beside(c, form, Poly({monomial: 1.0}), scale)
    return Near()


def _beside(c: Context, form: Form, part: Poly, scale: Poly) -> Near:
    """For a scale that is a power of two: `part / scale`, exactly. Otherwise the peak and its distance from `part`.

    `part` may be the maximum of all shards, for example.
    """
    number, stats = scale.as_number(), c.statistics.known(form, scale)
    if number is not None and math.frexp(abs(number))[0] == 0.5:
        return Near(part * Poly.number(1 / number), part)
    if stats is None or form.x is None:
        return Near()
    call, dtype, x = c.emitter.call, dtype_of(form), form.x
    peak = c.rows.emit_node(stats.peak, dtype, x)
    finite = call(aten.lt.Scalar, call(aten.abs.default, peak), math.inf)
    center = Poly.atom(c.emitter.where(finite, peak, c.rows.emit_node(ZERO, dtype, x)))
    distance = Poly.atom(c.rows.emit_node(center * scale, dtype, x)) - part
    return Near(center, part + Poly.atom(c.rows.emit_node(distance, dtype, x)))


def _has(whole: Poly, part: Poly) -> bool:
    return bool(part.terms) and part.terms.items() <= whole.terms.items()


def _is_peak(c: Context, poly: Poly) -> bool:
    """The peak of some of the rows, and 0 in the others."""
    single = poly.as_monomial()
    if single is None or single[0] != 1.0:
        return False
    atoms = [atom for atom, _ in single[1] if atom not in c.rows.zero_outside]
    return len(atoms) == 1 and c.rows.fact(atoms[0]).peak
