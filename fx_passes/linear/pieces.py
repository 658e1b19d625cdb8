"""The size of a head's logits, and user code splitting the rows itself, in a loop over chunks.

Entry points: `sizes_of`, `pieces_of`. Each piece is a matmul of its own, no larger than a chunk; but all of them would
be kept for backward, though an eager `autograd.Function` over chunks keeps none. So where they are more than a chunk
together, each is rewritten as one chunk, which backward makes again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from fx_passes.graph.backward import is_tangent
from fx_passes.graph.facts import shape_of, value
from fx_passes.graph.order import descendants
from fx_passes.graph.user_lines import source_of
from fx_passes.linear.chunks import Sizes, beside_softcap
from fx_passes.linear.head import is_head, made_of, weight_of
from fx_passes.linear.readers import gradients_of
from fx_passes.outcome import Rejection

ROWS_UNKNOWN = 1 << 16  # what a symbolic number of rows counts as: the next call may have so many


def sizes_of(node: Node, chunk_bytes: int) -> Sizes:
    """Sizes of logits; a symbolic number of rows counts as many, a symbolic vocabulary by its hint."""
    *lead, vocab = shape_of(node)
    rows = 1
    for size in lead:
        rows *= size if isinstance(size, int) else ROWS_UNKNOWN
    columns = vocab if isinstance(vocab, int) else int(vocab.node.hint or 0)
    item, beside = value(node).dtype.itemsize, 0
    if is_head(node):
        made, softcap = made_of(node)
        item = value(made).dtype.itemsize
        beside = 0 if softcap is None else beside_softcap(item, softcap.dtype.itemsize)
    return Sizes(rows, max(columns, 1), item, chunk_bytes, beside)


@dataclass(frozen=True)
class Pieces:
    """Heads that are one chunk each, of several over one weight.

    Attributes:
        kept: those that backward would keep more than a chunk of.
        left: why others stay as the program has them.
    """

    kept: frozenset[Node] = frozenset()
    left: tuple[Rejection, ...] = ()


def pieces_of(heads: Sequence[Node], chunk_bytes: int) -> Pieces:
    """Those of `heads` that are pieces."""
    by_weight: dict[Node, list[Node]] = defaultdict(list)
    for node in heads:
        if sizes_of(node, chunk_bytes).whole:
            by_weight[weight_of(node)].append(node)
    tangents = (
        [n for n in heads[0].graph.find_nodes(op="placeholder") if is_tangent(n)] if heads else []
    )
    late = descendants(tangents)
    kept: set[Node] = set()
    left: dict[str, Rejection] = {}
    for found in by_weight.values():
        if len(found) < 2:
            continue
        reasons = {node: _why_not_kept(node, late) for node in found}
        mine = [node for node in found if not reasons[node]]
        kept.update(mine if _more_than_a_chunk(mine, chunk_bytes) else ())
        for node, reason in reasons.items():
            if reason:
                left.setdefault(source_of(node), _left(node, reason))
    return Pieces(frozenset(kept), tuple(left.values()))


def _left(node: Node, reason: str) -> Rejection:
    text = f"the function computes the logits in pieces, and they stay as they are: {reason}"
    return Rejection.at(text, node)


def _why_not_kept(node: Node, late: set[Node]) -> str:
    """Why backward keeps nothing of a piece, or nothing.

    What Dynamo traced as the backward of an autograd.Function has no tag: it is `late`, follows from a tangent.
    """
    gradients = gradients_of(node)
    if not gradients:
        return "their gradient is not computed here"
    if not late.issuperset(gradients):
        return "forward computes their gradient and frees them"
    if "recompute" in node.meta:
        return "a checkpoint recomputes them in backward"
    return ""


def _more_than_a_chunk(pieces: Sequence[Node], chunk_bytes: int) -> bool:
    sizes = [sizes_of(node, chunk_bytes) for node in pieces]
    total = sum(each.bytes for each in sizes)
    return bool(sizes) and total > max(each.chunk_bytes for each in sizes)
