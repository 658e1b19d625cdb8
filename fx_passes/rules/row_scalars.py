"""Operators on row scalars: the polynomial of a node with one number per row.

None if a rule has no answer: the node is then an atom. `MAX_TERMS` keeps polynomials small; a larger sum is an atom,
too. So is a computation from tensors without logits in which nothing cancels: `r - q` spread over products would be the
difference of large numbers, and a product of float64 rows may overflow float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.fx import Node

from fx_passes.algebra.poly import Poly
from fx_passes.graph.facts import (
    is_backward,
    is_float_tensor,
    rank_of,
    same,
    same_shape,
    shape_of,
    value,
)
from fx_passes.graph.operators import CASTS, RESHAPES, VIEWS, under
from fx_passes.graph.slices import bounds
from fx_passes.walk.row_scalars import RowRule, RowScalars

aten = torch.ops.aten

MAX_TERMS = 8


def row_cast(rows: RowScalars, node: Node) -> Poly | None:
    """Rounded inputs stay rounded; functions of logits, and gradients, are not rounded in between."""
    first = node.args[0]
    if not isinstance(first, Node) or not is_float_tensor(first):
        return None
    poly = rows.meaning(first)
    return None if stays_rounded(node, poly, value(first).dtype) else poly


def stays_rounded(node: Node, poly: Poly, given: torch.dtype) -> bool:
    """Whether the cast `node` of `poly` rounds only inputs of the graph, in forward."""
    dtype = value(node).dtype
    rounds = dtype.is_floating_point and torch.promote_types(given, dtype) is not dtype
    inputs = [under(atom, VIEWS | CASTS) for atom in poly.atoms()]
    are_given = bool(inputs) and all(each.op == "placeholder" for each in inputs)
    return rounds and are_given and not is_backward(node)


def row_reshape(rows: RowScalars, node: Node) -> Poly | None:
    first = node.args[0]
    assert isinstance(first, Node)
    return rows.moved(first, lambda atom: rows.emitter.reshape(atom, rows.view_sizes(node)))


def row_select(rows: RowScalars, node: Node) -> Poly | None:
    """All there is in the dimension; one of several is a number of its own."""
    first, dim = node.args[:2]
    assert isinstance(first, Node)
    assert isinstance(dim, int)
    return row_reshape(rows, node) if same(shape_of(first)[dim], 1) else None


def row_cat(rows: RowScalars, node: Node) -> Poly | None:
    """All pieces of some numbers per row, in order, with one polynomial: that polynomial of the complete numbers."""
    given, *dim = node.args
    assert isinstance(given, (list, tuple))
    pieces = [each for each in given if isinstance(each, Node) and is_float_tensor(each)]
    if len(pieces) < len(given) or dim not in ([], [0]):
        return None
    reached, wholes = 0, set()
    for piece in pieces:
        poly = rows.meaning(piece)
        parts = {a: part for a in poly.atoms() if (part := _leading_part(piece, a)) is not None}
        ends = {(part.start, part.stop) for part in parts.values()}
        spread = any(rank_of(atom) and atom not in parts for atom in poly.atoms())
        if spread or [start for start, _ in ends] != [reached]:
            return None
        ((_, reached),) = ends
        wholes.add(_of_wholes(poly, parts))
    whole, *others = wholes
    if others or any(rank_of(a) and not same(shape_of(a)[0], reached) for a in whole.atoms()):
        return None
    sizes = rows.emitter.sizes(node)
    return whole.map_atoms(lambda a: rows.emitter.reshape(a, sizes) if rank_of(a) else a)


class _Part(NamedTuple):
    """Consecutive rows of a tensor along its first dimension."""

    of: Node
    start: int
    stop: int


def _of_wholes(poly: Poly, parts: Mapping[Node, _Part]) -> Poly:
    return poly.map_atoms(lambda atom: parts[atom].of if atom in parts else atom)


def _leading_part(piece: Node, atom: Node) -> _Part | None:
    """The source and the rows of which `atom` is a slice, possibly in another shape. None for any other atom, or one
    spread over the rows of `piece`.
    """
    part = under(atom, RESHAPES)
    if part.target not in (aten.select.int, aten.slice.Tensor):
        return None
    of, dim, *where = part.args
    assert isinstance(of, Node)
    alone = not rank_of(atom) and all(same(size, 1) for size in shape_of(piece))
    if dim != 0 or not (alone or same_shape(shape_of(atom), shape_of(piece))):
        return None
    if part.target is aten.select.int:
        start, stop = where[0], where[0] + 1 if isinstance(where[0], int) else None
    else:
        start, stop = bounds(shape_of(of)[0], *where[:2])  # type: ignore[arg-type]
    plain = isinstance(start, int) and isinstance(stop, int) and where[2:] in ([], [1])
    return _Part(of, start, stop) if plain else None  # type: ignore[arg-type]


def row_neg(rows: RowScalars, node: Node) -> Poly | None:
    first = node.args[0]
    assert isinstance(first, Node)
    return -rows.meaning(first)


def row_sum(sign: float) -> RowRule:
    def rule(rows: RowScalars, node: Node) -> Poly | None:
        left, right = _operands(rows, node)
        plain = node.kwargs.get("alpha", 1) == 1
        if not plain or left is None or right is None:
            return None
        total, terms = left + right * Poly.number(sign), len(left.terms) + len(right.terms)
        if terms > MAX_TERMS or (len(total.terms) == terms and _are_given(rows, left, right)):
            return None
        gone = {*left.atoms(), *right.atoms()}.difference(total.atoms())
        return None if any(map(rows.is_given, gone)) and not is_backward(node) else total

    return rule


def row_product(divided: bool) -> RowRule:
    def rule(rows: RowScalars, node: Node) -> Poly | None:
        left, right = _operands(rows, node)
        if left is None or right is None or len(node.args) != 2 or node.kwargs:
            return None
        if left.atoms() and right.atoms() and _are_given(rows, left, right):
            return None
        factor = right.inverse() if divided else right
        if factor is None or len(left.terms) * len(factor.terms) > MAX_TERMS:
            return None
        product = left * factor
        return product if _is_kept(rows, {*left.atoms(), *factor.atoms()}, product) else None

    return rule


def _are_given(rows: RowScalars, *polys: Poly) -> bool:
    atoms = [atom for poly in polys for atom in poly.atoms()]
    return bool(atoms) and all(map(rows.is_given, atoms))


def _is_kept(rows: RowScalars, atoms: set[Node], product: Poly) -> bool:
    """No number per row cancels that may be zero or infinite: r / r would be NaN."""
    gone = atoms.difference(product.atoms()) if not product.is_zero else ()
    return all(not is_float_tensor(atom) or rows.is_positive(Poly.atom(atom)) for atom in gone)


def row_log(rows: RowScalars, node: Node) -> Poly | None:
    first = node.args[0]
    return rows.exponent(first) if isinstance(first, Node) else None


def _operands(rows: RowScalars, node: Node) -> tuple[Poly | None, Poly | None]:
    rank = len(shape_of(node))
    left, right = (rows.operand(arg, rank, of_form=False) for arg in node.args[:2])
    return left, right
