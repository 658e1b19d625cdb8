"""Full-vocabulary values in the algebra: a form over a root, or a mask guarding one.

    W = sum_j exp(y_j - shift_j) * (a_j + b_j * y_j)  +  e + f * x  +  sum_k weight_k * [v == index_k]

with `y_j = scale_j * x`.

Shapes are the value's own; every coefficient is broadcastable to that shape with size 1 at the vocabulary dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torch.fx import Node

from fx_passes.algebra.poly import ONE, ZERO, Poly
from fx_passes.graph.facts import Shape


@dataclass(frozen=True)
class Extent:
    """The rows in which a term may be non-zero: disjoint intervals of one leading dimension of the logits."""

    dim: int
    intervals: tuple[tuple[int, int], ...]

    def disjoint(self, other: Extent) -> bool:
        return self.dim == other.dim and all(
            stop <= first or last <= start
            for start, stop in self.intervals
            for first, last in other.intervals
        )

    def union(self, other: Extent) -> Extent:
        return Extent(self.dim, self.intervals + other.intervals)


@dataclass(frozen=True)
class Exp:
    """`exp(y - shift) * (a + b * y)` with `y = scale * x`."""

    scale: Poly
    shift: Poly
    a: Poly
    b: Poly = ZERO
    extent: Extent | None = None


@dataclass(frozen=True)
class OneHot:
    """`weight * [v == index]`; index is the sum of its nodes, any number of columns at the vocabulary dimension.

    `multiplied`: the product of a value of the logits and a column mask. Its other columns are 0, or NaN in a NaN row.
    `rounded`: a sum of several columns in half precision; the sum is rounded if two columns coincide.
    """

    index: tuple[Node, ...]
    weight: Poly
    extent: Extent | None = None
    multiplied: bool = False
    rounded: bool = False


@dataclass(frozen=True)
class Form:
    """A full-vocabulary value; `x` is the root, moved by row moves, or None for a value without a root.

    `others`: summands of unknown form, each with its row scalar (such as the gradient of another use of the logits).
    They take part in sums and scalings only. `clamped`: an affine value; at logits of -inf it is a multiple of some
    very low number instead of -inf. Only a factor of an exponential of the same logits may be clamped. `beside`: scale
    and shift of a softmax `p`. The form holds where `p` is neither zero nor NaN; elsewhere the value differs (`p / p`
    is NaN, `where(p > 0, log(p), 0)` is 0). Multiplying by `p` removes the restriction.
    """

    shape: Shape
    vdim: int
    x: Node | None = None
    exps: tuple[Exp, ...] = ()
    e: Poly = ZERO
    f: Poly = ZERO
    hots: tuple[OneHot, ...] = ()
    others: tuple[tuple[Node, Poly], ...] = ()
    clamped: bool = False
    beside: tuple[Poly, Poly] | None = None

    @property
    def is_everywhere(self) -> bool:
        """The form holds at every element."""
        return not self.clamped and self.beside is None

    @property
    def is_row(self) -> bool:
        """A row scalar spread over the vocabulary."""
        return self.is_affine and self.f.is_zero and self.beside is None

    @property
    def is_zero(self) -> bool:
        return self.is_row and self.e.is_zero

    @property
    def is_affine(self) -> bool:
        return not self.exps and not self.hots and not self.others

    @property
    def is_exp(self) -> bool:
        """Exponential terms only: zero at x = -inf."""
        plain = self.f.is_zero and self.e.is_zero and not self.others
        return bool(self.exps) and not self.hots and plain and self.beside is None

    @property
    def is_identity(self) -> bool:
        plain = self.e.is_zero and self.beside is None
        return self.is_affine and plain and self.f == ONE

    def inner_atoms(self) -> set[Node]:
        """The row scalars in scales and shifts of the logits."""
        polys = [poly for term in self.exps for poly in (term.scale, term.shift)]
        polys += [self.e, self.f] if self.is_affine and not self.is_row else []
        polys += self.beside or ()
        return {atom for poly in polys for atom in poly.atoms()}

    def atoms(self) -> set[Node]:
        """The row scalars in all coefficients."""
        polys = [self.e, self.f, *(hot.weight for hot in self.hots), *(w for _, w in self.others)]
        polys += [poly for term in self.exps for poly in (term.a, term.b)]
        return self.inner_atoms().union(atom for poly in polys for atom in poly.atoms())

    def with_(self, **changes: Any) -> Form:
        return replace(self, **changes)


class Guard(Enum):
    """The condition of a full-vocabulary mask."""

    NULL = "the probability is zero"
    MINUS_INF = "the value is -inf"
    LOWEST = "the value is -inf or the dtype's lowest number"
    NAN = "the value is NaN"
    COLUMN = "the column is the row's index"
    PEAK = "the value is the row's maximum"
    ROW = "a row mask"
    NEVER = "of no element"


@dataclass(frozen=True)
class Mask:
    """A boolean full-vocabulary value: `guard` (or its negation); `index` for COLUMN, the row mask for ROW.

    `at_nan`: the mask's value at a NaN of the compared value.
    """

    guard: Guard
    form: Form
    negated: bool = False
    index: Node | None = None
    at_nan: bool = False

    def invert(self) -> Mask:
        return replace(self, negated=not self.negated, at_nan=not self.at_nan)
