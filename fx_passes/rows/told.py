"""The outcome of `by_rows` for the report: heads never materialised, loops, refusals.

Entry point: `told_of`, of one region; `RowsOutcome` adds them up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.fx import Graph, Node

from fx_passes.graph.facts import byte_count, hint, is_backward, rank_of, shape_of, value
from fx_passes.graph.operators import CASTS, MATMULS, SHOWN, VIEWS, name_of, under
from fx_passes.graph.user_lines import source_of
from fx_passes.outcome import Outcome, Rejection
from fx_passes.rows.chunks import Sizes
from fx_passes.rows.loops import Loop
from fx_passes.rows.region import Region

__all__ = ["Head", "Looped", "RowsOutcome", "saved_bytes", "told_of", "why_whole"]


@dataclasses.dataclass(frozen=True)
class Head:
    """Logits of a matmul, never materialised in full.

    Attributes:
        source: the user's line of the matmul.
        shape: of all logits, symbolic sizes as text.
        forward, backward: [rows, columns] of a chunk for the sizes that the graph was traced with; None where that
            stage makes none.
        waits: the reason to compute the gradient in backward, or nothing.
        early: forward makes the gradient.
        piece: one chunk holds them; the program has several such heads.
    """

    source: str
    shape: tuple[int | str, ...]
    forward: tuple[int, int] | None
    backward: tuple[int, int] | None
    waits: str
    early: bool
    piece: bool

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        said = f"the logits [{', '.join(map(str, self.shape))}]{where}"
        if self.piece:
            return f"{said} are a piece of all rows: recomputed in backward, not saved"
        first, again = self.forward or self.backward, ""
        if self.backward not in (None, first):
            again = f" and {_by(self.backward)} in backward"
        said = f"{said} are never materialised in full: chunks of {_by(first)}{again}"
        if self.early:
            return f"{said}, with the gradient computed in forward"
        return f"{said}; the gradient is computed in backward: {self.waits}" if self.waits else said


def _by(chunk: tuple[int, int] | None) -> str:
    return " x ".join(f"{size:,}" for size in chunk or ())


@dataclasses.dataclass(frozen=True)
class Looped:
    """One loop over chunks of rows.

    Attributes:
        source: the user's line of the first wide value.
        chunks: their number for the sizes that the graph was traced with.
        values: wide values existing one chunk at a time.
        others: of these, values other than a head's logits and their fused values.
        backward: the loop runs in backward.
        columns: the chunks are of columns.
        nodes: targets and lines of the user's nodes in the loop.
        whole: results of a forward loop as large as all chunks.
    """

    source: str
    chunks: int
    values: int
    others: int
    backward: bool
    columns: bool
    nodes: tuple[tuple[str, str], ...]
    whole: int

    def __str__(self) -> str:
        where = f" from {self.source}" if self.source else ""
        when = "backward" if self.backward else "forward"
        return (
            f"{when} runs in {self.chunks} chunks of {'columns' if self.columns else 'rows'}{where}: "
            f"of {self.values} full-vocabulary values one chunk exists at a time"
        )


@dataclasses.dataclass(frozen=True)
class RowsOutcome:
    """What `by_rows` did; with `loops == ()` no loop was made, and arithmetic may work on fewer rows.

    Attributes:
        left: full-vocabulary values still computed in full, without results of loops.
        saved_bytes: of full-vocabulary values backward would have read.
        one_chunk: a loop would have one chunk only, so none was made.
    """

    loops: tuple[Looped, ...] = ()
    heads: tuple[Head, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    left: int = 0
    saved_bytes: int = 0
    one_chunk: bool = False

    @property
    def early(self) -> bool:
        return any(each.early for each in self.heads)

    def then(self, later: RowsOutcome) -> RowsOutcome:
        """The outcome of two regions of one graph."""
        return RowsOutcome(
            self.loops + later.loops,
            self.heads + later.heads,
            self.rejections + later.rejections,
            saved_bytes=self.saved_bytes + later.saved_bytes,
            one_chunk=self.one_chunk or later.one_chunk,
        )

    def added_to(self, outcome: Outcome) -> Outcome:
        """`outcome` of the passes before, with this one's."""
        gone = {node for each in self.loops for node in each.nodes}
        kept = tuple(r for r in outcome.rejections if (r.node, r.source) not in gone)
        if self.loops:
            before = max(outcome.wide_before, self.left + sum(each.values for each in self.loops))
            after = min(outcome.wide_after, self.left) if outcome.wide_before else self.left
            outcome = dataclasses.replace(outcome, wide_before=before, wide_after=after)
        one_chunk = self.one_chunk and bool(kept)
        notes: list[object] = [*self.heads, *(each for each in self.loops if each.others)]
        notes += [_ONE_CHUNK] if one_chunk else []
        return dataclasses.replace(
            outcome,
            rejections=(*kept, *self.rejections),
            stored=min(outcome.stored, len(kept) + sum(each.whole for each in self.loops))
            + len(self.rejections),
            saved_bytes_after=max(outcome.saved_bytes_after - self.saved_bytes, 0),
            chunked_heads=outcome.chunked_heads + len(self.heads),
            notes=(*outcome.notes, *dict.fromkeys(map(str, notes))),
            one_chunk=one_chunk,
        )


