"""Coefficients of forms: Laurent polynomials in row scalars, with numbers in front.

A row scalar is a node with one number per row. Sums and products stay symbolic, so cancellation is exact: a maximum
subtracted by `x - max` and added again by `+ max` disappears here, without a rounding in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from torch.fx import Node

Monomial: TypeAlias = tuple[tuple[Node, int], ...]


def _product(left: Monomial, right: Monomial) -> Monomial:
    powers = dict(left)
    for atom, power in right:
        powers[atom] = powers.get(atom, 0) + power
    kept = [(atom, power) for atom, power in powers.items() if power]
    return tuple(sorted(kept, key=lambda factor: factor[0]))


@dataclass(frozen=True)
class Poly:
    """A sum of `number * monomial`, in the order of construction."""

    terms: dict[Monomial, float] = field(default_factory=dict)

    @staticmethod
    def number(value: float) -> Poly:
        return Poly({(): value} if value != 0 else {})

    @staticmethod
    def atom(node: Node) -> Poly:
        return Poly({((node, 1),): 1.0})

    @property
    def is_zero(self) -> bool:
        return not self.terms

    def exceeds(self, largest: float) -> bool:
        """Whether a number in it is beyond `largest` of either sign, or NaN."""
        return not all(abs(number) <= largest for number in self.terms.values())

    def as_number(self) -> float | None:
        """The value if no row scalar is in it."""
        if self.is_zero:
            return 0.0
        return self.terms[()] if set(self.terms) == {()} else None

    def as_monomial(self) -> tuple[float, Monomial] | None:
        if len(self.terms) != 1:
            return None
        ((monomial, number),) = self.terms.items()
        return number, monomial

    def as_share(self) -> tuple[float, Node] | None:
        """Number and row scalar if it is a multiple of one."""
        number, monomial = self.as_monomial() or (0.0, ())
        return (number, monomial[0][0]) if [power for _, power in monomial] == [1] else None

    def atoms(self) -> Iterable[Node]:
        return dict.fromkeys(atom for monomial in self.terms for atom, _ in monomial)

    def common(self) -> Monomial:
        """The largest monomial dividing every term."""
        first, *others = self.terms or [()]
        powers = [dict(monomial) for monomial in others]
        least = {atom: min([power, *(p.get(atom, 0) for p in powers)]) for atom, power in first}
        return tuple((atom, power) for atom, power in least.items() if power > 0)

    def __hash__(self) -> int:
        return hash(frozenset(self.terms.items()))

    def __add__(self, other: Poly) -> Poly:
        terms = dict(self.terms)
        for monomial, number in other.terms.items():
            terms[monomial] = terms.get(monomial, 0.0) + number
        return Poly({m: n for m, n in terms.items() if n != 0})

    def __neg__(self) -> Poly:
        return Poly({monomial: -number for monomial, number in self.terms.items()})

    def __sub__(self, other: Poly) -> Poly:
        return self + (-other)

    def __mul__(self, other: Poly) -> Poly:
        result = Poly()
        for left, x in self.terms.items():
            result += Poly({_product(left, right): x * y for right, y in other.terms.items()})
        return result

    def inverse(self) -> Poly | None:
        """`1 / self` if `self` has one term."""
        single = self.as_monomial()
        if single is None:
            return None
        number, monomial = single
        return Poly({tuple((atom, -power) for atom, power in monomial): 1.0 / number})

    def over(self, divisor: Poly) -> Poly | None:
        """`self / divisor`. None if the result still divides by a factor of `divisor`, which may be 0."""
        inverse = divisor.inverse()
        if inverse is None:
            return None
        result = self * inverse
        below = {atom for monomial in result.terms for atom, power in monomial if power < 0}
        above = {atom for monomial in divisor.terms for atom, power in monomial if power > 0}
        return None if below & above else result

    def map_atoms(self, change: Callable[[Node], Node]) -> Poly:
        """Every atom replaced; the monomials are put in order again."""
        result = Poly()
        for monomial, number in self.terms.items():
            changed: Monomial = ()
            for atom, power in monomial:
                changed = _product(changed, ((change(atom), power),))
            result += Poly({changed: number})
        return result

    def spelled_out(self, meaning: Callable[[Node], Poly]) -> Poly:
        """Every atom of power 1 replaced by its meaning."""
        result = Poly()
        for monomial, number in self.terms.items():
            term = Poly.number(number)
            for atom, power in monomial:
                term = term * (meaning(atom) if power == 1 else Poly({((atom, power),): 1.0}))
            result += term
        return result


ZERO = Poly()
ONE = Poly.number(1.0)
