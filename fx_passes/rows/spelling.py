"""One spelling for rows left out or put among zeros, and for computations on them.

Entry points: `spell_alike`, `expand_operands`. `fewer.py` then knows slices, selections and scatters, and no splits or
joins.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch.fx import Node

from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import (
    hint,
    rank_of,
    same,
    same_shape,
    shape_of,
    value,
    wide_nodes,
)
from fx_passes.graph.operators import (
    RESHAPES,
    is_elementwise,
    is_zero,
    name_of,
    read_back,
    under,
    written_over,
)
from fx_passes.rows.parts import PUTS, Part, piece_of, put, rows_put, taken

__all__ = ["added", "expand_operands", "is_of_numbers", "spell_alike"]

aten = torch.ops.aten


def spell_alike(emit: Emitter, min_vocab: int, returned: Container[Node], of_heads: bool) -> None:
    """Pieces, joins and writes become slices and scatters; `returned` values keep their own memory.

    split(x, n)[1]                       ->  x[n : 2 * n], if another piece is unread
    cat([zeros, g])                      ->  zeros; zeros[n:] = g
    cat([a, b]) as [2, N, V]             ->  cat([a as [1, N, V], b as [1, N, V]]), unless `of_heads`
    x.gather(0, n[:, None].expand(N, V)) ->  x[n], and backward likewise, if `of_heads`
    cat([x[4:6], x[:3]])                 ->  x[[4, 5, 0, 1, 2]], and backward likewise, if `of_heads`
    x[n:] = g; x[n:]                     ->  g
    zeros; zeros[n:] = a; zeros[n:] = b  ->  zeros; zeros[n:] = b
    zeros + g                            ->  g
    """
    for node in wide_nodes(emit.graph, min_vocab):
        emit.origin = node
        spelling = _SPELLINGS.get(node.target)
        elsewhere = _stacked if of_heads else _by_numbers
        if spelling in (None, elsewhere) or node in returned:
            continue
        assert spelling is not None
        made = spelling(emit, node)
        if made is None and of_heads:
            made = _of_joined(emit, node)
        if made is not None:
            node.replace_all_uses_with(made)


def _piece(emit: Emitter, node: Node) -> Node | None:
    found = piece_of(node)
    split: Any = node.args[0]
    if found is None or len(split.users) == len(value(split)):
        return None
    every, (kind, *place) = found
    return emit.call(aten.select.int if kind == "select" else aten.slice.Tensor, every, *place)


def _joined(emit: Emitter, node: Node) -> Node | None:
    pieces: Any = node.args[0]
    at = _dim((node.args[1:] or (0,))[0], node)
    kept = [not is_zero(each) for each in pieces]
    if at is None or all(kept) or not any(kept):
        return None
    ends = list(itertools.accumulate(shape_of(each)[at] for each in pieces))
    if not all(isinstance(end, int) for end in ends):
        return None
    zeros = emit.full(emit.sizes(node), 0, value(node).dtype, node)
    puts = [
        emit.call(aten.slice_scatter.default, zeros, each, at, start, end)
        for each, keep, start, end in zip(pieces, kept, [0, *ends], ends, strict=False)
        if keep
    ]
    return added(emit, puts)


def _stacked(emit: Emitter, node: Node) -> Node | None:
    """A stack: in torch's graph, joined pieces and a view of them."""
    joined: Any = node.args[0]
    if joined.target is not aten.cat.default or joined.args[1:] not in ((), (0,)):
        return None
    pieces, shape = joined.args[0], shape_of(node)
    if not all(same_shape([len(pieces), *shape_of(each)], shape) for each in pieces):
        return None
    apart = [emit.reshape(each, [1, *emit.sizes(each)]) for each in pieces]
    return emit.call(aten.cat.default, apart)


