"""Parts of rows: the row numbers of a value, as a node of the graph.

    shifted = logits[:, :-1]                the rows of `shifted` are a part of those of `logits`
    d logits = zeros; d logits[:, :-1] = g  the rows of `g` are put among all rows

Entry points: `taken`, `put`. Both follow slices, selections and reshapes of the dimensions before the columns. The same
operations, done to [0, 1, 2, ...], give the number of each row: a loop reads and writes rows by their numbers, and
neither a copy of the part nor a second buffer of all rows exists. `work_on_parts` moves arithmetic to the part.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Node

from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import (
    rank_of,
    same,
    same_shape,
    shape_of,
    value,
)
from fx_passes.graph.operators import (
    SAME_ROWS,
    SPLITS,
    is_zero,
)
from fx_passes.graph.rows import Block, in_front

__all__ = [
    "BY_NUMBERS",
    "PUTS",
    "TAKES",
    "Move",
    "Part",
    "cut_of",
    "is_of_rows",
    "move_of",
    "piece_of",
    "put",
    "rows_put",
    "same_columns",
    "span",
    "split_of",
    "taken",
]

aten = torch.ops.aten
Move = tuple[Any, ...]
"""("view", None, node with this shape), ("slice", dim, start, end, step) or ("select", dim, number)."""

TAKES: dict[Any, str] = {
    aten.slice.Tensor: "slice",
    aten.select.int: "select",
    aten.index.Tensor: "numbers",
}
PUTS: dict[Any, str] = {
    aten.slice_scatter.default: "slice",
    aten.select_scatter.default: "select",
    aten.slice_backward.default: "slice",
    aten.select_backward.default: "select",
    aten.index_put.default: "numbers",
}
BY_NUMBERS = (aten.index.Tensor, aten.index_put.default)
_NUMBERS = (torch.int64, torch.bool)
_BACKWARD = (aten.slice_backward.default, aten.select_backward.default)


@dataclass(frozen=True)
class Part:
    """Some rows of `every`, in this order.

    Attributes:
        every: the value with all rows, [..., V].
        moves: from the row numbers of `every` to those of the part.
    """

    every: Node
    moves: tuple[Move, ...]

    @property
    def block(self) -> Block:
        return in_front(len(shape_of(self.every)) - 1)

    @property
    def key(self) -> str:
        """Equal for parts with the same rows of values of equally many."""
        spelled = [("view", shape_of(m[2])[:-1]) if m[0] == "view" else m for m in self.moves]
        return str((shape_of(self.every)[:-1], spelled))

    def numbers(self, emit: Emitter) -> Node:
        """The row numbers, [n]."""
        sizes = emit.sizes(self.every)[:-1]
        found = self.take(emit, emit.reshape(emit.iota(emit.product(sizes), self.every), sizes), [])
        return emit.reshape(found, [emit.product(emit.sizes(found))])

    def take(self, emit: Emitter, found: Node, columns: list[Any]) -> Node:
        """These rows of `found`, a value with the rows of `every` and then `columns`."""
        for kind, dim, *rest in self.moves:
            if kind == "view":
                found = emit.reshape(found, [*emit.sizes(rest[0])[:-1], *columns])
            elif kind == "select":
                found = emit.call(aten.select.int, found, dim, *rest)
            else:
                found = emit.call(aten.slice.Tensor, found, dim, *rest)
        return found


def taken(node: Node) -> Part | None:
    """The rows `node`, [..., V], takes from a larger value; None if it takes all."""
    moves: list[Move] = []
    while node.op == "call_function":
        inner = node.args[0]
        if not isinstance(inner, Node) or not same_columns(node, inner):
            break
        if node.target in SAME_ROWS:
            moves.append(("view", None, node))
        elif (
            node.target in TAKES
            and node.target not in BY_NUMBERS
            and (move := move_of(node, inner, 1)) is not None
        ):
            moves.append(move)
        elif (piece := piece_of(node)) is not None:
            inner, move = piece
            moves.append(move)
        else:
            break
        node = inner
    return _part(node, moves[::-1])


def piece_of(node: Node) -> tuple[Node, Move] | None:
    """The value with `node` as a piece of its rows, and the slice or selection taking it."""
    found = split_of(node)
    return None if found is None or _is_of_columns(found[1], found[0]) else found


def split_of(node: Node) -> tuple[Node, Move] | None:
    """The same in any dimension."""
    split: Any = node.args[0] if node.target is operator.getitem else node
    if split is node or split.target not in SPLITS:
        return None
    every, place, is_one = split.args[0], cast(int, node.args[1]), split.target is aten.unbind.int
    dim = (split.args[1 if is_one else 2 :] or (0,))[0] % rank_of(every)
    if is_one:
        return every, ("select", dim, place)
    sizes = [each.shape[dim] for each in value(split)[: place + 1]]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return every, ("slice", dim, sum(sizes[:-1]), sum(sizes), 1)


def span(move: Move) -> tuple[int, int, int, int] | None:
    """(dimension, start, stop, step) of a slice or selection; None if they are no numbers."""
    kind, dim, *rest = move
    if kind == "view" or not all(isinstance(each, int) for each in rest):
        return None
    return (dim, rest[0], rest[0] + 1, 1) if kind == "select" else (dim, *rest)


def put(node: Node) -> Part | None:
    """The rows at which the graph puts those of `node` among zeros, if it has no other reader."""
    moves: list[Move] = []
    last, found = node, 0
    while len(node.users) == 1:
        (outer,) = node.users
        if not same_columns(outer, node):
            break
        if outer.target in SAME_ROWS:
            moves.append(("view", None, node))
        elif (
            outer.target not in BY_NUMBERS
            and rows_put(outer) is node
            and (move := move_of(outer, outer, 2)) is not None
        ):
            moves.append(move)
            last, found = outer, len(moves)
        else:
            break
        node = outer
    return _part(last, moves[:found][::-1])


def _part(every: Node, moves: list[Move]) -> Part | None:
    """Without moves changing nothing; None if they take all rows."""
    kept: list[Move] = []
    for at, move in enumerate(moves):
        behind = moves[at + 1][0] if at + 1 < len(moves) else "view"  # in the end one dimension
        if move[0] != "view" or behind != "view":
            kept.append(move)
    shape = shape_of(every)
    if kept and kept[0][0] == "view" and same_shape(shape_of(kept[0][2])[:-1], shape[:-1]):
        del kept[0]
    if all(move[0] == "view" for move in kept):
        return None
    return Part(every, tuple(kept))


def same_columns(one: Node, other: Node) -> bool:
    if not all(isinstance(value(each), torch.Tensor) for each in (one, other)):
        return False
    left, right = shape_of(one), shape_of(other)
    return len(left) > 1 and len(right) > 1 and same(left[-1], right[-1])


def move_of(node: Node, every: Node, first: int) -> Move | None:
    """The arguments of a slice or selection of rows of `every`, in one spelling; None for one of columns."""
    found = cut_of(node, every, first)
    return None if _is_of_columns(found, every) else found


def _is_of_columns(move: Move, every: Node) -> bool:
    return bool(move[1] == rank_of(every) - 1)


def cut_of(node: Node, every: Node, first: int) -> Move:
    """The same in any dimension. `first`: the number of the first of these arguments."""
    kind = TAKES.get(node.target) or PUTS[node.target]
    args: tuple[Any, ...] = node.args[first:] or (0,)
    dim, *rest = args
    at = dim % rank_of(every)
    size = shape_of(every)[at]
    if kind == "select":
        (number,) = rest
        return kind, at, number % size if isinstance(number, int) else number
    defaults: list[Any] = [None, None, 1]
    start, end, step = rest + defaults[len(rest) :]
    start = 0 if start is None else start
    end = 2**63 - 1 if end is None else end
    if all(isinstance(each, int) for each in (start, end, size)):
        start, end, _ = slice(start, end).indices(size)
    return kind, at, start, end, step


def is_of_rows(node: Node) -> bool:
    """Whether a take or a put is one of rows, and not of columns."""
    takes = node.target in TAKES
    every: Node = node.all_input_nodes[0] if takes else node
    if node.target in BY_NUMBERS:
        indices: Any = node.args[1]
        known = all(each is not None and value(each).dtype in _NUMBERS for each in indices)
        return known and sum(map(_dims_of, indices)) < len(shape_of(every))
    return move_of(node, every, 1 if takes else 2) is not None


def _dims_of(index: Node) -> int:
    return len(shape_of(index)) if value(index).dtype == torch.bool else 1


def rows_put(node: Node) -> Node | None:
    """The rows put among zeros; None if they are put into other values, or one row replaces another."""
    if node.target not in PUTS or not is_of_rows(node):
        return None
    if node.target in _BACKWARD:
        return node.args[0]  # type: ignore[return-value]
    by_numbers = node.target in BY_NUMBERS
    if by_numbers and node.args[3:] != (True,):
        return None
    into, written = node.args[0], node.args[2 if by_numbers else 1]
    return written if isinstance(into, Node) and is_zero(into) else None  # type: ignore[return-value]
