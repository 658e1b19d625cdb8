"""Polynomials in row scalars: a commutative ring with exact cancellation, checked against numbers."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, Node

from fx_passes.algebra.poly import ONE, ZERO, Poly

_graph = Graph()
ATOMS: list[Node] = [_graph.placeholder(name) for name in "abc"]
BOUNDED = settings(max_examples=200, derandomize=True, database=None)
VALUES = dict(zip(ATOMS, (2.0, -3.0, 0.5), strict=True))


def at(poly: Poly) -> float:
    """The polynomial's value; its coefficients here are quarters, so that float64 is exact."""
    total = 0.0
    for monomial, number in poly.terms.items():
        for atom, power in monomial:
            number *= VALUES[atom] ** power
        total += number
    return total


NUMBERS = st.integers(-8, 8).map(lambda n: n / 4)


@st.composite
def polys(draw: st.DrawFn) -> Poly:
    total = ZERO
    for _ in range(draw(st.integers(0, 4))):
        term = Poly.number(draw(NUMBERS))
        for _ in range(draw(st.integers(0, 2))):
            term = term * Poly.atom(draw(st.sampled_from(ATOMS)))
        total = total + term
    return total


@BOUNDED
@given(polys(), polys(), polys())
def test_ring(p: Poly, q: Poly, r: Poly) -> None:
    assert at(p + q) == at(p) + at(q)
    assert at(p * q) == at(p) * at(q)
    assert p + q == q + p
    assert p * q == q * p
    assert (p + q) * r == p * r + q * r
    assert p - p == ZERO
    assert p + ZERO == p * ONE == p


@BOUNDED
@given(polys(), polys())
def test_what_cancels_leaves_nothing(p: Poly, q: Poly) -> None:
    assert (p + q - q).terms == p.terms
    assert all(number != 0 for number in (p * q).terms.values())
    assert hash(p + q) == hash(q + p)


def test_a_zero_has_no_terms() -> None:
    assert Poly.number(0.0).is_zero
    assert ZERO.as_number() == 0.0
    assert (Poly.atom(ATOMS[0]) * ZERO).is_zero


@BOUNDED
@given(polys())
def test_as_number_is_for_polynomials_without_atoms(p: Poly) -> None:
    assert (p.as_number() is None) == bool(list(p.atoms()))
    assert p.as_number() in (None, at(p))


@BOUNDED
@given(polys())
def test_inverse_of_a_single_term_only(p: Poly) -> None:
    inverse = p.inverse()
    assert (inverse is None) == (len(p.terms) != 1)
    if inverse is not None:
        assert at(p * inverse) == pytest.approx(1.0)
        assert set((p * inverse).terms) == {()}


def test_powers_of_an_atom_meet_in_one_monomial() -> None:
    a, b, _ = map(Poly.atom, ATOMS)
    assert a * b * a == b * a * a
    quotient = (a * a * b) * (a * b).inverse()  # type: ignore[operator]
    assert quotient == a


@BOUNDED
@given(polys())
def test_map_atoms_may_join_atoms(p: Poly) -> None:
    """Two row scalars that are one after a move: monomials are put in order and joined again."""
    first, second, _ = ATOMS
    joined = p.map_atoms(lambda atom: first if atom is second else atom)
    known = {**VALUES, second: VALUES[first]}
    expected = sum(
        number * _product(known[atom] ** power for atom, power in monomial)
        for monomial, number in p.terms.items()
    )
    assert at(joined) == pytest.approx(expected)
    assert second not in set(joined.atoms())


def _product(factors: Iterable[float]) -> float:
    total = 1.0
    for factor in factors:
        total *= factor
    return total


def test_order_of_terms_is_the_order_of_writing() -> None:
    """What was subtracted first is found first, which decides the center of an exponential."""
    a, b, _ = map(Poly.atom, ATOMS)
    assert list((b + a).terms) == [*b.terms, *a.terms]
