"""Numbers per row, taken apart and put together again by the program, are computed for all rows at once.

    stack([f(x[0]), f(x[1])])              ->  f(x)
    cat([f(x[:2]), f(x[2:])])              ->  f(x)
    (zeros; zeros[0] = f(x[0])) + (zeros; zeros[1] = f(x[1]))  ->  f(x)
    x[:]                                   ->  x

Entry point: `compute_together`. Trainers do so sample by sample, to save memory. A loop over rows computes f(x) in its
chunks; pieces would have to wait for all rows. This file puts only numbers per row together; `fewer.py` moves values as
wide as a vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from fx_passes.graph.aliases import Aliases
from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import is_wide, same, same_shape, shape_of, value
from fx_passes.graph.operators import (
    RESHAPES,
    VIEWS,
    WRITES,
    is_elementwise,
    is_pure,
    under,
)
from fx_passes.graph.order import tidy
from fx_passes.graph.slices import takes_all
from fx_passes.rows.parts import Move, cut_of, rows_put, span, split_of
from fx_passes.torch_private import FakeTensorMode

aten = torch.ops.aten

Place = tuple[int, int]
"""Rows [start, stop) of the first dimension."""


def compute_together(graph: Graph, min_vocab: int, fake_mode: FakeTensorMode) -> None:
    """Rewrites joins and sums of all pieces of one value, in order."""
    emit = Emitter(graph, fake_mode)
    emit.adopt_all()
    returned = Aliases(graph).of_outputs(graph)
    found = False
    with graph.inserting_before(graph.output_node()):
        for node in list(graph.nodes):
            if is_wide(node, min_vocab):
                continue
            emit.origin = node
            made = _SPELLINGS.get(node.target, _kept)(emit, node)
            if made is None or value(made).dtype != value(node).dtype:
                continue
            # a result keeps memory of its own
            if node in returned and under(made, VIEWS) not in emit.created:
                continue
            made = emit.laid_out_as(made, node)
            node.replace_all_uses_with(made)
            emit.represents[node] = made
            found = True
    if found:
        tidy(graph)


def _kept(emit: Emitter, node: Node) -> Node | None:
    """The value read or written by a slice of all rows."""
    args: Any = node.args
    reads = node.target is aten.slice.Tensor
    if not reads and node.target is not aten.slice_scatter.default:
        return None
    shown: Any = args[0 if reads else 1]
    where: tuple[Any, ...] = args[1 if reads else 2 :] or (0,)
    dim, place = where[0], where[1:]
    start, stop, step = (list(place) + [None, None, 1][len(place) :])[:3]
    sizes = [shape_of(each)[dim] for each in (node, args[0], shown)]
    return shown if all(takes_all(size, start, stop, step) for size in sizes) else None


def _joined(emit: Emitter, node: Node) -> Node | None:
    args: Any = node.args
    pieces, dim = args[0], (args[1:] or (0,))[0]
    if dim != 0 or len(pieces) < 2:
        return None
    made = _together(emit, pieces, True) or _together(emit, pieces, False)
    return None if made is None else emit.reshape(made, emit.sizes(node))


def _added(emit: Emitter, node: Node) -> Node | None:
    """Pieces put among zeros, among the addends: all their rows at once."""
    puts: dict[Place, Node] = {}
    others: list[Any] = []
    waiting: list[Any] = [node]
    while waiting:
        each = waiting.pop()
        place = _put(each)
        if place is not None and place not in puts:
            puts[place] = each
        elif _is_sum(each):
            waiting += each.args
        else:
            others.append(each)
    places = sorted(puts)
    if len(puts) < 2 or not _covers(places, node):
        return None
    kinds = {each.target for each in puts.values()}
    stacked = kinds == {aten.select_scatter.default}
    made = _together(emit, [puts[place].args[1] for place in places], stacked)
    if len(kinds) > 1 or made is None or value(made).dtype != value(node).dtype:
        return None
    made = emit.reshape(made, emit.sizes(node))
    for each in others:
        made = emit.call(aten.add.Tensor, made, each)
    return made


def _is_sum(node: Any) -> bool:
    """Of tensors of one dtype and shape."""
    if not isinstance(node, Node) or node.target is not aten.add.Tensor or node.kwargs:
        return False
    return all(
        isinstance(each, Node)
        and isinstance(value(each), torch.Tensor)
        and value(each).dtype == value(node).dtype
        and same_shape(shape_of(each), shape_of(node))
        for each in node.args
    )


def _put(node: Any) -> Place | None:
    """The place of a piece among zeros in `node`."""
    if not isinstance(node, Node) or node.target not in WRITES.values() or rows_put(node) is None:
        return None
    return _place(node, cut_of(node, node, 2))


_SPELLINGS: dict[Any, Any] = {aten.cat.default: _joined, aten.add.Tensor: _added}


def _together(emit: Emitter, pieces: Sequence[Any], stacked: bool) -> Node | None:
    """The value of these `pieces`; None if they are not pieces of one value.

    Args:
        stacked: they are B selections [...] of [B, ...]; else slices [n, ...] of [sum of n, ...].
    """
    pieces = [emit.represents.get(each, each) for each in pieces]
    first = pieces[0]
    every = _every(pieces, stacked)
    if every is not None:
        return every
    same_operator = all(
        each.target == first.target and each.kwargs == first.kwargs for each in pieces
    )
    if first.op != "call_function" or not same_operator or not is_pure(first):
        return None
    if is_elementwise(first):
        args = [
            _operand(emit, pieces, each, stacked)
            for each in zip(*(p.args for p in pieces), strict=True)
        ]
        return None if _NONE in args else emit.call(first.target, *args, **first.kwargs)
    inner = (
        _together(emit, [each.args[0] for each in pieces], stacked)
        if first.target in RESHAPES
        else None
    )
    if inner is None:
        return None
    if stacked and all(same_shape(shape_of(each), shape_of(first)) for each in pieces):
        return emit.reshape(inner, [emit.size(inner, 0), *emit.sizes(first)])
    if stacked or not all(_keeps_rows(each, first) for each in pieces):
        return None
    return emit.reshape(inner, [emit.size(inner, 0), *emit.sizes(first)[1:]])


def _keeps_rows(node: Node, first: Node) -> bool:
    """A view [n, ...] of slices [n, ...], with the dimensions of `first` behind n."""
    shape, below = shape_of(node), shape_of(node.args[0])
    kept = bool(shape) and same(shape[0], below[0])
    return kept and same_shape(shape[1:], shape_of(first)[1:])


_NONE = object()


def _operand(emit: Emitter, pieces: Sequence[Node], args: Sequence[Any], stacked: bool) -> Any:
    """The arguments of all pieces as one."""
    first = args[0]
    if not all(isinstance(each, Node) for each in args):
        return first if all(each == first for each in args) else _NONE
    kept = [emit.represents.get(each, each) for each in args]
    if not shape_of(first):
        return kept[0] if all(each is kept[0] for each in kept) else _NONE
    whole = all(same_shape(shape_of(a), shape_of(p)) for a, p in zip(args, pieces, strict=True))
    made = _together(emit, args, stacked) if whole else None
    return _NONE if made is None else made


def _every(pieces: Sequence[Node], stacked: bool) -> Node | None:
    """The value with all these pieces, one after the other."""
    taken = [_taken(each) for each in pieces]
    every, places = taken[0][0], []
    for piece_of_every, move in taken:
        if every is None or piece_of_every is not every or (move[0] == "select") != stacked:
            return None
        places.append(_place(every, move))
    return every if every is not None and _covers(places, every) else None


def _taken(node: Node) -> tuple[Node | None, Move]:
    """The value with `node` as a piece, and the slice or selection taking it."""
    if node.target in WRITES:
        every: Any = node.args[0]
        return every, cut_of(node, every, 1)
    return split_of(node) or (None, ())


def _place(every: Node, move: Move) -> Place | None:
    """The rows of `every` in a slice or selection, one after the other."""
    found = span(move) if isinstance(shape_of(every)[0], int) else None
    return found[1:3] if found is not None and (found[0], found[3]) == (0, 1) else None


def _covers(places: Sequence[Place | None], every: Node) -> bool:
    """Whether they are all rows, in order."""
    at = 0
    for place in places:
        if place is None or place[0] != at:
            return False
        at = place[1]
    return same(shape_of(every)[0], at)