_ONE_CHUNK = "all rows fit into one chunk (option chunk_mib): no loop is needed at this size"


def told_of(
    region: Region, loops: Sequence[Loop], sizes: Sequence[Sizes], early: bool, waits: str
) -> RowsOutcome:
    """Of the loops of `region`."""
    chunks: dict[Node, dict[bool, tuple[int, int]]] = {}
    handed_out = {node for loop in loops for node in loop.handed_out}
    for loop, each in zip(loops, sizes, strict=True):
        for node in filter(_is_head, loop.body.keys() - handed_out):
            if region.made_wide(node):
                chunks.setdefault(node, {})[loop.backward] = _chunk(node, loop, each)
    piece = all(each.whole for each in sizes)
    heads = [
        Head(
            source_of(node),
            tuple(s if isinstance(s, int) else str(s) for s in shape_of(node)),
            found.get(False),
            found.get(True),
            waits,
            early,
            piece,
        )
        for node, found in sorted(chunks.items())
    ]
    returned = [
        Rejection.at(_why(region), node)
        for node in sorted(handed_out)
        if _is_head(node) and region.made_wide(node)
    ]
    return RowsOutcome(tuple(map(_looped, loops, sizes)), tuple(heads), tuple(returned))


def _is_head(node: Node) -> bool:
    return node.target in MATMULS


def _chunk(node: Node, loop: Loop, sizes: Sizes) -> tuple[int, int]:
    rows, columns = map(hint, shape_of(node))
    return (rows, sizes.row_chunk) if loop.region.of_columns else (sizes.row_chunk, columns)


def _looped(loop: Loop, sizes: Sizes) -> Looped:
    wide = [node for node in loop.body if loop.region.made_wide(node)]
    source = next(filter(None, map(source_of, wide)), "")
    nodes = tuple((str(node.target), source_of(node)) for node in loop.body)
    whole = 0 if loop.backward else sum(map(loop.region.is_wide, loop.results))
    spared = loop.spared
    others = sum(map(_is_other, spared))
    chunks = -(-sizes.rows // max(sizes.row_chunk, 1))
    return Looped(
        source, chunks, len(spared), others, loop.backward, loop.region.of_columns, nodes, whole
    )


def _is_other(node: Node) -> bool:
    fused = name_of(node.target).startswith("slime_fused::")
    return not (fused or node.target in MATMULS | CASTS | SHOWN)


def why_whole(graph: Graph, regions: Iterable[Region], heads: Iterable[Node]) -> list[Rejection]:
    """The reason fused operators still read logits materialised in full."""
    inside = {node: region for region in regions for node in region.steps}
    found = []
    for node in heads:
        if rank_of(node) > 2:
            reason = "a batch of matrices is multiplied, each by a matrix of its own"
        elif node in inside:
            found.append(Rejection.at(_why(inside[node]), node))
            continue
        else:
            reason = "the matmul does not work row by row on what its readers read"
        found.append(Rejection.at(f"the logits are materialised in full: {reason}", node))
    return found


def _why(region: Region) -> str:
    """The reader outside `region` needing its logits in full."""
    for node in filter(region.made_wide, region.steps):
        for user in node.users:
            if user.op == "output":
                return "the logits are returned, so they are materialised in full"
            if user not in region.steps and user not in region.sums:
                where = source_of(user)
                by = f"{user.target}{f' at {where}' if where else ''}"
                return f"the logits are materialised in full: {by} does not work row by row"
    return "the logits are materialised in full: a loop would save nothing"


def saved_bytes(graph: Graph, region: Region) -> int:
    """Of wide values made in forward and read in backward."""
    late: Iterable[Node] = filter(is_backward, graph.nodes)
    read = {under(each, VIEWS) for reader in late for each in reader.all_input_nodes}
    kept = [node for node in read if region.made_wide(node) and not is_backward(node)]
    return sum(byte_count(node) for node in kept if isinstance(value(node), Tensor))
