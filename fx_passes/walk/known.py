"""What is known of a number per row, beside the polynomial that it is.

Entry points: `Known.tell`, `Known.fact`. A fact also holds of what shows the node: some of the rows,
another shape.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.fx import Node

from fx_passes.algebra.poly import Poly
from fx_passes.graph.operators import SHOWN, Target, under


class Guarded(NamedTuple):
    """What a node computes where its factor `by` is not 0; 0 elsewhere, whatever the other factors are."""

    poly: Poly
    by: Poly


class Weighted(NamedTuple):
    """A row's sum of exponentials times a number; 0 where the sum is, whatever the number is."""

    mass: Node
    number: Poly


@dataclass(frozen=True)
class RowFact:
    """One node.

    Attributes:
        logits: it grows with a common offset of these.
        level_free: it is made of logits, and an offset of theirs does not change it.
        peak: the logit of each row that is largest once it is scaled.
        nothing: 0, or NaN.
        guarded: a product of which a factor may be 0, and takes out what it is multiplied with.
        exponent: it is a row's sum of exponentials, and `exp` of that.
        weighted: it is one.
        group: it is the same on all ranks of that.
        own: it is the sum of all ranks' sums of exponentials, of which this is the own one.
    """

    logits: Node | None = None
    level_free: bool = False
    peak: bool = False
    nothing: bool = False
    guarded: Guarded | None = None
    exponent: Poly | None = None
    weighted: Weighted | None = None
    group: object = None
    own: Node | None = None


class Known:
    """One walk's facts."""

    def __init__(self) -> None:
        self._facts: dict[Node, RowFact] = {}

    def tell(self, node: Node, **known: Any) -> None:
        """Adds to what is known of `node`, by the names of `RowFact`."""
        self._facts[under(node, SHOWN)] = replace(self.fact(node), **known)

    def fact(self, node: Node, through: Container[Target] = SHOWN) -> RowFact:
        """What is known of `node`, or of what it shows through these operators."""
        return self._facts.get(under(node, through), _NONE)


_NONE = RowFact()
