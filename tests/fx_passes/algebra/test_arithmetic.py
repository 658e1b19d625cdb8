"""Arithmetic on forms: closed over the row normal form, and equal to arithmetic on what the forms mean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, Node

from fx_passes.algebra.arithmetic import add, common_logits, join, product, scaled
from fx_passes.algebra.forms import Exp, Extent, Form, OneHot
from fx_passes.algebra.poly import ONE, ZERO, Poly
from fx_passes.refused import Refused
from tests.support.dense import Values, dense, dense_poly

ROWS, VOCAB = 4, 5
BOUNDED = settings(max_examples=150, derandomize=True, database=None)

_graph = Graph()
X, R, Q, INDEX, J, TOP, BOTTOM = map(_graph.placeholder, ("x", "r", "q", "i", "j", "top", "bottom"))
Z = _graph.placeholder("z")


def values() -> Values:
    draw = torch.Generator().manual_seed(0)

    def rows() -> Tensor:
        return torch.rand(ROWS, 1, generator=draw, dtype=torch.float64) + 0.5

    def columns() -> Tensor:
        return torch.randint(VOCAB, (ROWS, 1), generator=draw)

    half = torch.tensor([[1.0], [1.0], [0.0], [0.0]], dtype=torch.float64)
    x = torch.randn(ROWS, VOCAB, generator=draw, dtype=torch.float64)
    given = {X: x, Z: x + 1, R: rows(), Q: rows(), INDEX: columns(), J: columns()}
    return Values({**given, TOP: half, BOTTOM: 1 - half}, torch.float64)


VALUES = values()


def column(form: Form, index: tuple[Node, ...]) -> Poly:
    """W at a column, as a row scalar with a number of its own."""
    (node,) = index
    taken = dense(form, VALUES)[0].gather(-1, VALUES[node])
    atom = _graph.placeholder("taken")
    VALUES._known[atom] = taken
    return Poly.atom(atom)


ROW = st.sampled_from([ZERO, ONE, Poly.number(-2.0), Poly.atom(R), Poly.atom(Q) * Poly.atom(R)])
SCALE = st.sampled_from([ONE, Poly.number(2.0), Poly.atom(R), Poly.atom(R) + Poly.atom(Q)])


EMPTY = Form((ROWS, VOCAB), 1)


@st.composite
def forms(draw: st.DrawFn) -> Form:
    """Sums of up to two exponentials, two columns and an affine part."""
    form = EMPTY.with_(e=draw(ROW))
    for _ in range(draw(st.integers(0, 2))):
        term = Exp(draw(SCALE), draw(ROW), draw(ROW), draw(ROW))
        form = add(form, EMPTY.with_(x=X, exps=(term,)))
    if draw(st.booleans()):
        form = add(form, EMPTY.with_(x=X, f=draw(ROW)))
    for _ in range(draw(st.integers(0, 2))):
        hot = OneHot((draw(st.sampled_from([INDEX, J])),), draw(ROW))
        form = add(form, EMPTY.with_(hots=(hot,)))
    return form


def close(form: Form, wanted: Tensor) -> None:
    found, _ = dense(form, VALUES)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def meaning(form: Form) -> Tensor:
    return dense(form, VALUES)[0]


@BOUNDED
@given(forms(), ROW)
def test_scaled(form: Form, factor: Poly) -> None:
    close(scaled(form, factor), meaning(form) * dense_poly(factor, VALUES)[0])


@BOUNDED
@given(forms(), forms())
def test_add(left: Form, right: Form) -> None:
    close(add(left, right), meaning(left) + meaning(right))


@BOUNDED
@given(forms())
def test_what_is_taken_away_is_gone(form: Form) -> None:
    assert add(form, scaled(form, Poly.number(-1.0))) == Form(form.shape, form.vdim, form.x)


@BOUNDED
@given(forms(), forms())
def test_product(left: Form, right: Form) -> None:
    try:
        found = product(left, right, column)
    except Refused:
        return
    close(found, meaning(left) * meaning(right))


def exponential(
    scale: Poly = ONE, shift: Poly = ZERO, a: Poly = ONE, extent: Extent | None = None
) -> Form:
    return EMPTY.with_(x=X, exps=(Exp(scale, shift, a, ZERO, extent),))


def test_equal_exponentials_are_one_term() -> None:
    total = add(exponential(a=Poly.atom(R)), exponential(a=Poly.atom(Q)))
    assert total.exps == (Exp(ONE, ZERO, Poly.atom(R) + Poly.atom(Q)),)


def test_exponentials_of_different_shifts_stay_apart() -> None:
    assert len(add(exponential(), exponential(shift=Poly.atom(R))).exps) == 2


def test_equal_columns_are_one_term() -> None:
    hot = EMPTY.with_(hots=(OneHot((INDEX,), Poly.atom(R)),))
    assert add(hot, hot).hots == (OneHot((INDEX,), Poly.number(2.0) * Poly.atom(R)),)
    assert add(hot, scaled(hot, Poly.number(-1.0))).hots == ()


# ---- terms that share no row


FIRST, LAST = Extent(0, ((0, 2),)), Extent(0, ((2, 4),))


def in_rows(rows: Node, extent: Extent, shift: Node) -> Form:
    """exp(x - shift) in some rows: what a piece that was written home means."""
    placed = Poly.atom(shift) * Poly.atom(rows)
    return exponential(shift=placed, a=Poly.atom(rows), extent=extent)


def test_terms_of_disjoint_rows_are_one_term() -> None:
    top, bottom = in_rows(TOP, FIRST, R), in_rows(BOTTOM, LAST, Q)
    total = add(top, bottom, zero_outside={TOP, BOTTOM})
    assert len(total.exps) == 1
    assert total.exps[0].extent == FIRST.union(LAST)
    close(total, meaning(top) + meaning(bottom))


def test_terms_of_rows_that_meet_stay_apart() -> None:
    left, right = in_rows(TOP, FIRST, R), in_rows(TOP, FIRST, Q)
    assert len(add(left, right, zero_outside={TOP}).exps) == 2


def test_a_shift_that_is_not_known_to_vanish_keeps_terms_apart() -> None:
    """Outside its rows it would be added to the other's."""
    top, bottom = exponential(shift=Poly.atom(R), extent=FIRST), exponential(extent=LAST)
    assert len(add(top, bottom, zero_outside={TOP, BOTTOM}).exps) == 2


