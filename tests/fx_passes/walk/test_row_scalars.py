"""Numbers per row: what nodes mean as polynomials, and the nodes that are emitted for polynomials."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Node

from fx_passes.algebra.poly import ONE, ZERO, Poly
from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import BACKWARD, TAG
from fx_passes.rules import ROW_SCALARS
from fx_passes.walk.row_scalars import RowScalars
from tests.support.dense import Values, dense_poly
from tests.support.scratch import Draw, Scratch, make

aten = torch.ops.aten
prims = torch.ops.prims

ROWS = 3
BOUNDED = settings(max_examples=150, derandomize=True, database=None)


class Read:
    """A graph of row scalars, and what they are read as."""

    def __init__(self) -> None:
        self.s = Scratch(torch.float32)
        self.rows = RowScalars(Emitter(self.s.graph, self.s.fake_mode), ROW_SCALARS)

    def row(self, *shape: int, role: str = "rows") -> Node:
        """As if a statistic of logits: what is made of other rows alone stays as it is."""
        row = self.given(*shape, role=role)
        self.rows.of_logits.add(row)
        return row

    def given(self, *shape: int, role: str = "rows") -> Node:
        return self.s.input(role, shape or (ROWS, 1))

    def values(self, kind: str = "plain") -> Values:
        draw = Draw(kind, 3)
        given = {n: make(each, draw, torch.float64) for n, each in self.s.inputs.items()}
        return Values(given, torch.float64)


# ---- meaning


def test_a_number_that_is_added_and_taken_away_is_gone() -> None:
    """What is left of x - max + max is exact: nothing was rounded."""
    r = Read()
    a, b = r.row(), r.row()
    total = r.s.call(aten.sub.Tensor, r.s.call(aten.add.Tensor, a, b), b)
    assert r.rows.meaning(total) == Poly.atom(a)


def test_products_and_quotients_of_single_terms() -> None:
    r = Read()
    a, b = r.row(), r.row()
    again = r.s.call(aten.div.Tensor, r.s.call(aten.mul.Tensor, a, b), b)
    assert r.rows.meaning(again) == Poly.atom(again), "NaN where b is 0"
    e = r.s.call(aten.exp.default, b)
    assert r.rows.meaning(
        r.s.call(aten.div.Tensor, r.s.call(aten.mul.Tensor, a, e), e)
    ) == Poly.atom(a), "an exponential is not 0"
    whole = r.s.call(aten.add.Tensor, a, b)
    quotient = r.s.call(aten.div.Tensor, a, whole)
    assert r.rows.meaning(quotient) == Poly.atom(quotient), "1 / (a + b) is no polynomial"


def test_rows_that_no_logits_are_in_stay_as_they_are() -> None:
    """r - q spread over products would be the difference of large numbers."""
    r = Read()
    a, b, of_logits = r.given(), r.given(), r.row()
    for target in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor):
        made = r.s.call(target, a, b)
        assert r.rows.meaning(made) == Poly.atom(made)
        assert r.rows.meaning(r.s.call(target, of_logits, b)).atoms().keys() >= {b}  # type: ignore[attr-defined]
    moved = r.s.call(aten.unsqueeze.default, a, 2)
    assert len(r.rows.meaning(r.s.call(aten.sub.Tensor, moved, r.given(ROWS, 1, 1))).terms) == 1
    made = r.s.call(aten.sub.Tensor, a, a)
    assert r.rows.meaning(made) == Poly.atom(made), "NaN of a is NaN of the difference"
    taken_away = r.s.call(aten.sub.Tensor, a, a)
    taken_away.meta[TAG] = BACKWARD
    assert r.rows.meaning(taken_away) == ZERO, "a tangent that is taken away"


def test_a_rounding_is_looked_through_but_of_inputs_and_integers() -> None:
    r = Read()
    a, count = r.row(), r.s.input("hits", (ROWS, 1), torch.int64)
    narrow = r.s.call(prims.convert_element_type.default, a, torch.bfloat16)
    assert r.rows.meaning(narrow) == Poly.atom(narrow), "an input stays rounded"
    wide = r.s.call(prims.convert_element_type.default, narrow, torch.float32)
    assert r.rows.meaning(wide) == Poly.atom(narrow)
    computed = r.s.call(aten.exp.default, a)
    rounded = r.s.call(prims.convert_element_type.default, computed, torch.bfloat16)
    assert r.rows.meaning(rounded) == Poly.atom(computed)
    cast = r.s.call(prims.convert_element_type.default, count, torch.float32)
    assert r.rows.meaning(cast) == Poly.atom(cast)


def test_a_multiple_that_is_added_is_not_read() -> None:
    r = Read()
    total = r.s.call(aten.add.Tensor, r.row(), r.row(), alpha=2.0)
    assert r.rows.meaning(total) == Poly.atom(total)


def test_log_of_exp() -> None:
    r = Read()
    a = r.row()
    power = r.s.call(aten.exp.default, a)
    r.rows.of_logits.add(power)
    product = r.s.call(aten.mul.Tensor, power, power)
    assert r.rows.meaning(r.s.call(aten.log.default, product)) == Poly.number(2.0) * Poly.atom(a)


def test_log_of_anything_else_is_an_atom() -> None:
    r = Read()
    log = r.s.call(aten.log.default, r.row(role="positive"))
    assert r.rows.meaning(log) == Poly.atom(log)


def test_a_sum_of_many_terms_is_an_atom() -> None:
    """Polynomials stay small."""
    r = Read()
    total = r.row()
    for _ in range(12):
        total = r.s.call(aten.add.Tensor, total, r.row())
    assert 1 <= len(r.rows.meaning(total).terms) <= 8


def test_a_long_chain_is_read_without_recursion() -> None:
    r = Read()
    a = node = r.row()
    for _ in range(1500):
        node = r.s.call(aten.neg.default, node)
    assert r.rows.meaning(node) == Poly.atom(a)


def test_a_reshape_moves_every_atom() -> None:
    r = Read()
    total = r.s.call(aten.sub.Tensor, r.row(ROWS), r.row(ROWS))
    shown = r.s.call(aten.unsqueeze.default, total, 1)
    poly = r.rows.meaning(shown)
    assert len(poly.terms) == 2
    values = r.values()
    assert torch.equal(dense_poly(poly, values)[0], values[shown])


def test_atoms_that_are_spread_are_not_moved_apart() -> None:
    """[3] + [] reshaped: the number without rows cannot be reshaped to [3, 1]."""
    r = Read()
    total = r.s.call(aten.add.Tensor, r.row(ROWS), r.s.input("rows", (1,)))
    shown = r.s.call(aten.view.default, total, [ROWS, 1])
    values = r.values()
    assert torch.equal(dense_poly(r.rows.meaning(shown), values)[0].expand(ROWS, 1), values[shown])


# ---- operands


def test_operands() -> None:
    r = Read()
    a = r.row(ROWS)
    assert r.rows.operand(2, 0) == Poly.number(2.0)
    assert r.rows.operand(True, 0) is None
    assert r.rows.operand(None, 0) is None
    half = r.s.call(aten.full.default, [], 0.5, dtype=torch.float32, device="cpu")
    assert r.rows.operand(half, 2) == Poly.number(0.5)
    (atom,) = r.rows.operand(a, 2).atoms()  # type: ignore[union-attr]
    assert tuple(atom.meta["val"].shape) == (1, ROWS), "as torch broadcasts it"


def test_a_sum_of_exponentials_is_remembered() -> None:
    """So that dividing by it is taking its log away."""
    r = Read()
    height, log_sum = r.row(), r.row()
    mass = r.rows.mass(Poly.atom(height), Poly.atom(log_sum), torch.float32, height)
    assert r.rows.mass_exponent(mass) == Poly.atom(height) + Poly.atom(log_sum)
    assert r.rows.mass_exponent(height) is None
    assert r.rows.is_positive(Poly.atom(mass))
    assert not r.rows.is_positive(Poly.atom(height))
    assert not r.rows.is_positive(Poly.number(-1.0) * Poly.atom(mass))


# ---- nodes for polynomials


@BOUNDED
@given(st.data())
def test_emitted_is_what_the_polynomial_is(data: st.DataObject) -> None:
    r = Read()
    atoms = [r.row(), r.row(ROWS, 1), r.s.input("rows", ()), r.row(role="positive")]
    poly = ZERO
    for _ in range(data.draw(st.integers(0, 3))):
        term = Poly.number(data.draw(st.sampled_from([1.0, -1.0, 2.5, -0.5])))
        for _ in range(data.draw(st.integers(0, 3))):
            atom = data.draw(st.sampled_from(atoms))
            power = data.draw(st.sampled_from([1, 2])) if atom is not atoms[3] else -1
            term = term * Poly({((atom, power),): 1.0})
        poly = poly + term
    emitted = r.rows.emit_node(poly, torch.float32, atoms[0])
    values = r.values()
    wanted, _ = dense_poly(poly, values)
    torch.testing.assert_close(values[emitted], wanted, rtol=1e-12, atol=1e-12)


def test_zero_outside_its_rows_whatever_else_is_there() -> None:
    """Each of the factors that vanish outside their rows, the second as well as the first."""
    r = Read()
    first, second, garbage = (r.row() for _ in range(3))
    for atom in (first, second):
        r.rows.place(atom)
    poly = Poly.atom(first) * Poly.atom(second) * Poly.atom(garbage)
    emitted = r.rows.emit_node(poly, torch.float32, garbage)
    nan = torch.full((ROWS, 1), torch.nan, dtype=torch.float64)
    for flags in ([0.0, 1.0], [1.0, 0.0]):
        given = {n: torch.full_like(nan, f) for n, f in zip((first, second), flags, strict=True)}
        assert torch.equal(
            Values({**given, garbage: nan}, torch.float64)[emitted], torch.zeros_like(nan)
        )


@pytest.mark.parametrize("other", [0.0, 1e-60])
def test_a_wider_number_is_multiplied_before_it_is_rounded(other: float) -> None:
    """1e60 is infinite in float32."""
    r = Read()
    first, second = (r.s.input("rows", (ROWS, 1), torch.float64) for _ in range(2))
    emitted = r.rows.emit_node(Poly.atom(first) * Poly.atom(second), torch.float32, first)
    given = {
        n: torch.full((ROWS, 1), number, dtype=torch.float64)
        for n, number in ((first, 1e60), (second, other))
    }
    wanted = torch.full((ROWS, 1), 1e60 * other, dtype=torch.float32)
    assert torch.equal(Values(given, None)[emitted], wanted)


def test_numbers() -> None:
    r = Read()
    like = r.row()
    assert r.rows.emit(ZERO, torch.float32) == 0.0
    assert r.rows.emit(ONE, torch.float32) == 1.0
    emitted = r.rows.emit_node(ONE, torch.float64, like)
    assert emitted.meta["val"].dtype is torch.float64
