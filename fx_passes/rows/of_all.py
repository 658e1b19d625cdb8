"""Numbers read from a part of the rows that a matmul makes: read from all its rows, and the part taken of them.

    argmax(z[:, 1:])         ->  argmax(z)[:, 1:]
    gather(z[:, 1:], index)  ->  gather(z, zeros; zeros[:, 1:] = index)[:, 1:], also of columns in another dimension

Entry point: `read_all`. A loop over all rows, for their statistics, then reads these, too; of the other rows they are a
few numbers that no node reads. What several parts are given alike is read once, if no two of them have a row in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves, tree_map

from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import hint, is_wide, rank_of, shape_of, value
from fx_passes.graph.operators import MATMULS, RESHAPES, SAME_ROWS, TURNS, name_of, under
from fx_passes.graph.order import tidy
from fx_passes.graph.rows import (
    COUNT,
    NUMBERS,
    Block,
    Rows,
    Step,
    Whole,
    block_of,
    in_front,
    shape_of_value,
    step_of,
)
from fx_passes.rows.parts import Part, span, taken
from fx_passes.torch_private import FakeTensorMode

aten = torch.ops.aten


@dataclass(frozen=True)
class _Reader:
    """`node`, with rows in `block`, reads numbers of each row of `part`, by `step`.

    It is given `own` numbers per row, such as an index. `rest` is the shape in which it reads a row.
    """

    node: Node
    block: Block
    part: Part
    step: Step
    own: tuple[Rows, ...]
    rest: tuple[Any, ...]

    @property
    def key(self) -> str:
        """Equal for readers that do the same."""
        args = tree_map(lambda arg: "rows" if isinstance(arg, Rows) else arg, self.step.args)
        own = [(value(each.node).dtype, _rest(each)) for each in self.own]
        return str((self.part.every, self.step.target, args, self.step.kwargs, own, self.rest))


def _rest(rows: Rows) -> list[Any]:
    """The shape of one of these rows."""
    return rows.block.rest(shape_of(rows.node))


def read_all(graph: Graph, min_vocab: int, fake_mode: FakeTensorMode) -> None:
    """Rewrites the readers of matmuls' results that fused operators read all rows of."""
    groups: dict[str, list[list[_Reader]]] = {}
    for node in graph.nodes:
        reader = _reader(node, min_vocab)
        if reader is not None:
            alike = groups.setdefault(reader.key, [])
            group = next((each for each in alike if _is_apart(reader.part, each)), None)
            if group is None:
                alike.append(group := [])
            group.append(reader)
    if not groups:
        return
    emit = Emitter(graph, fake_mode)
    emit.adopt_all()  # no size is asked of what a matmul makes
    with graph.inserting_before(graph.output_node()):
        for alike in groups.values():
            for group in alike:
                _rewrite(emit, group)
    tidy(graph)


def _reader(node: Node, min_vocab: int) -> _Reader | None:
    if node.op != "call_function" or is_wide(node, min_vocab):
        return None
    shown = {each: found for each in node.all_input_nodes if (found := _shown(each, min_vocab))}
    if len(shown) != 1:
        return None
    ((wide, (below, place)),) = shown.items()
    part, block = taken(below), block_of(node, {wide: place}.get)
    if part is None or block is None or not _is_read_all(part.every):
        return None
    step = step_of(node, block)
    if step is None or not block.fits(shape_of_value(node)):
        return None
    few = math.prod(map(hint, block.rest(shape_of_value(node)))) < hint(shape_of(below)[-1])
    for_chunks = any(arg is COUNT or arg is NUMBERS for arg in tree_leaves(step.args))
    rows = [each for each in step.operands() if isinstance(each, Rows)]
    own = tuple(each for each in rows if each.node is not wide)
    plain = all(not each.gap and (each.node is not wide or each.block == place) for each in rows)
    flat = {arg for arg in step.args if isinstance(arg, Rows)} == set(rows)
    is_reader = few and plain and flat and not for_chunks
    rest = tuple(place.rest(shape_of(wide)))
    return _Reader(node, block, part, step, own, rest) if is_reader else None


