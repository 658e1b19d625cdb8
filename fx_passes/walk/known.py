"""Facts about numbers per row, in addition to their polynomials.

Entry points: `Known.tell`, `Known.fact`. A fact also holds for views of the node: some of the rows, another shape.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.fx import Node

from fx_passes.algebra.poly import Poly
from fx_passes.graph.operators import SHOWN, Target, under


class Guarded(NamedTuple):
    """The node is `poly` where its factor `by` is not 0, and 0 elsewhere, whatever the other factors are."""

    poly: Poly
    by: Poly


@dataclass(frozen=True)
class RowFact:
    """Facts about one node.

    Attributes:
        logits: the logits whose common offset it grows with.
        level_free: it is computed from logits and does not depend on their common offset.
        peak: it is each row's largest logit after scaling.
        nothing: it is 0 or NaN.
        guarded: it is a product in which a factor of 0 removes NaN and infinities of the others.
        exponent: it is a row's sum of exponentials, and the exponential of this polynomial.
    """

    logits: Node | None = None
    level_free: bool = False
    peak: bool = False
    nothing: bool = False
    guarded: Guarded | None = None
    exponent: Poly | None = None


class Known:
    """One walk's facts."""

    def __init__(self) -> None:
        self._facts: dict[Node, RowFact] = {}

    def tell(self, node: Node, **known: Any) -> None:
        """Adds facts about `node`, by the names of `RowFact`."""
        self._facts[under(node, SHOWN)] = replace(self.fact(node), **known)

    def fact(self, node: Node, through: Container[Target] = SHOWN) -> RowFact:
        """The facts about `node`, or about the node below these operators."""
        return self._facts.get(under(node, through), _NONE)


_NONE = RowFact()
