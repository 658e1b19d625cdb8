"""The user's sums of numbers per row with a cancelling offset: computed without the offset.

Entry point: `take_offsets_away`. `logsumexp - sum(p x)` is `log_sum - mean`, and `x[i] - logsumexp` is
`(x[i] - max) - log_sum`: as the program writes them, they have the roundings of numbers as large as the offset.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch.fx import Node

from fx_passes.algebra.poly import ZERO, Monomial, Poly
from fx_passes.graph.facts import is_float_tensor, same_shape, shape_of, value
from fx_passes.graph.operators import CASTS, RESHAPES, SHOWN, Target, is_collective, under
from fx_passes.graph.order import ancestors
from fx_passes.walk.context import Context
from fx_passes.walk.row_nodes import ROUNDING, Guarded
from fx_passes.walk.statistics import compute_dtype, is_mask
from fx_passes.walk.walk import Walk

aten = torch.ops.aten

_SIGNS: dict[Target, float] = {aten.add.Tensor: 1.0, aten.sub.Tensor: -1.0}

MAX_TERMS = 16
"""Of a sum of which each has been spelled out; longer ones stay."""


def take_offsets_away(walk: Walk, live: Container[Node]) -> None:
    """Finds what stands in for such sums among what is `live`."""
    graph, account, c = walk.graph, walk.account, walk.context
    nodes = list(graph.nodes)
    exchanging = any(map(is_collective, nodes))
    with graph.inserting_before(nodes[-1]):
        for node in nodes:
            if node in live and node.target in _SIGNS and node not in account.replacements:
                c.emitter.origin = node
                found = _without_offset(c, node)
                if found is None or (exchanging and _exchanges(c, node) - _exchanges(c, found)):
                    continue
                account.replacements[node] = c.emitter.represents[node] = found


def _without_offset(c: Context, node: Node) -> Node | None:
    """None where nothing cancels, or what is left would hide that a row is NaN."""
    operands = node.all_input_nodes
    if not all(is_float_tensor(arg) and arg in c.rows.of_logits for arg in operands):
        return None
    if len(operands) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    meanings = [c.rows.meaning(arg) for arg in operands]
    guards = [each for poly in meanings for each in _guards(c, poly)]
    spelled = (poly.spelled_out(lambda atom: _spelled_out(c, atom)) for poly in meanings)
    left, right = _alike(c, *spelled)
    total = left + right * Poly.number(_SIGNS[node.target])
    if not 2 <= max(len(left.terms), len(right.terms)) <= MAX_TERMS:
        return None
    logits = _cancelled(c, left, right, total)
    if logits is None or value(node).dtype.itemsize > compute_dtype(logits).itemsize:
        return None
    found = _unless_zero(c, total, guards, compute_dtype(logits), node)
    if not same_shape(shape_of(found), shape_of(node)):
        return None
    return c.emitter.cast(found, value(node).dtype)


def _exchanges(c: Context, node: Node) -> set[Node]:
    """The collectives that a number per row needs: ranks whose graphs are different go on with the same."""

    def inputs(node: Node) -> list[Node]:
        return [c.emitter.represents.get(arg, arg) for arg in node.all_input_nodes]

    return set(filter(is_collective, ancestors([node], inputs)))


def _guards(c: Context, poly: Poly) -> list[Monomial]:
    """What is 0 in rows in which the program does not look at what it is multiplied with."""
    found = {atom: _guarded(c, atom) for atom in poly.atoms()}
    each = (_as_in(c, atom, guarded.by) for atom, guarded in found.items() if guarded)
    return [monomial for by in each for monomial in by.terms]


def _guarded(c: Context, atom: Node) -> Guarded | None:
    """Where it is one product that may be 0."""
    found = c.rows.guarded.get(under(atom, RESHAPES))
    _, factors = (found and found.by.as_monomial()) or (0.0, ())
    return found if factors and all(power > 0 for _, power in factors) else None


def _unless_zero(
    c: Context, poly: Poly, guards: list[Monomial], dtype: torch.dtype, like: Node
) -> Node:
    """`poly` as a node; in the rows where one of `guards` is 0, without the multiples of it."""
    found = c.rows.emit_node(poly, dtype, like)
    for guard in guards:
        rest = {m: number for m, number in poly.terms.items() if not _is_multiple(m, guard)}
        without = c.rows.emit_node(Poly(rest), dtype, like)
        found = c.where_any([Poly({guard: 1.0})], found, without)
    return found


def _is_multiple(monomial: Monomial, of: Monomial) -> bool:
    powers = dict(monomial)
    return all(powers.get(atom, 0) >= power for atom, power in of)


def _spelled_out(c: Context, atom: Node) -> Poly:
    """`V max + total` for a sum of all logits, and the product for a guarded one."""
    guarded, summed = _guarded(c, atom), c.rows.sums.get(under(atom, RESHAPES))
    if guarded is not None:
        return _as_in(c, atom, guarded.poly)
    if summed is not None and c.statistics.has_any(summed):
        return _as_in(c, atom, c.total(summed))
    return Poly.atom(atom)


def _as_in(c: Context, atom: Node, poly: Poly) -> Poly:
    """`poly` of what `atom` shows in another shape, in that shape."""
    return c.rows.reshaped(poly, under(atom, RESHAPES), c.emitter.sizes(atom))


def _alike(c: Context, left: Poly, right: Poly) -> tuple[Poly, Poly]:
    """Both in the rows that a mask takes and in those that it leaves, where a level is in one of them in some rows."""
    masks = {mask for poly in (left, right) for mask in _masks_of_levels(c, poly)}
    if len(masks) != 1:
        return left, right
    (mask,) = masks
    return _by_rows(c, left, mask), _by_rows(c, right, mask)


def _masks_of_levels(c: Context, poly: Poly) -> set[Node]:
    return {
        atom
        for monomial in poly.terms
        if c.rows.has_level(monomial)
        for atom in c.rows.placed_in(monomial)
        if is_mask(atom)
    }


def _by_rows(c: Context, poly: Poly, mask: Node) -> Poly:
    """A level is that of the rows of `mask` and that of the others."""
    dtype = value(mask).dtype
    chosen = c.emitter.reshape(under(mask, CASTS | RESHAPES), c.emitter.sizes(mask))
    others = c.rows.place(c.emitter.cast(c.emitter.call(aten.logical_not.default, chosen), dtype))
    both, result = Poly.atom(mask) + Poly.atom(others), ZERO
    for monomial, number in poly.terms.items():
        term = Poly({monomial: number})
        whole = c.rows.has_level(monomial) and mask not in dict(monomial)
        result += term * both if whole else term
    return result


def _cancelled(c: Context, left: Poly, right: Poly, total: Poly) -> Node | None:
    """The logits, or the first of them, of which both have an offset and their sum has none.

    Of each, a difference of two levels has to be left, or what is NaN where a row is nothing but -inf. A given number
    that cancels has to be in a statistic that is left.
    """
    mine, theirs, kept = map(c.rows.offsets, (left, right, total))
    gone = [
        key
        for key, number in mine.items()
        if key in theirs and abs(kept.get(key, 0.0)) <= ROUNDING * abs(number)
    ]
    shown = {_shows_empty_rows_of(c, atom) for atom in total.atoms()}
    if not gone or any(key not in kept and key[0] not in shown for key in gone):
        return None
    left_out = {*left.atoms(), *right.atoms()}.difference(total.atoms())
    given = {under(atom, SHOWN) for atom in left_out if c.rows.is_given(atom)}
    scales = [c.statistics.scale_of(atom) for atom in total.atoms()]
    told = {under(atom, SHOWN) for scale in scales for atom in scale.atoms()}
    return gone[0][0] if given <= told else None


def _shows_empty_rows_of(c: Context, atom: Node) -> Node | None:
    over_all_ranks = c.shards.means.get(under(atom, SHOWN))
    return over_all_ranks or c.statistics.shows_empty_rows_of(atom)