def _shown(node: Node, min_vocab: int) -> tuple[Node, Block] | None:
    """The rows [..., V] that `node` shows, in this or another order of dimensions, and their place in it."""
    views: list[Node] = []
    below, turned = node, 0
    while below.target in RESHAPES | TURNS:
        views.append(below)
        turned = len(views) if below.target in TURNS else turned
        below = below.args[0]  # type: ignore[assignment]
    below = views[turned - 1].args[0] if turned else node  # type: ignore[assignment]
    if not is_wide(below, min_vocab):
        return None
    known: dict[Node, Block] = {below: in_front(rank_of(below) - 1)}
    for view in views[:turned][::-1]:
        block = block_of(view, known.get)
        if block is None:
            return None
        known[view] = block
    return below, known[node]


def _is_apart(part: Part, others: Sequence[_Reader]) -> bool:
    """Whether it has no row of theirs, as numbers in one dimension tell."""
    mine = span(part.moves[0])
    for other in others:
        theirs = span(other.part.moves[0])
        if mine is None or theirs is None or mine[0] != theirs[0]:
            return False
        if mine[1] < theirs[2] and theirs[1] < mine[2]:
            return False
    return True


def _is_read_all(every: Node) -> bool:
    """Whether fused operators read all rows of what a matmul makes."""
    waiting = [under(every, SAME_ROWS)]
    if waiting[0].target not in MATMULS:
        return False
    while waiting:
        for user in waiting.pop().users:
            if name_of(user.target) == "slime_fused::row_stats":
                return True
            if user.target in SAME_ROWS:
                waiting.append(user)
    return False


def _rewrite(emit: Emitter, group: Sequence[_Reader]) -> None:
    first = group[0]
    every, step = first.part.every, first.step
    emit.origin = first.node
    *lead, _ = emit.sizes(every)
    rows = emit.product(lead)
    given = zip((each.node for each in first.own), _own(emit, group, rows), strict=True)
    chunk: dict[Node, Node] = dict(given)
    wide = emit.reshape(every, [rows, *first.rest])

    def placed(arg: Any) -> Any:
        if isinstance(arg, Rows):
            return chunk.get(arg.node, wide)
        return arg.node if isinstance(arg, Whole) else arg

    found = emit.call(step.target, *tree_map(placed, step.args), **step.kwargs)
    for reader in group:
        _replace(emit, reader, found, lead)


def _own(emit: Emitter, group: Sequence[_Reader], rows: Any) -> list[Node]:
    """What each reader is given, among zeros for the other rows."""
    made = []
    for alike in zip(*(reader.own for reader in group), strict=True):
        node, rest = alike[0].node, alike[0].block.rest(emit.sizes(alike[0].node))
        found = emit.full([rows, *rest], 0, value(node).dtype, node)
        for own, reader in zip(alike, group, strict=True):
            places = reader.part.numbers(emit)
            dims = own.block.dims
            front = emit.permute(own.node, [*dims, *own.block.rest(range(rank_of(own.node)))])
            flat = emit.reshape(front, [emit.size(places, 0), *rest])
            found = emit.call(aten.index_put.default, found, [places], flat)
        made.append(found)
    return made


def _replace(emit: Emitter, reader: _Reader, found: Node, lead: list[Any]) -> None:
    """With the part of `found`, [all rows, ...], or of each of several values."""
    if not isinstance(value(reader.node), Tensor):
        for item in reader.node.users:
            each = emit.call(item.target, found, item.args[1])
            _replace(emit, replace(reader, node=item), each, lead)
        return
    emit.origin = reader.node
    rest, sizes, block = emit.sizes(found)[1:], emit.sizes(reader.node), reader.block
    mine = reader.part.take(emit, emit.reshape(found, [*lead, *rest]), rest)
    mine = emit.reshape(mine, [*block.lead(sizes), *block.rest(sizes)])
    now = [*block.dims, *block.rest(range(len(sizes)))]
    mine = emit.permute(mine, [now.index(dim) for dim in range(len(sizes))])
    packed = emit.call(aten.clone.default, mine, memory_format=torch.contiguous_format)
    reader.node.replace_all_uses_with(packed)
