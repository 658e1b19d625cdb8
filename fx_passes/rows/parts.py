"""Rows that are a part of all rows: which of them a value has, as row numbers that the graph computes.

    shifted = logits[:, :-1]                the rows of `shifted` are a part of those of `logits`
    d logits = zeros; d logits[:, :-1] = g  the rows of `g` are put among all rows

Entry points: `taken`, `put`. Both follow slices, selections and reshapes of the dimensions before the columns. The same
operations, done to [0, 1, 2, ...], give the number of each row: a loop reads and writes rows by their numbers, and
neither a copy of the part nor a second buffer of all rows exists. `work_on_parts` moves arithmetic to the part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fx_passes.graph.emit import Emitter, viewable
from fx_passes.graph.facts import (
    TAG,
    hint,
    is_backward,
    is_wide,
    same,
    same_shape,
    shape_of,
    value,
)
from fx_passes.graph.operators import (
    CASTS,
    RESHAPES,
    SAME_ROWS,
    SAME_VALUE,
    TURNS,
    is_elementwise,
    is_pure,
    is_zero,
    under,
)
from fx_passes.graph.order import tidy
from fx_passes.graph.rows import Block
from fx_passes.torch_private import detect_fake_mode

__all__ = ["Part", "put", "taken", "takes_of_heads", "work_on_parts"]

aten = torch.ops.aten
Move = tuple[Any, ...]
"""("view", None, node with this shape), ("slice", dim, start, end, step) or ("select", dim, number)."""

_TAKES: dict[Any, str] = {
    aten.slice.Tensor: "slice",
    aten.select.int: "select",
    aten.index.Tensor: "numbers",
}
_PUTS: dict[Any, str] = {
    aten.slice_scatter.default: "slice",
    aten.select_scatter.default: "select",
    aten.slice_backward.default: "slice",
    aten.select_backward.default: "select",
    aten.index_put.default: "numbers",
}
_BY_NUMBERS = (aten.index.Tensor, aten.index_put.default)
_HEADS: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1}
"""Matmuls, and the argument whose rows are those of the result."""
_FACTORS = RESHAPES | TURNS

_BACKWARD = (aten.slice_backward.default, aten.select_backward.default)
_SCALES: set[Any] = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}


@dataclass(frozen=True)
class Part:
    """Some rows of `every`, in this order.

    Attributes:
        every: the value that has all rows, [..., V].
        moves: from the row numbers of `every` to those of the part.
    """

    every: Node
    moves: tuple[Move, ...]

    @property
    def block(self) -> Block:
        return Block(0, len(shape_of(self.every)) - 1)

    @property
    def key(self) -> str:
        """Equal for parts that have the same rows of values with equally many."""
        spelled = [("view", shape_of(m[2])[:-1]) if m[0] == "view" else m for m in self.moves]
        return str((shape_of(self.every)[:-1], spelled))

    def numbers(self, emit: Emitter) -> Node:
        """The row numbers, [n]."""
        sizes = emit.sizes(self.every)[:-1]
        found = emit.iota(emit.product(sizes), self.every)
        found = emit.reshape(found, sizes)
        for kind, dim, *rest in self.moves:
            if kind == "view":
                found = emit.reshape(found, emit.sizes(rest[0])[:-1])
            elif kind == "select":
                found = emit.call(aten.select.int, found, dim, *rest)
            else:
                found = emit.call(aten.slice.Tensor, found, dim, *rest)
        return emit.reshape(found, [emit.product(emit.sizes(found))])


def taken(node: Node) -> Part | None:
    """The rows that `node`, [..., V], takes of a larger value; None where it takes all."""
    moves: list[Move] = []
    while node.op == "call_function":
        inner = node.args[0]
        if not isinstance(inner, Node) or not _same_columns(node, inner):
            break
        if node.target in SAME_ROWS:
            moves.append(("view", None, node))
        elif (
            node.target in _TAKES
            and node.target not in _BY_NUMBERS
            and (move := _moved(node, inner, 1)) is not None
        ):
            moves.append(move)
        else:
            break
        node = inner
    return _part(node, moves[::-1])


def put(node: Node) -> Part | None:
    """Among which rows the graph puts those of `node`, zero in the others, where nothing else becomes of it."""
    moves: list[Move] = []
    last, found = node, 0
    while len(node.users) == 1:
        (outer,) = node.users
        if not _same_columns(outer, node):
            break
        if outer.target in SAME_ROWS:
            moves.append(("view", None, node))
        elif (
            outer.target not in _BY_NUMBERS
            and _rows_of(outer) is node
            and (move := _moved(outer, outer, 2)) is not None
        ):
            moves.append(move)
            last, found = outer, len(moves)
        else:
            break
        node = outer
    return _part(last, moves[:found][::-1])


def _part(every: Node, moves: list[Move]) -> Part | None:
    """Without moves that change nothing; None where no row is left out."""
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


def _same_columns(one: Node, other: Node) -> bool:
    if not all(isinstance(value(each), torch.Tensor) for each in (one, other)):
        return False
    left, right = shape_of(one), shape_of(other)
    return len(left) > 1 and len(right) > 1 and same(left[-1], right[-1])


def _moved(node: Node, every: Node, first: int) -> Move | None:
    """The arguments of a slice or selection of `every`, spelled alike; None where it is one of columns."""
    kind = _TAKES.get(node.target) or _PUTS[node.target]
    args: tuple[Any, ...] = node.args[first:] or (0,)
    dim, *rest = args
    shape = shape_of(every)
    at = dim % len(shape)
    if at == len(shape) - 1:
        return None
    size = shape[at]
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


# ---- fewer rows ---------------------------------------------------------------------------------------------------


def work_on_parts(graph: Graph, min_vocab: int, of_heads: bool = False, share: float = 1.0) -> int:
    """Moves arithmetic and matmuls to where there are fewer rows, and says how many nodes that made.

        (h @ w / t)[:, :-1]                  ->  h[:, :-1] @ w / t
        (zeros; zeros[:, :-1] = g) / t @ w   ->  zeros; zeros[:, :-1] = g / t @ w

    Args:
        of_heads: only what a matmul makes; given logits stay as they are.
        share: of a matmul's rows; where more are taken, it stays, since what it reads would be copied.
    """
    fake_mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    moves = [node for node in graph.nodes if _is_move(node) and is_wide(node, min_vocab)]
    takes = [n for n in moves if n.target in _TAKES and (not of_heads or _is_of_head(n))]
    if of_heads and not takes:
        return 0
    if fake_mode is None:
        return 0
    asked = [node for node in graph.nodes if _is_asked_for_size(node, min_vocab)]
    partial = [node for node in graph.nodes if is_wide(node, min_vocab) and is_elementwise(node)]
    emit = Emitter(graph, fake_mode)
    for node in graph.nodes:
        if node not in asked:
            emit.adopt(node)
    heads: set[Node] = set()
    with graph.inserting_before(graph.output_node()):
        _answer(emit, asked)
        for node in partial:
            _expand_operands(emit, node)
        for node in takes:
            _take_first(emit, node, share, heads)
        for node in (n for n in moves if n.target in _PUTS and (heads or not of_heads)):
            _put_last(emit, node, heads)
    tidy(graph)
    _make_in_forward(graph)
    return len(emit.created)


def _make_in_forward(graph: Graph) -> None:
    """What forward reads, which may be an equal node of backward."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not is_backward(node):
            for each in node.all_input_nodes:
                each.meta.pop(TAG, None)