def _overwritten(emit: Emitter, node: Node) -> Node | None:
    """The values put among zeros, without the replaced ones."""
    base = written_over(node)
    if base is None or base is node.args[0] or not is_zero(base):
        return None
    zeros = emit.full(emit.sizes(node), 0, value(node).dtype, node)
    written: Any = node.args[1]
    return zeros if is_zero(written) else emit.call(node.target, zeros, *node.args[1:])


def added(emit: Emitter, nodes: Sequence[Node]) -> Node:
    return functools.reduce(lambda one, other: emit.call(aten.add.Tensor, one, other), nodes)


def expand_operands(emit: Emitter, min_vocab: int) -> None:
    """A number for some of the dimensions of rows becomes one for each row, as a view."""
    rows = {str(math.prod(shape_of(node)[:-1])) for node in wide_nodes(emit.graph, min_vocab)}
    for node in list(emit.graph.nodes):
        wide = rank_of(node) >= 2 and hint(shape_of(node)[-1]) >= min_vocab  # or a mask
        if wide and is_elementwise(node):
            _expand_operands_of(emit, node, rank_of(node) - 1)
        elif is_elementwise(node) and str(math.prod(shape_of(node))) in rows:
            _expand_operands_of(emit, node, rank_of(node))
        if name_of(node.target) == "slime_fused::row_stats":
            _expand_scale(emit, node)


def _expand_operands_of(emit: Emitter, node: Node, rows: int) -> None:
    """For a node with `rows` as its first dimensions."""
    shape = shape_of(node)
    for operand in node.all_input_nodes:
        if not isinstance(value(operand), torch.Tensor):
            continue
        own = shape_of(operand)
        lead = own[:rows] if len(own) == len(shape) else ()
        ones = [same(size, 1) for size in lead]
        if any(ones) and not all(ones) and not same_shape(lead, shape[:rows]):
            emit.origin = node
            sizes = [*emit.sizes(node)[:rows], *emit.sizes(operand)[rows:]]
            node.replace_input_with(operand, emit.expand(operand, sizes))


def _expand_scale(emit: Emitter, node: Node) -> None:
    args: Any = node.args
    x, scale, *rest = args
    if scale is None or not shape_of(scale) or same_shape(shape_of(scale)[:-1], shape_of(x)[:-1]):
        return
    emit.origin = node
    rows = emit.expand(scale, [*emit.sizes(x)[:-1], 1])
    node.args = (x, rows, *rest)


def _added_to_zero(emit: Emitter, node: Node) -> Node | None:
    """x + 0"""
    if node.kwargs or len(node.all_input_nodes) != 2:
        return None
    one, other = node.all_input_nodes
    zero, rest = (one, other) if is_zero(one) else (other, one)
    same_kind = value(rest).dtype == value(node).dtype and same_shape(
        shape_of(rest), shape_of(node)
    )
    return rest if is_zero(zero) and same_kind else None


def is_of_numbers(node: Node) -> bool:
    """Is a gather, or its backward, one of rows, by an index equal in all columns?"""
    every, dim, index, *rows = node.args
    if not isinstance(index, Node) or index.target is not aten.expand.default:
        return False
    *lead, columns = shape_of(index)
    of_rows = len(lead) > 0 and isinstance(dim, int) and dim % (len(lead) + 1) < len(lead)
    whole = same(columns, shape_of(every)[-1]) and all(
        same_shape(shape_of(each), shape_of(index)) for each in rows
    )
    return of_rows and whole and same_shape(shape_of(index.args[0]), [*lead, 1])


def _by_numbers(emit: Emitter, node: Node) -> Node | None:
    if not is_of_numbers(node):
        return None
    every, dim, index, *rows = node.args
    numbers: Any = index.args[0]  # type: ignore[union-attr]
    lead = emit.sizes(numbers)[:-1]
    at = []
    for each, size in enumerate(lead):
        if each == dim % (len(lead) + 1):  # type: ignore[operator]
            at.append(emit.reshape(numbers, lead))
        else:
            ones = [size if other == each else 1 for other in range(len(lead))]
            at.append(emit.reshape(emit.iota(size, numbers), ones))
    if not rows:
        return emit.call(aten.index.Tensor, every, at)
    return emit.call(aten.index_put.default, every, at, rows[0], True)


