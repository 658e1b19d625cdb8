"""Numbers per row that a program takes apart and puts together again, computed for all rows at once.

    stack([f(x[0]), f(x[1])])              ->  f(x)
    cat([f(x[:2]), f(x[2:])])              ->  f(x)
    (zeros; zeros[0] = f(x[0])) + (zeros; zeros[1] = f(x[1]))  ->  f(x)
    x[:]                                   ->  x

Entry point: `compute_together`. Trainers do so sample by sample, to save memory. A loop over rows computes f(x) in its
chunks, where pieces would have to wait for all rows. Only numbers per row are put together: what is as wide as a
vocabulary, `fewer.py` moves.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from fx_passes.graph.aliases import Aliases
from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import is_wide, same, same_shape, shape_of, value
from fx_passes.graph.operators import (
    RESHAPES,
    SPLITS,
    VIEWS,
    WRITES,
    is_elementwise,
    is_pure,
    under,
)
from fx_passes.graph.order import tidy
from fx_passes.graph.slices import bounds, takes_all
from fx_passes.rows.parts import rows_put
from fx_passes.torch_private import FakeTensorMode

aten = torch.ops.aten

Place = tuple[int, int]
"""Rows [start, stop) of the first dimension."""


def compute_together(graph: Graph, min_vocab: int, fake_mode: FakeTensorMode) -> None:
    """Rewrites the joins and sums of pieces that are all pieces of something, in order."""
    emit = Emitter(graph, fake_mode)
    for node in graph.nodes:
        emit.adopt(node)
    found = False
    with graph.inserting_before(graph.output_node()):
        for node in list(graph.nodes):
            emit.origin = node
            made = (
                None if is_wide(node, min_vocab) else _SPELLINGS.get(node.target, _kept)(emit, node)
            )
            if made is not None:
                made = emit.laid_out_as(made, node)
                node.replace_all_uses_with(made)
                emit.represents[node] = made
                found = True
    if found:
        tidy(graph)


def _kept(emit: Emitter, node: Node) -> Node | None:
    """What a slice of all rows shows, or writes."""
    args: Any = node.args
    reads = node.target is aten.slice.Tensor
    if not reads and node.target is not aten.slice_scatter.default:
        return None
    shown: Any = args[0 if reads else 1]
    where: tuple[Any, ...] = args[1 if reads else 2 :] or (0,)
    dim, place = where[0], where[1:]
    start, stop, step = (list(place) + [None, None, 1][len(place) :])[:3]
    sizes = [shape_of(each)[dim] for each in (node, args[0], shown)]
    whole = all(takes_all(size, start, stop, step) for size in sizes)
    return shown if whole and _may_stand_for(emit, shown, node) else None


def _joined(emit: Emitter, node: Node) -> Node | None:
    args: Any = node.args
    pieces, dim = args[0], (args[1:] or (0,))[0]
    if dim != 0 or len(pieces) < 2:
        return None
    made = _together(emit, pieces, True) or _together(emit, pieces, False)
    if made is None or not _may_stand_for(emit, made, node):
        return None
    return emit.reshape(made, emit.sizes(node))


def _added(emit: Emitter, node: Node) -> Node | None:
    """Pieces that are put among zeros, among the addends: all rows of them at once."""
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
    return made if _may_stand_for(emit, made, node) else None


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
    """Where zeros have a piece in `node`."""
    if not isinstance(node, Node) or node.target not in WRITES.values() or rows_put(node) is None:
        return None
    return _place(node, node.args[2:])


_SPELLINGS: dict[Any, Any] = {aten.cat.default: _joined, aten.add.Tensor: _added}


def _may_stand_for(emit: Emitter, made: Node, node: Node) -> bool:
    """A result keeps memory of its own."""
    if value(made).dtype != value(node).dtype:
        return False
    own = under(made, VIEWS) in emit.created
    return own or node not in Aliases(emit.graph).of_outputs(emit.graph)


def _together(emit: Emitter, pieces: Sequence[Any], stacked: bool) -> Node | None:
    """What `pieces` are pieces of; None where they are not pieces of one value.

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
    """A view of slices [n, ...] that is [n, ...], with the dimensions behind n of `first`."""
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
    """What they take all rows of, one piece after the other."""
    taken = [_taken(each) for each in pieces]
    first = taken[0]
    if first is None or any(each is None or each[0] is not first[0] for each in taken):
        return None
    if any(_is_selection(each) != stacked for each in pieces):
        return None
    return first[0] if _covers([each[1] for each in taken if each], first[0]) else None


def _is_selection(node: Node) -> bool:
    by = node.args[0].target if node.target is operator.getitem else node.target  # type: ignore[union-attr]
    return by in (aten.select.int, aten.unbind.int)


def _taken(node: Node) -> tuple[Node, Place] | None:
    if node.target is operator.getitem:
        split: Any = node.args[0]
        if split.target not in SPLITS or split.args[
            1 if split.target is aten.unbind.int else 2 :
        ] not in ((), (0,)):
            return None
        sizes = [1 if split.target is aten.unbind.int else len(each) for each in value(split)]
        at: Any = node.args[1]
        return split.args[0], (sum(sizes[:at]), sum(sizes[: at + 1]))
    if node.target not in (aten.select.int, aten.slice.Tensor):
        return None
    every: Any = node.args[0]
    place = _place(every, node.args[1:])
    return None if place is None else (every, place)


def _place(every: Node, args: Any) -> Place | None:
    """The rows that the arguments of a selection or slice of `every` name."""
    dim, *rest = args or (0,)
    size = shape_of(every)[0]
    if dim != 0 or not all(isinstance(each, int) for each in (size, *rest)):
        return None
    if len(rest) == 1:
        return rest[0] % size, rest[0] % size + 1
    start, stop = bounds(size, *(*rest, None, None)[:2])
    return (start, min(stop, size)) if rest[2:] in ([], [1]) else None


def _covers(places: Sequence[Place | None], every: Node) -> bool:
    """Whether they are all rows, in order."""
    at = 0
    for place in places:
        if place is None or place[0] != at:
            return False
        at = place[1]
    return same(shape_of(every)[0], at)
