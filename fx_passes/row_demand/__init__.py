"""Unread rows of logits are not computed: the selection of rows moves before the matmul.

    (hidden @ weight.t())[rows]  ->  hidden[rows] @ weight.t()

Entry point: `demand_rows`, on Dynamo's graph: AOTAutograd then derives the gradient of what was moved, zero in the rows
that are left out, and a sum where rows are taken twice.

    heads    the matmul, and the same matmul over other rows
    region   what is made of its result up to the rows that are taken, and who reads those
    moves    operators that take or move rows, replayed on hidden states
    rewrite  the new nodes

Moved are selections by slices, numbers, indices and masks, and what is joined of them, behind casts, softcaps, numbers
and temperatures; several selections become one matmul. A graph stays as it was if another node reads all rows or nearly
all, where a value is changed in place or the gradient is switched between matmul and selection.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

from fx_passes.graph.user_lines import source_of
from fx_passes.graph.writes import Writes
from fx_passes.row_demand.heads import heads_of
from fx_passes.row_demand.region import Region, region_of
from fx_passes.row_demand.rewrite import place_of, rewrite

__all__ = ["Demand", "demand_rows"]


@dataclass(frozen=True)
class Demand:
    """A matmul that makes fewer rows than the program wrote.

    Attributes:
        source: the user's line of the matmul.
        rows: as many are made, a number or a symbolic size as text.
        of: as many were written.
    """

    source: str
    rows: int | str
    of: int | str

    def __str__(self) -> str:
        where = f" of the logits at {self.source}" if self.source else ""
        return (
            f"rows computed: {_told(self.rows)} of {_told(self.of)}{where}; the others are unread"
        )


def _told(rows: int | str) -> str:
    return f"{rows:,}" if isinstance(rows, int) else rows


def demand_rows(graph: Graph, min_vocab: int) -> list[Demand]:
    """Moves selections of rows before the matmuls in `graph`.

    Args:
        graph: one of Dynamo's, with `meta["example_value"]`.
        min_vocab: the smallest last dimension that is taken for a vocabulary.
    """
    found, writes = [], Writes(graph)
    for head in heads_of(graph, min_vocab):
        region = region_of(head, writes)
        place = None if region is None else place_of(region)
        if region is not None and place is not None:
            found.append(_told_of(region))
            rewrite(region, place)
    return found


def _told_of(region: Region) -> Demand:
    rows, total = (s if isinstance(s, int) else str(s) for s in (region.rows, region.total))
    return Demand(source_of(region.head.node), rows, total)
