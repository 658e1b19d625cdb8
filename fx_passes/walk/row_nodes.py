"""Nodes for polynomials in row scalars; rows excluded by a row mask are zero.

Entry points: `RowNodes.emit` and `emit_node`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator

import torch
from torch.fx import Node

from fx_passes.algebra.poly import Monomial, Poly
from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import is_backward, value
from fx_passes.graph.operators import VIEWS, Target
from fx_passes.walk.known import Known

aten = torch.ops.aten

ROUNDING = 1e-12
"""Relative error of numbers that cancel."""

_OF_NUMBERS: dict[Target, Target] = {
    aten.add.Tensor: operator.add,
    aten.sub.Tensor: operator.sub,
    aten.mul.Tensor: operator.mul,
    aten.div.Tensor: operator.truediv,
    aten.neg.default: operator.neg,
}
_ROW_MOVES = VIEWS | {aten.cat.default, aten.index_select.default}


class RowNodes(Known):
    """Emits row scalars, each polynomial in one way.

    Attributes:
        meanings: the polynomial that each node computes, as far as it was looked at.
        zero_outside: nodes that are zero outside the rows that they were written into; see `place`.
    """

    def __init__(self, emitter: Emitter) -> None:
        super().__init__()
        self.emitter = emitter
        self.meanings: dict[Node, Poly] = {}
        self.zero_outside: set[Node] = set()

    def offsets(self, poly: Poly) -> dict[tuple[Node, Monomial], float]:
        """How often a number per row contains the offset of some logits: the logits, and the other factors of the
        level.
        """
        found: dict[tuple[Node, Monomial], float] = {}
        for monomial, number in poly.terms.items():
            levels = [factor for factor in monomial if self._is_level(*factor)]
            if len(levels) != 1:
                continue
            logits = self.fact(levels[0][0]).logits
            assert logits is not None
            key = logits, tuple(factor for factor in monomial if factor not in levels)
            found[key] = found.get(key, 0.0) + number
        return found

    def without_offset(self, factor: Poly, shift: Poly) -> bool:
        """Whether `factor x + shift` is as large as log-probs are: neither an offset nor a given number is in it."""
        offsets = {factors: -number for (_, factors), number in self.offsets(shift).items()}
        others = [monomial for monomial in shift.terms if not self.has_level(monomial)]
        own = all(m and all(self.fact(atom).level_free for atom, _ in m) for m in others)
        return own and offsets == factor.terms

    def has_level(self, monomial: Monomial) -> bool:
        """Whether one factor, and no other, is a level."""
        return sum(self._is_level(*factor) for factor in monomial) == 1

    def place(self, node: Node) -> Node:
        """Remembers that `node` is exactly zero outside its rows: written into zeros, or a row mask."""
        self.zero_outside.add(node)
        return node

    def is_placed(self, poly: Poly) -> bool:
        """Whether a part of it is zero outside its rows."""
        return any(atom in self.zero_outside for atom in poly.atoms())

    def placed_in(self, monomial: Monomial) -> set[Node]:
        """The factors that are zero outside their rows."""
        return {atom for atom, power in monomial if power > 0 and self._is_placed(atom)}

    def emit(self, poly: Poly, dtype: torch.dtype) -> Node | float:
        """The node that computes `poly` in `dtype`; a number if it contains no row scalar.

        Wider numbers are multiplied and added before they are rounded: one that is infinite in `dtype` may have a
        factor of 0.
        """
        number = poly.as_number()
        if number is not None:
            return number
        total: Node | float | None = None
        for term, plus in self._summands(poly, self._widest(poly, dtype)):
            if total is None:
                total = term if plus else self._negate(term)
            else:
                total = self._sum(total, term, plus)
        assert isinstance(total, Node)
        total = self._as_factor(total, dtype)
        self.meanings.setdefault(total, poly)
        return total

    def _widest(self, poly: Poly, dtype: torch.dtype) -> torch.dtype:
        fakes = (value(atom) for atom in poly.atoms())
        numbers = (fake.dtype for fake in fakes if isinstance(fake, torch.Tensor))
        return functools.reduce(torch.promote_types, numbers, dtype)

    def _summands(self, poly: Poly, dtype: torch.dtype) -> Iterator[tuple[Node | float, bool]]:
        """The terms and their signs: differences of large numbers first."""
        terms = dict(poly.terms)
        for rest, number, above, below in self._differences(terms):
            between = self._sum(self._as_factor(above, dtype), self._as_factor(below, dtype), False)
            assert isinstance(between, Node)
            yield self._monomial(rest, self._times(number, between), dtype), True
        for monomial, number in terms.items():
            yield self._monomial(monomial, abs(number), dtype), number > 0

    def _differences(
        self, terms: dict[Monomial, float]
    ) -> list[tuple[Monomial, float, Node, Node]]:
        """(rest, number, above, below) for each `number rest (above - below)`, which are removed from `terms`.

        At least one of above and below is a level. Common factors are taken out, because the difference of two products
        may have lost the digits of the difference. A term that would not vanish completely (`peak / 2 + t`) stays as in
        the program: there is no difference of the two.
        """
        left, pairs = dict(terms), []
        for mine in [monomial for monomial in terms if self.has_level(monomial)]:
            for theirs in self._by_likeness(left, mine):
                found = self._apart(mine, theirs)
                above, below = (mine, theirs) if left[mine] > 0 else (theirs, mine)
                number = min(left[above], -left[below])
                if found is None or number <= ROUNDING * abs(terms[mine]):
                    continue
                left[above] -= number
                left[below] += number
                rest, *atoms = found
                one, two = atoms if above is mine else reversed(atoms)
                pairs.append((above, below, (rest, number, one, two)))
        whole = {
            each for each, number in terms.items() if abs(left[each]) <= ROUNDING * abs(number)
        }
        taken = [pair for pair in pairs if whole.issuperset(pair[:2])]
        for above, below, (_, number, *_) in taken:
            for monomial, signed in ((above, number), (below, -number)):
                terms[monomial] -= signed
                if abs(terms[monomial]) <= ROUNDING * number:
                    del terms[monomial]
        return [difference for _, _, difference in taken]

    def _by_likeness(self, terms: dict[Monomial, float], mine: Monomial) -> list[Monomial]:
        """Levels first, then the terms whose numbers are closest to minus the number of `mine`."""
        number = terms[mine]
        return sorted(terms, key=lambda m: (not self.has_level(m), abs(terms[m] + number)))

    def _is_level(self, atom: Node, power: int) -> bool:
        return power == 1 and self.fact(atom).logits is not None

    def _apart(self, mine: Monomial, theirs: Monomial) -> tuple[Monomial, Node, Node] | None:
        """Common factors, and the one other number of each; None if the second is a level of other logits."""
        rest = tuple(factor for factor in mine if factor in theirs)
        apart = [factor for factor in (*mine, *theirs) if factor not in rest]
        if [power for _, power in apart] != [1, 1] or len(mine) != len(theirs):
            return None
        (one, _), (two, _) = apart
        logits = self.fact(one).logits
        if logits is None or self.fact(two).logits not in (None, logits):
            return None
        if self.fact(two).level_free:
            return None
        return None if rest and (self._is_placed(one) or self._is_placed(two)) else (rest, one, two)

    def emit_node(self, poly: Poly, dtype: torch.dtype, like: Node) -> Node:
        """As `emit`, numbers as tensors on `like`'s device."""
        result = self.emit(poly, dtype)
        if isinstance(result, Node) and isinstance(value(result), torch.Tensor):
            return result
        return self.emitter.full([], result, dtype, like)  # type: ignore[arg-type]

    def _negate(self, term: Node | float) -> Node | float:
        return self._call(aten.neg.default, term) if isinstance(term, Node) else -term

    def _sum(self, left: Node | float, right: Node | float, plus: bool) -> Node | float:
        if isinstance(left, Node):
            return self._call(aten.add.Tensor if plus else aten.sub.Tensor, left, right)
        assert isinstance(right, Node)
        return self._call(aten.add.Tensor, right if plus else self._negate(right), left)

    def _monomial(
        self, monomial: Monomial, factor: Node | float, dtype: torch.dtype
    ) -> Node | float:
        """A factor from backward comes first, as in autograd: if it is 0 the product is 0, also if the product of the
        others overflows.
        """
        incoming = sorted(monomial, key=lambda each: not is_backward(each[0]))
        above = [(atom, power) for atom, power in incoming if power > 0]
        below = [(atom, -power) for atom, power in incoming if power < 0]
        result = factor
        for atom, power in above:
            for _ in range(power):
                result = self._times(result, self._as_factor(atom, dtype))
        for atom, power in below:
            for _ in range(power):
                result = self._over(result, self._as_factor(atom, dtype))
        if isinstance(result, Node) and (len(monomial) > 1 or isinstance(factor, Node)):
            result = self.zero_where_placed(monomial, result)
        return result

    def zero_where_placed(self, monomial: Monomial, product: Node) -> Node:
        """`product`, a product with `monomial`, and 0 in the rows where one of its row masks is 0."""
        for rows in sorted(self.placed_in(monomial)):
            product = self._zero_where(rows, product)
        return product

    def _is_placed(self, atom: Node) -> bool:
        """In `zero_outside`, or rows of such a node, in another order or shape."""
        waiting, seen = [atom], {atom}
        while waiting:
            node = waiting.pop()
            if node in self.zero_outside:
                return True
            new = set(node.all_input_nodes) - seen if node.target in _ROW_MOVES else set()
            seen |= new
            waiting += new
        return False

    def _zero_where(self, rows: Node, product: Node) -> Node:
        """`product`, and 0 in the rows where its factor `rows` is 0, whatever the other factors are there."""
        outside = self.emitter.call(aten.eq.Scalar, rows, 0)
        zero = self.emitter.call(
            aten.scalar_tensor.default,
            0.0,
            dtype=value(product).dtype,
            device=value(product).device,
        )
        return self.emitter.where(outside, zero, product)

    def _as_factor(self, atom: Node, dtype: torch.dtype) -> Node:
        return self.emitter.cast(atom, dtype) if isinstance(value(atom), torch.Tensor) else atom

    def _times(self, left: Node | float, right: Node) -> Node:
        if not isinstance(left, Node):
            return right if left == 1 else self._call(aten.mul.Tensor, right, left)
        if not isinstance(value(left), torch.Tensor):
            left, right = right, left
        return self._call(aten.mul.Tensor, left, right)

    def _over(self, left: Node | float, right: Node) -> Node:
        if isinstance(left, Node) or not isinstance(value(right), torch.Tensor):
            return self._call(aten.div.Tensor, left, right)
        inverse = self._call(aten.reciprocal.default, right)
        return inverse if left == 1 else self._call(aten.mul.Tensor, inverse, left)

    def _call(self, target: Target, *args: Node | float) -> Node:
        """Symbolic numbers among themselves are Python's, float64: an operator would give a tensor of float32."""
        nodes = (arg for arg in args if isinstance(arg, Node))
        tensors = any(isinstance(value(node), torch.Tensor) for node in nodes)
        return self.emitter.call(target if tensors else _OF_NUMBERS[target], *args)