def _is_move(node: Node) -> bool:
    if node.target in _TAKES:
        return _is_of_rows(node, node.all_input_nodes[0], 1)
    return _rows_of(node) is not None and _is_of_rows(node, node, 2)


def _is_of_rows(node: Node, every: Node, first: int) -> bool:
    if node.target in _BY_NUMBERS:
        indices: Any = node.args[1]
        numbers = None not in indices and all(value(n).dtype == torch.int64 for n in indices)
        return numbers and len(indices) < len(shape_of(every))
    return _moved(node, every, first) is not None


def takes_of_heads(graph: Graph, min_vocab: int) -> bool:
    """Whether rows are taken of what a matmul makes."""
    takes = (node for node in graph.nodes if node.target in _TAKES and _is_move(node))
    return any(is_wide(node, min_vocab) and _is_of_head(node) for node in takes)


def _is_of_head(node: Node) -> bool:
    """Whether it takes rows of what a matmul makes, or of a function of each element of that."""
    inner: Node = node.args[0]  # type: ignore[assignment]
    while inner.target in RESHAPES or (is_elementwise(inner) and len(inner.all_input_nodes) == 1):
        inner = inner.all_input_nodes[0]
    return inner.target in _HEADS


def _is_asked_for_size(node: Node, min_vocab: int) -> bool:
    if node.target is not aten.sym_size.int:
        return False
    (of,) = node.all_input_nodes
    return of.op == "call_function" and is_wide(of, min_vocab)


