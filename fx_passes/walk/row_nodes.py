"""Nodes that compute polynomials in row scalars, and zero in the rows that a row mask takes out.

Entry points: `RowNodes.emit` and `emit_node`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator

import torch
from torch.fx import Node

from fx_passes.algebra.poly import Monomial, Poly
from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import value
from fx_passes.graph.operators import VIEWS, under

aten = torch.ops.aten

_ROW_MOVES = VIEWS | {aten.cat.default, aten.index_select.default}


class RowNodes:
    """Emits row scalars, each polynomial in one way.

    Attributes:
        meanings: the polynomial that each node computes, as far as it was looked at.
        zero_outside: nodes that are zero outside the rows that they were written into; see `place`.
        peaks: nodes that are the logit of each row that is largest once it is scaled.
    """

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.meanings: dict[Node, Poly] = {}
        self.zero_outside: set[Node] = set()
        self.peaks: set[Node] = set()

    def is_peak(self, atom: Node) -> bool:
        """One of `peaks`, of some of the rows or in another shape maybe."""
        return under(atom, VIEWS) in self.peaks

    def place(self, node: Node) -> Node:
        """Remembers that `node` is exactly zero outside its rows: written into zeros, or a row mask."""
        self.zero_outside.add(node)
        return node

    def is_placed(self, poly: Poly) -> bool:
        """Whether a part of it is zero outside its rows."""
        return any(atom in self.zero_outside for atom in poly.atoms())

    def emit(self, poly: Poly, dtype: torch.dtype) -> Node | float:
        """The node that computes `poly` in `dtype`; a number if no row scalar is in it."""
        number = poly.as_number()
        if number is not None:
            return number
        total: Node | float | None = None
        for common, sign, part in self._beside_peaks(poly):
            term = self._part(common, part, dtype)
            if total is None:
                total = term if sign > 0 else self._negate(term)
            else:
                total = self._sum(total, term, sign > 0)
        assert isinstance(total, Node)
        self.meanings.setdefault(total, poly)
        return total

    def _beside_peaks(self, poly: Poly) -> Iterator[tuple[Monomial, float, Poly]]:
        """(factor, sign, terms) whose products add up to `poly`: peaks by one number per row are taken from each other
        before they are scaled, since they may be large, and the number infinite.
        """
        rests = Counter(map(self._without_peak, poly.terms))
        shared = [rest for rest, count in rests.items() if rest and count > 1]
        terms = dict(poly.terms)
        while terms:
            first = next(iter(terms))
            rest = next((rest for rest in shared if set(rest) <= set(first)), None)
            if rest is None:
                number = terms.pop(first)
                yield (), number, Poly({first: abs(number)})
            else:
                found = [monomial for monomial in terms if set(rest) <= set(monomial)]
                yield rest, 1.0, Poly({_without(each, rest): terms.pop(each) for each in found})

    def _without_peak(self, monomial: Monomial) -> Monomial:
        """What one peak is multiplied with; nothing where there is none."""
        rest = tuple(f for f in monomial if not (f[1] == 1 and self.is_peak(f[0])))
        return rest if len(rest) == len(monomial) - 1 else ()

    def _part(self, common: Monomial, part: Poly, dtype: torch.dtype) -> Node | float:
        if common:
            return self._monomial(common, self.emit(part, dtype), dtype)
        ((monomial, number),) = part.terms.items()
        return self._monomial(monomial, number, dtype)

    def emit_node(self, poly: Poly, dtype: torch.dtype, like: Node) -> Node:
        """As `emit`, numbers as tensors on `like`'s device."""
        result = self.emit(poly, dtype)
        if isinstance(result, Node) and isinstance(value(result), torch.Tensor):
            return result
        return self.emitter.full([], result, dtype, like)  # type: ignore[arg-type]

    def _negate(self, term: Node | float) -> Node | float:
        return self.emitter.call(aten.neg.default, term) if isinstance(term, Node) else -term

    def _sum(self, left: Node | float, right: Node | float, plus: bool) -> Node | float:
        call = self.emitter.call
        if isinstance(left, Node):
            return call(aten.add.Tensor if plus else aten.sub.Tensor, left, right)
        assert isinstance(right, Node)
        return call(aten.add.Tensor, right if plus else self._negate(right), left)

    def _monomial(
        self, monomial: Monomial, factor: Node | float, dtype: torch.dtype
    ) -> Node | float:
        above = [(atom, power) for atom, power in monomial if power > 0]
        below = [(atom, -power) for atom, power in monomial if power < 0]
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
        """`product`, of which `monomial` is a factor, and 0 in the rows that a row mask in it takes out."""
        for rows, power in monomial:
            if power > 0 and self._is_placed(rows):
                product = self._zero_where(rows, product)
        return product

    def _is_placed(self, atom: Node) -> bool:
        """In `zero_outside`, or rows of what is, in another order or shape."""
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
            return right if left == 1 else self.emitter.call(aten.mul.Tensor, right, left)
        if not isinstance(value(left), torch.Tensor):
            left, right = right, left
        return self.emitter.call(aten.mul.Tensor, left, right)

    def _over(self, left: Node | float, right: Node) -> Node:
        if isinstance(left, Node):
            return self.emitter.call(aten.div.Tensor, left, right)
        if not isinstance(value(right), torch.Tensor):  # a symbolic size
            return self.emitter.call(operator.truediv, left, right)
        inverse = self.emitter.call(aten.reciprocal.default, right)
        return inverse if left == 1 else self.emitter.call(aten.mul.Tensor, inverse, left)


def _without(monomial: Monomial, factor: Monomial) -> Monomial:
    return tuple(each for each in monomial if each not in factor)