def _of_joined(emit: Emitter, node: Node) -> Node | None:
    """Joined rows, [n, V], by their numbers; or a sum of put rows, by the numbers of all of them."""
    if node.target is aten.cat.default and node.args[1:] in ((), (0,)) and rank_of(node) == 2:
        pieces: Any = node.args[0]
        parts = [taken(each) for each in pieces]
        every = parts[0].every if parts[0] is not None else None
        if every is None or any(part is None or part.every is not every for part in parts):
            return None
        return emit.call(aten.index.Tensor, _flat(emit, every), [_numbers(emit, parts)])
    in_sum = any(user.target is aten.add.Tensor for user in node.users)
    if node.target is not aten.add.Tensor or in_sum:
        return None
    found = sorted(map(_put_inside, _addends(node)), key=lambda each: _start(each[0]))
    joined = _joined_of([piece for piece, _ in found])
    parts = [part for _, part in found]
    if joined is None or None in parts or value(joined).dtype != value(node).dtype:
        return None
    zeros = _flat(emit, emit.full(emit.sizes(node), 0, value(node).dtype, node))
    made = emit.call(aten.index_put.default, zeros, [_numbers(emit, parts)], joined, True)
    return emit.reshape(made, emit.sizes(node))


def _flat(emit: Emitter, every: Node) -> Node:
    *lead, columns = emit.sizes(every)
    return emit.reshape(every, [emit.product(lead), columns])


def _numbers(emit: Emitter, parts: Sequence[Any]) -> Node:
    return emit.call(aten.cat.default, [part.numbers(emit) for part in parts])


def _start(piece: Node) -> int:
    at = piece.args[2] if len(piece.args) > 2 else None
    return at if isinstance(at, int) else -1


def _addends(node: Node) -> list[Node]:
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return [node]
    return [each for operand in node.all_input_nodes for each in _addends(operand)]


def _put_inside(node: Node) -> tuple[Node, Part | None]:
    """The rows `node` puts among zeros, also by one put in another, and their places."""
    inner = node
    while (rows := under(inner, RESHAPES)).target in PUTS and (inside := rows_put(rows)):
        inner = inside
    part = put(inner)
    return inner, part if part is not None and part.every is node else None


def _joined_of(pieces: Sequence[Node]) -> Node | None:
    """[n, V] with these slices as its rows, one each."""
    if any(each.target is not aten.slice.Tensor or len(each.args) != 4 for each in pieces):
        return None
    joined, bounds = pieces[0].args[0], [each.args[1:] for each in pieces]
    stops: list[Any] = [0, *(stop for _, _, stop in bounds)]
    in_order = [(0, start) for start in stops[:-1]] == [each[:2] for each in bounds]
    of_one = all(each.args[0] is joined for each in pieces)
    is_all = in_order and of_one and same(stops[-1], shape_of(joined)[0])
    return joined if is_all and rank_of(joined) == 2 else None  # type: ignore[return-value]


def _dim(dim: Any, node: Node) -> int | None:
    """A dimension of rows; None of columns."""
    rank = len(shape_of(node))
    return dim % rank if dim % rank != rank - 1 else None


_SPELLINGS: dict[Any, Callable[[Emitter, Node], Node | None]] = {
    operator.getitem: _piece,
    aten.cat.default: _joined,
    aten.view.default: _stacked,
    aten.slice.Tensor: lambda emit, node: read_back(node),
    aten.select.int: lambda emit, node: read_back(node),
    aten.slice_scatter.default: _overwritten,
    aten.select_scatter.default: _overwritten,
    aten.add.Tensor: _added_to_zero,
    aten.gather.default: _by_numbers,
    aten.scatter_add.default: _by_numbers,
}