def test_extents() -> None:
    assert FIRST.disjoint(LAST)
    assert not FIRST.disjoint(Extent(0, ((1, 3),)))
    assert not FIRST.disjoint(Extent(1, ((2, 4),))), "rows of another dimension"
    assert not FIRST.union(LAST).disjoint(Extent(0, ((3, 4),)))


# ---- what is refused


def test_logits_in_common() -> None:
    assert common_logits(Form((ROWS, VOCAB), 1, X), Form((ROWS, VOCAB), 1)) is X
    with pytest.raises(Refused, match="values over two different logits are combined"):
        common_logits(Form((ROWS, VOCAB), 1, X), Form((ROWS, VOCAB), 1, Z))


def test_vocabularies_in_one_dimension() -> None:
    with pytest.raises(Refused, match="keep the vocabulary in different dimensions"):
        join(Form((5, 5), 0), Form((5, 5), 1))


def test_a_weighted_softmax_has_one_factor_of_the_logits() -> None:
    """exp(y)(a + b y) (e + f x) has y squared."""
    weighted = Form((ROWS, VOCAB), 1, X, (Exp(ONE, ZERO, ONE, ONE),))
    affine = Form((ROWS, VOCAB), 1, X, f=ONE)
    with pytest.raises(Refused, match="a softmax times the square of the logits"):
        product(weighted, affine, column)


def test_a_scale_of_two_terms_has_no_inverse() -> None:
    """x = y / scale needs one."""
    two = exponential(scale=Poly.atom(R) + Poly.atom(Q))
    with pytest.raises(Refused, match="and the scale may be 0"):
        product(two, Form((ROWS, VOCAB), 1, X, f=ONE), column)


def test_others_take_part_in_sums_only() -> None:
    gradient = EMPTY.with_(others=((Z, ONE),))
    total = add(exponential(), scaled(gradient, Poly.atom(R)))
    assert total.others == ((Z, Poly.atom(R)),)
    close(total, meaning(exponential()) + VALUES[R] * VALUES[Z])
    with pytest.raises(Refused, match="it contains a value not computed from the logits"):
        product(total, exponential(), column)
