"""Rows of a head, or of given logits, that meet part by part: each part is computed on its own, and so is whatever
reads all rows.

    x = h @ w; f(x); g(x[:n], x[n:])  ->  a = h[:n] @ w; b = h[n:] @ w; f(a), f(b); g(a, b)

Entry point: `compute_apart`. One loop over the rows of `a` then makes those of `b`, too: no whole `x` is needed. The
gradient of given logits is the stacked gradients of the parts, [parts, n, V]: the loop writes the rows of each.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import (
    hint,
    is_backward,
    is_wide,
    rank_of,
    same,
    shape_of,
    value,
    wide_nodes,
)
from fx_passes.graph.operators import SPLITS
from fx_passes.graph.order import tidy
from fx_passes.graph.returned import Returned
from fx_passes.graph.rows import COUNT, Block, Rows, Step, Whole, in_front
from fx_passes.rows.fewer import HEADS
from fx_passes.rows.parts import BY_NUMBERS, PUTS, TAKES, Move, move_of, piece_of, rows_put, span
from fx_passes.rows.region import Region, grown, in_place_of
from fx_passes.torch_private import detect_fake_mode

__all__ = ["compute_apart"]

aten = torch.ops.aten
Range = tuple[int, int]
"""Rows [start, stop)."""

_ADDED: dict[str, Any] = {
    "sum": aten.add.Tensor,
    "product": aten.add.Tensor,
    "max": aten.maximum.default,
    "min": aten.minimum.default,
}


def compute_apart(graph: Graph, min_vocab: int) -> int:
    """Computes logits in the parts of their rows that meet; how many nodes that makes."""
    fake_mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    if fake_mode is None:
        return 0
    emit, returned = Emitter(graph, fake_mode), Returned(graph)
    taken_of = [node for node in wide_nodes(graph, min_vocab) if any(True for _ in _taken_of(node))]
    joins = [node for node in wide_nodes(graph, min_vocab) if _joins(node)]
    seen = set[Node]()
    for root in taken_of:
        if not root.users or root in seen:  # another one's parts stand in its place, or do not meet
            continue
        region = grown(graph, root)
        region = grown(graph, root, *_joined(region, min_vocab, joins))
        seen |= region.blocks.keys()
        taken = _taken(region, min_vocab)
        if (
            _are_all(taken, region)
            and _meet(graph, taken, min_vocab)
            and not _needed_whole(region, taken)
        ):
            with graph.inserting_before(graph.output_node()):
                _replace(emit, region, taken)
            tidy(graph)
    returned.keep_apart(fake_mode, lambda node: is_wide(node, min_vocab))
    return len(emit.created)


def _joins(node: Node) -> bool:
    """Is it rows, joined or put among zeros?"""
    puts = node.target in PUTS.keys() - BY_NUMBERS and rows_put(node) is not None
    return puts or node.target is aten.cat.default


def _joined(region: Region, min_vocab: int, joins: list[Node]) -> list[Node]:
    """What `region` is given: hidden states of its heads, gradients of parts, joined or put among zeros."""
    steps = [*region.steps.values(), *(across.step for across in region.sums.values())]
    operands = [each for step in steps for each in step.operands() if isinstance(each, Rows)]
    read = dict.fromkeys(each.node for each in operands)
    given: list[Any] = [n for n in read if is_wide(n, min_vocab) and n not in region.blocks]
    heads = [node for node in region.steps if node.target in HEADS and is_wide(node, min_vocab)]
    given += [n.args[HEADS[n.target]] for n in heads if region.blocks[n] == in_front(1)]
    return given + [n for n in joins if n not in given and same(_rows(n), region.rows)]


def _taken(region: Region, min_vocab: int) -> dict[Node, Range]:
    """What takes neighbouring rows of wide values of `region`, by its first dimension."""
    wide = (node for node in region.blocks if is_wide(node, min_vocab))
    first = (node for node in wide if region.blocks[node] == in_front(len(shape_of(node)) - 1))
    return {item: rows for node in first for item, rows in _taken_of(node)}


def _taken_of(node: Node) -> Iterator[tuple[Node, Range]]:
    for user in node.users:
        if user.target in SPLITS:
            for item in user.users:
                piece = piece_of(item)
                if piece is not None and (rows := _range(piece[1], node)):
                    yield item, rows
        elif user.target in TAKES.keys() - BY_NUMBERS and (
            rows := _range(move_of(user, node, 1), node)
        ):
            yield user, rows


def _range(move: Move | None, every: Node) -> Range | None:
    """The rows of `every`, [.., rows.., V], that a slice or selection of its first dimension takes or puts."""
    found = None if move is None else span(move)
    if found is None or (found[0], found[3]) != (0, 1):
        return None
    each = math.prod(map(hint, shape_of(every)[1:-1]))
    return each * found[1], each * found[2]


def _are_all(taken: dict[Node, Range], region: Region) -> bool:
    """Whether the parts are of as many rows each, more than one, and together all rows."""
    parts = sorted(set(taken.values()))
    count = len(parts)
    rows = region.rows
    if count < 2 or not isinstance(rows, int) or rows == count or rows % count:
        return False
    ends = range(0, rows + 1, rows // count)
    return parts == list(itertools.pairwise(ends))


def _meet(graph: Graph, taken: dict[Node, Range], min_vocab: int) -> bool:
    """Whether values as wide as they are, and of as many rows, connect different parts."""
    start, stop = next(iter(taken.values()))
    wide = {n for n in wide_nodes(graph, min_vocab) if n in taken or _rows(n) == stop - start}
    found, waiting = set[Node](), [next(iter(taken))]
    while waiting:
        node = waiting.pop()
        found.add(node)
        near = [*node.users, *(() if node in taken else node.all_input_nodes)]
        waiting += [each for each in near if each in wide and each not in found]
    return len({rows for node, rows in taken.items() if node in found}) > 1


def _rows(node: Node) -> int:
    return math.prod(map(hint, shape_of(node)[:-1]))


def _needed_whole(region: Region, taken: dict[Node, Range]) -> bool:
    """Whether something wide is read as a whole, other than by what takes its parts; a gradient may leave."""
    inside = {*region.steps, *region.sums, *taken, *(item.args[0] for item in taken)}
    return any(
        user not in inside and (user.op != "output" or not is_backward(node))
        for node in filter(region.made_wide, region.steps)
        for user in node.users
    )


def _replace(emit: Emitter, region: Region, taken: dict[Node, Range]) -> None:
    joined = {node for node in region.blocks if _joins(node)}
    inside = region.steps.keys() | region.sums.keys() | joined
    nodes = [node for node in emit.graph.nodes if node in inside]
    device = value(next(iter(taken))).device
    parts = {rows: _Part(emit, region, rows, device) for rows in sorted(set(taken.values()))}
    for node in nodes:
        emit.origin = node
        for part in parts.values():
            part.compute(node)
    for node, rows in taken.items():
        every: Any = node.args[0]
        every = every.args[0] if every.target in SPLITS else every
        found = parts[rows].of(every, region.blocks[every])
        node.replace_all_uses_with(emit.reshape(found, emit.sizes(node)))
    for node in nodes:
        if inside >= node.users.keys() or not isinstance(value(node), torch.Tensor):
            continue
        found = _together([part.made[node] for part in parts.values()], node, region, emit)
        new = emit.laid_out_as(in_place_of(node, found, region, emit), node)
        node.replace_all_uses_with(new, lambda user: user not in inside)


def _together(made: list[Node], node: Node, region: Region, emit: Emitter) -> Node:
    """All rows, [N, ...], or the sum over all."""
    if region.is_wide(node):
        stacked = [emit.reshape(each, [1, *emit.sizes(each)]) for each in made]
        rows = [region.rows, *emit.sizes(made[0])[1:]]
        return emit.reshape(emit.call(aten.cat.default, stacked), rows)
    if node not in region.sums:
        return emit.call(aten.cat.default, made)
    add = functools.partial(emit.call, _ADDED[region.sums[node].how])
    return emit.reshape(functools.reduce(add, made), emit.sizes(node))


class _Part:
    """The values of a region over some of its rows, [n, ...], and what these add to its sums."""

    def __init__(self, emit: Emitter, region: Region, rows: Range, device: torch.device) -> None:
        self.emit, self.region, self.rows = emit, region, rows
        self.device = device
        self.made: dict[Node, Node] = {}

    def compute(self, node: Node) -> None:
        across = self.region.sums.get(node)
        if node not in self.region.steps and across is None:
            self.made[node] = self.of(node, self.region.blocks[node])
        elif across is None:
            self.made[node] = self._called(self.region.steps[node])
        elif across.how == "product":
            left, right = (self._argument(each) for each in across.step.args)
            turned = self.emit.permute(left, [1, 0])
            self.made[node] = self.emit.call(node.target, turned, right, *node.args[2:])
        else:
            self.made[node] = self._called(across.step)

    def _called(self, step: Step) -> Node:
        args = [self._argument(arg) for arg in step.args]
        if step.target is aten.reshape.default:
            return self.emit.reshape(*args)
        schema = getattr(step.target, "_schema", None)
        placed = schema is not None and any(each.name == "device" for each in schema.arguments)
        kwargs = dict(step.kwargs) | ({"device": self.device} if placed else {})
        return self.emit.call(step.target, *args, **kwargs)

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, Rows):
            found = self.of(arg.node, arg.block)
            if not arg.gap:
                return found
            count, *rest = self.emit.sizes(found)
            return self.emit.reshape(found, [count, *[1] * arg.gap, *rest])
        if isinstance(arg, Whole):
            sizes = self.emit.sizes(arg.node)
            without = [] if arg.without is None else arg.without.dims
            return self.emit.reshape(arg.node, Block(tuple(without)).rest(sizes))
        if isinstance(arg, Step):
            return self._called(arg)
        if isinstance(arg, (list, tuple)):
            return [self._argument(each) for each in arg]
        return self.rows[1] - self.rows[0] if arg is COUNT else arg

    def of(self, node: Node, block: Block) -> Node:
        """These rows of `node`: one of the pieces that it is joined of, or a view."""
        if node in self.made:
            return self.made[node]
        sizes: list[Any] = [self.rows[1] - self.rows[0], *block.rest(self.emit.sizes(node))]
        put = rows_put(node) if node.target in PUTS.keys() - BY_NUMBERS else None
        if put is not None and (rows := _range(move_of(node, node, 2), node)) is not None:
            if rows == self.rows:
                return self.emit.reshape(self.emit.cast(put, value(node).dtype), sizes)
            if rows[1] <= self.rows[0] or rows[0] >= self.rows[1]:
                return self.emit.full(sizes, 0, value(node).dtype, node)
        if node.target is aten.cat.default and block == in_front(len(block.dims)):
            joined: Any = node.args[0] if node.args[1:] in ((), (0,)) else []
            counts = (math.prod(block.lead(shape_of(each))) for each in joined)
            ends = [0, *itertools.accumulate(counts)]
            pieces = dict(zip(itertools.pairwise(ends), joined, strict=True))
            if self.rows in pieces:  # of dtypes that are promoted
                return self.emit.reshape(
                    self.emit.cast(pieces[self.rows], value(node).dtype), sizes
                )
        front = self.emit.permute(node, [*block.dims, *block.rest(range(rank_of(node)))])
        flat = self.emit.reshape(front, [self.region.rows, *sizes[1:]])
        return self.emit.call(aten.slice.Tensor, flat, 0, *self.rows)