def _answer(emit: Emitter, asked: list[Node]) -> None:
    """What is asked for a size only is not computed for that."""
    for node in asked:
        size = emit.size_of(value(node).node.expr)
        if isinstance(size, Node):
            node.replace_all_uses_with(size)


def _expand_operands(emit: Emitter, node: Node) -> None:
    """A number for some of the dimensions of rows becomes one for each row, as a view."""
    shape = shape_of(node)
    for operand in node.all_input_nodes:
        if not isinstance(value(operand), torch.Tensor):
            continue
        own = shape_of(operand)
        lead = own[:-1] if len(own) == len(shape) else ()
        ones = [same(size, 1) for size in lead]
        if any(ones) and not all(ones) and not same_shape(lead, shape[:-1]):
            emit.origin = node
            sizes = [*emit.sizes(node)[:-1], emit.sizes(operand)[-1]]
            node.replace_input_with(operand, emit.expand(operand, sizes))


def _take_first(emit: Emitter, node: Node, share: float, heads: set[Node]) -> None:
    """take(f(x)) -> f(take(x)); `heads` gets the factors of matmuls that were moved."""
    inner: Node = node.args[0]  # type: ignore[assignment]
    point = under(inner, RESHAPES)
    taken, every = _rows_taken(point), math.prod(shape_of(point)[:-1])
    if taken is None or not hint(taken) < hint(every):
        return
    emit.origin = point
    if point.target in _HEADS:
        if hint(taken) > share * hint(every):
            return
        _take_before_matmul(emit, node, point, heads)
        return
    operands = point.all_input_nodes
    plain = is_elementwise(point) and is_pure(point) and len(operands) == 1
    if not plain or point.target in SAME_VALUE:
        return
    same_rows = same_shape(shape_of(point), shape_of(operands[0]))
    rows = _taken(emit, node, inner, operands[0]) if same_rows else None
    if rows is not None:
        found, kwargs = map_arg((point.args, point.kwargs), lambda _: rows)
        node.replace_all_uses_with(emit.call(point.target, *found, **kwargs))
        if rows.target in _TAKES:
            _take_first(emit, rows, share, heads)


def _take_before_matmul(emit: Emitter, node: Node, point: Node, heads: set[Node]) -> None:
    """take(h @ w) -> take(h) @ w"""
    args: list[Any] = list(point.args)
    at = _HEADS[point.target]
    rows = _taken(emit, node, node.args[0], args[at])
    if rows is None:
        return
    args[at] = _flat(emit, rows)
    heads.update(under(each, _FACTORS) for each in point.all_input_nodes)
    made = emit.call(point.target, *args, **point.kwargs)
    node.replace_all_uses_with(emit.reshape(made, emit.sizes(node)))


