"""Numbers per row exchanged by ranks, each with some columns of the logits.

Written by `exchange.py`, and by the rules for sums over the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch.fx import Node

from fx_passes.algebra.poly import Poly
from fx_passes.graph.operators import SHOWN, under


class Weighted(NamedTuple):
    """A row's sum of exponentials times a number; 0 where the sum is, whatever the number is."""

    mass: Node
    number: Poly


@dataclass
class Shards:
    """One walk's knowledge.

    Attributes:
        weighted: nodes that are one.
        shared: nodes that are the same on all ranks of a group; of which.
        largest: of the logits over all ranks.
        totals: sums of exponentials over all ranks; the own one.
    """

    weighted: dict[Node, Weighted] = field(default_factory=dict)
    shared: dict[Node, object] = field(default_factory=dict)
    largest: set[Node] = field(default_factory=set)
    totals: dict[Node, Node] = field(default_factory=dict)

    def is_largest(self, atom: Node) -> bool:
        """One of `largest`, of some of the rows or in another shape maybe."""
        return under(atom, SHOWN) in self.largest