def _taken(emit: Emitter, node: Node, inner: Any, of: Any) -> Node | None:
    """What `node` takes of `inner`, taken of `of`, which has as many rows; None where that would be a copy."""
    sizes = [*emit.sizes(inner)[:-1], emit.sizes(of)[-1]]
    if not viewable(value(of), [*shape_of(inner)[:-1], shape_of(of)[-1]]):
        return None
    return emit.call(node.target, emit.reshape(of, sizes), *node.args[1:], **node.kwargs)


def _rows_taken(node: Node) -> Any:
    """How many rows are taken of it; None where something reads all of them."""
    total: Any = 0
    for user in node.users:
        if _is_dead(user):
            continue
        found: Any = None
        if user.target in _TAKES and _is_move(user):
            found = math.prod(shape_of(user)[:-1])
        elif user.target in RESHAPES and _same_columns(user, node):
            found = _rows_taken(user)
        if found is None:
            return None
        total = total + found
    return total


def _is_dead(node: Node) -> bool:
    return node.op == "call_function" and not node.is_impure() and all(map(_is_dead, node.users))


# ---- behind the put -----------------------------------------------------------------------------------------------


def _put_last(emit: Emitter, node: Node, heads: set[Node]) -> None:
    """f(put(zeros, rows)) -> put(zeros, f(rows)), for whatever reads `node`."""
    for outer in _readers(node):
        emit.origin = outer
        made = _product_of(emit, node, outer) if _is_of(outer, heads) else None
        if made is None and (made := _turned_round(emit, node, outer)) is not None:
            made = emit.reshape(made, emit.sizes(outer))
        if made is not None:
            outer.replace_all_uses_with(made)
            below = under(made, RESHAPES)
            if below.target in _PUTS and _rows_of(below) is not None:
                _put_last(emit, below, heads)


def _is_of(outer: Node, heads: set[Node]) -> bool:
    """A gradient of a matmul that was moved: where its logits are of all rows, so is their gradient."""
    of_head = any(under(each, _FACTORS) in heads for each in outer.all_input_nodes)
    return of_head or (bool(heads) and outer.target is aten.sum.dim_IntList)


def _readers(node: Node) -> list[Node]:
    """What reads `node`, in whatever shape."""
    found = []
    for user in node.users:
        shows = user.target in RESHAPES and _same_columns(user, node)
        turned = user.target in TURNS and len(shape_of(user)) == 2
        found += _readers(user) if shows or turned else [user]
    return found


def _rows_of(node: Node) -> Node | None:
    """The rows put among zeros; None where they are put into something else, or one row replaces another."""
    if node.target not in _PUTS:
        return None
    if node.target in _BACKWARD:
        return node.args[0]  # type: ignore[return-value]
    by_numbers = node.target in _BY_NUMBERS
    if by_numbers and node.args[3:] != (True,):
        return None
    into, written = node.args[0], node.args[2 if by_numbers else 1]
    return written if isinstance(into, Node) and is_zero(into) else None  # type: ignore[return-value]


def _put(emit: Emitter, node: Node, rows: Node) -> Node:
    """`rows`, put as `node` puts its own."""
    if node.target in _BACKWARD:
        lead: Any = node.args[1]
        return emit.call(node.target, rows, [*lead[:-1], emit.sizes(rows)[-1]], *node.args[2:])
    sizes = [*emit.sizes(node)[:-1], emit.sizes(rows)[-1]]
    zeros = emit.full(sizes, 0, value(rows).dtype, node)
    if node.target in _BY_NUMBERS:
        return emit.call(node.target, zeros, node.args[1], rows, *node.args[3:])
    return emit.call(node.target, zeros, rows, *node.args[2:])


def _flat(emit: Emitter, node: Node) -> Node:
    *lead, columns = emit.sizes(node)
    return emit.reshape(node, [emit.product(lead), columns])


def _product_of(emit: Emitter, node: Node, outer: Node) -> Node | None:
    """A matmul of what is put, by its columns or over its rows, or its sum over the rows."""
    rows = _rows_of(node)
    assert rows is not None, node
    if outer.target is aten.mm.default:
        left, right = outer.args
        if under(left, RESHAPES) is node:  # type: ignore[arg-type]
            made = emit.call(aten.mm.default, _flat(emit, rows), right)
            wide = emit.reshape(made, [*emit.sizes(rows)[:-1], emit.sizes(made)[-1]])
            return emit.reshape(_put(emit, node, wide), emit.sizes(outer))
        if _is_turned(left, node) and (taken := _taken_as_put(emit, node, right)) is not None:
            turned = emit.call(aten.permute.default, _flat(emit, rows), [1, 0])
            return emit.call(aten.mm.default, turned, taken)
    if outer.target is aten.sum.dim_IntList and outer.args[1:2] == ([0],):
        return emit.call(outer.target, _flat(emit, rows), *outer.args[1:], **outer.kwargs)
    return None


def _is_turned(left: Any, node: Node) -> bool:
    return (
        left.target in TURNS and len(shape_of(left)) == 2 and under(left.args[0], RESHAPES) is node
    )


def _taken_as_put(emit: Emitter, node: Node, right: Any) -> Node | None:
    """The rows of `right`, [all rows, D], among which `node` puts its own."""
    sizes = [*emit.sizes(node)[:-1], emit.sizes(right)[-1]]
    if not viewable(value(right), [*shape_of(node)[:-1], shape_of(right)[-1]]):
        return None
    every = emit.reshape(right, sizes)
    if node.target in _BY_NUMBERS:
        return _flat(emit, emit.call(aten.index.Tensor, every, node.args[1]))
    target = aten.slice.Tensor if _PUTS[node.target] == "slice" else aten.select.int
    return _flat(emit, emit.call(target, every, *node.args[2:]))


def _turned_round(emit: Emitter, node: Node, outer: Node) -> Node | None:
    """A cast, a product with a number, a sum of what is put alike."""
    rows = _rows_of(node)
    # rows put by their numbers may be added, in the wider dtype
    once = node.target not in _BY_NUMBERS
    if once and outer.target in CASTS and value(outer).dtype.is_floating_point:
        return _put(emit, node, emit.call(outer.target, rows, *outer.args[1:], **outer.kwargs))
    if _is_scaled(outer):
        return _put(emit, node, emit.call(outer.target, rows, outer.args[1]))
    if _are_put_alike(outer):
        one, other = (_rows_of(under(each, RESHAPES)) for each in outer.all_input_nodes)
        return _put(emit, node, emit.call(aten.add.Tensor, one, other))
    return None


def _is_scaled(outer: Node) -> bool:
    if outer.target not in _SCALES or outer.kwargs or not isinstance(outer.args[0], Node):
        return False
    number = outer.args[1]
    return isinstance(number, (int, float)) and math.isfinite(number) and number != 0


def _are_put_alike(outer: Node) -> bool:
    if outer.target is not aten.add.Tensor or outer.kwargs or len(outer.all_input_nodes) != 2:
        return False
    one, other = (under(each, RESHAPES) for each in outer.all_input_nodes)
    if None in (_rows_of(one), _rows_of(other)):
        return False
    same_rows = one.target is other.target and _where(one) == _where(other)
    alike = same_shape(shape_of(one), shape_of(other)) and value(one).dtype == value(other).dtype
    return same_rows and alike and same_shape(*(shape_of(n) for n in outer.all_input_nodes))


def _where(node: Node) -> tuple[Any, ...]:
    """The arguments of a put that say where."""
    if node.target in _BY_NUMBERS:
        return node.args[1], *node.args[3:]
    return node.args[2:]
