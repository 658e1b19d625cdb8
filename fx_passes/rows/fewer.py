"""Work on all rows of which only a part is read or is not zero: it moves to that part.

    (h @ w / t)[:, :-1]                  ->  h[:, :-1] @ w / t
    (zeros; zeros[:, :-1] = g) / t @ w   ->  zeros; zeros[:, :-1] = g / t @ w

Entry point: `work_on_parts`. Rows that no node reads are not computed: their gradient is zero, whatever is in them.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
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
    rank_of,
    same,
    same_shape,
    shape_of,
    value,
)
from fx_passes.graph.operators import (
    CASTS,
    RESHAPES,
    SAME_VALUE,
    SPLITS,
    TURNS,
    is_elementwise,
    is_pure,
    is_transpose,
    is_zero,
    read_back,
    under,
    written_over,
)
from fx_passes.graph.order import is_dead, tidy
from fx_passes.graph.user_lines import source_of
from fx_passes.rows.parts import BY_NUMBERS, PUTS, TAKES, is_of_rows, rows_put, same_columns
from fx_passes.torch_private import detect_fake_mode

__all__ = ["takes_of_heads", "work_on_parts"]

aten = torch.ops.aten

_HEADS: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1}
"""Matmuls, and the argument whose rows are those of the result."""
_SHOWN = RESHAPES | {aten.alias.default, aten.detach.default}
_FACTORS = _SHOWN | TURNS
_PRODUCTS = (aten.mul.Tensor, aten.div.Tensor)
_SCALES: set[Any] = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}


def work_on_parts(
    graph: Graph, min_vocab: int, of_heads: bool = False, share: float = 1.0
) -> tuple[int, tuple[str, ...]]:
    """Moves arithmetic and matmuls to where there are fewer rows: how many nodes that makes, and what a user reads.

    Args:
        of_heads: only what a matmul makes; given logits stay as they are.
        share: of a matmul's rows; where more are taken, it stays, since what it reads would be copied.
    """
    fake_mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    if fake_mode is None or (of_heads and not takes_of_heads(graph, min_vocab)):
        return 0, ()
    emit = Emitter(graph, fake_mode)
    asked = [node for node in graph.nodes if _is_asked_for_size(node, min_vocab)]
    for node in graph.nodes:
        first = node if node in asked else emit.adopt(node)
        if node.target in TAKES:
            node.replace_all_uses_with(first)
    with graph.inserting_before(graph.output_node()):
        _answer(emit, asked)
        work = _Work(emit, min_vocab, share, of_heads)
        work.spell_alike()
        work.expand_operands()
        if of_heads:
            work.put_last()
        work.take_first()
        if work.heads or not of_heads:
            work.put_last()
    tidy(graph)
    _make_in_forward(graph)
    return len(emit.created), tuple(work.notes())


def takes_of_heads(graph: Graph, min_vocab: int) -> bool:
    """Whether rows are taken of what a matmul makes."""
    return any(_is_of_head(node) and is_wide(node, min_vocab) for node in graph.nodes)


def _is_of_head(node: Node) -> bool:
    """Whether it takes rows of what a matmul makes, or of a function of each element of that."""
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    takes = node.target in SPLITS or (node.target in TAKES and is_of_rows(node))
    return takes and _head_under(node.args[0]) is not None


def _head_under(node: Any) -> Node | None:
    """The matmul of which `node` is a function, element by element and with numbers of each row."""
    below: Node | None = node
    while below is not None and below.target not in _HEADS:
        below = under(below, _SHOWN) if below.target in _SHOWN else _operand(below)
    return below


def _operand(point: Node) -> Node | None:
    """The one of which `point` is a function, element by element and with numbers of each row."""
    if not is_elementwise(point) or not is_pure(point) or point.target in SAME_VALUE:
        return None
    operands = [each for each in point.all_input_nodes if rank_of(each)]
    wide = [each for each in operands if _same_rows(point, each)]
    rest = [each for each in operands if each not in wide]
    return wide[0] if len(wide) == 1 and all(_is_of_each_row(n, point) for n in rest) else None


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


def _make_in_forward(graph: Graph) -> None:
    """What forward reads, which may be an equal node of backward."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not is_backward(node):
            for each in node.all_input_nodes:
                each.meta.pop(TAG, None)


class _Work:
    """The edits.

    Attributes:
        heads: factors of matmuls that were moved.
        first: the user's matmul of each that was made of it.
        rows: of each of the user's matmuls that was moved, how many rows are taken of how many.
        places: where masks of rows are true, by dimensions.
    """

    def __init__(self, emit: Emitter, min_vocab: int, share: float, of_heads: bool) -> None:
        self.emit, self.min_vocab = emit, min_vocab
        self.share, self.of_heads = share, of_heads
        self.heads: set[Node] = set()
        self.first: dict[Node, Node] = {}
        self.rows: dict[Node, tuple[Any, Any]] = {}
        self.places: dict[Node, list[Node]] = {}

    def notes(self) -> Iterator[str]:
        for node, (rows, every) in self.rows.items():
            source = source_of(node)
            where = f" of the logits at {source}" if source else ""
            yield f"rows computed: {_told(rows)} of {_told(every)}{where}; the others are unread"

    def _wide(self) -> list[Node]:
        return [node for node in self.emit.graph.nodes if is_wide(node, self.min_vocab)]

    # ---- one spelling ---------------------------------------------------------------------------------------------

    def spell_alike(self) -> None:
        """Slices and numbers of rows, where rows are left out.

        split(x, n)[1]        ->  x[n : 2 * n]
        cat([zeros, g])       ->  zeros; zeros[n:] = g
        x[mask]               ->  x[nonzero(mask)]
        x[n:] = g; x[n:]      ->  g
        cat([a, b]) as [2, N, V]  ->  cat([a as [1, N, V], b as [1, N, V]])
        zeros; zeros[n:] = a; zeros[n:] = b  ->  zeros; zeros[n:] = b
        """
        spellings: dict[Any, Callable[[Node], Node | None]] = {
            aten.view.default: self._stacked,
            aten.slice.Tensor: read_back,
            aten.select.int: read_back,
            aten.slice_scatter.default: self._overwritten,
            aten.select_scatter.default: self._overwritten,
            aten.add.Tensor: _added_to_zero,
            operator.getitem: self._piece,
            aten.cat.default: self._joined,
            aten.index.Tensor: self._by_mask,
            aten.index_put.default: self._by_mask,
        }
        for node in self._wide():
            self.emit.origin = node
            made = spellings[node.target](node) if node.target in spellings else None
            if made is not None:
                node.replace_all_uses_with(made)

    def _by_mask(self, node: Node) -> Node | None:
        args: Any = node.args
        every, masks, *rest = args
        mask = masks[0] if len(masks) == 1 else None
        if mask is None or value(mask).dtype != torch.bool:
            return None
        bound = node.meta.get("unbacked_bindings")
        if node.target is aten.index.Tensor and bound and _head_under(every) is not None:
            count: Any = shape_of(node)[0]
            places = self.emit.nonzero(mask, count)
            places.meta["unbacked_bindings"] = bound
            dims = range(rank_of(mask))
            self.places[mask] = [self.emit.call(aten.select.int, places, 1, dim) for dim in dims]
        if mask not in self.places:
            return None
        return self.emit.call(node.target, every, self.places[mask], *rest, **node.kwargs)

    def _piece(self, node: Node) -> Node | None:
        split: Node = node.args[0]  # type: ignore[assignment]
        if split.target not in SPLITS:
            return None
        every: Any = split.args[0]
        dim = (
            (split.args[1:] or (0,))[-1]
            if split.target is aten.unbind.int
            else (split.args[2:] or (0,))[0]
        )
        at, sizes = _dim(dim, every), [shape_of(each) for each in value(split)]
        unread = len(split.users) < len(sizes)
        if not unread or at is None:
            return None
        place: int = node.args[1]  # type: ignore[assignment]
        if split.target is aten.unbind.int:
            return self.emit.call(aten.select.int, every, at, place)
        start = sum(size[at] for size in sizes[:place])
        return self._slice(every, at, start, start + sizes[place][at])

    def _slice(self, every: Node, at: int, start: Any, end: Any) -> Node | None:
        if not all(isinstance(each, int) for each in (start, end)):
            return None
        return self.emit.call(aten.slice.Tensor, every, at, start, end)

    def _joined(self, node: Node) -> Node | None:
        pieces: Any = node.args[0]
        at = _dim((node.args[1:] or (0,))[0], node)
        kept = [not is_zero(each) for each in pieces]
        if at is None or all(kept) or not any(kept):
            return None
        ends = list(itertools.accumulate(shape_of(each)[at] for each in pieces))
        if not all(isinstance(end, int) for end in ends):
            return None
        zeros = self.emit.full(self.emit.sizes(node), 0, value(node).dtype, node)
        puts = [
            self.emit.call(aten.slice_scatter.default, zeros, each, at, start, end)
            for each, keep, start, end in zip(pieces, kept, [0, *ends], ends, strict=False)
            if keep
        ]
        return self._sum(puts)

    def _stacked(self, node: Node) -> Node | None:
        """A stack, which torch spells as pieces one behind the other and a view of them."""
        joined: Any = node.args[0]
        if joined.target is not aten.cat.default or joined.args[1:] not in ((), (0,)):
            return None
        pieces, shape = joined.args[0], shape_of(node)
        if not all(same_shape([len(pieces), *shape_of(each)], shape) for each in pieces):
            return None
        apart = [self.emit.reshape(each, [1, *self.emit.sizes(each)]) for each in pieces]
        return self.emit.call(aten.cat.default, apart)

    def _overwritten(self, node: Node) -> Node | None:
        """What is put among zeros, without what it replaces there."""
        base = written_over(node)
        if base is None or base is node.args[0] or not is_zero(base):
            return None
        zeros = self.emit.full(self.emit.sizes(node), 0, value(node).dtype, node)
        written: Any = node.args[1]
        return zeros if is_zero(written) else self.emit.call(node.target, zeros, *node.args[1:])

    def _sum(self, nodes: Sequence[Node]) -> Node:
        return functools.reduce(
            lambda one, other: self.emit.call(aten.add.Tensor, one, other), nodes
        )

    def expand_operands(self) -> None:
        """A number for some of the dimensions of rows becomes one for each row, as a view."""
        for node in self._wide():
            if is_elementwise(node):
                self._expand_operands_of(node)

    def _expand_operands_of(self, node: Node) -> None:
        shape = shape_of(node)
        for operand in node.all_input_nodes:
            if not isinstance(value(operand), torch.Tensor):
                continue
            own = shape_of(operand)
            lead = own[:-1] if len(own) == len(shape) else ()
            ones = [same(size, 1) for size in lead]
            if any(ones) and not all(ones) and not same_shape(lead, shape[:-1]):
                self.emit.origin = node
                sizes = [*self.emit.sizes(node)[:-1], self.emit.sizes(operand)[-1]]
                node.replace_input_with(operand, self.emit.expand(operand, sizes))

    # ---- takes first ----------------------------------------------------------------------------------------------

    def take_first(self) -> None:
        """take(f(x)) -> f(take(x)), until nothing moves: a value may be read in forward and in backward."""
        before = -1
        while before != (before := len(self.emit.created)):
            for node in self._wide():
                takes = node.target in TAKES and is_of_rows(node)
                if takes and node.users and (not self.of_heads or _is_of_head(node)):
                    self._take_first(node)

    def _take_first(self, node: Node) -> None:
        inner: Node = node.args[0]  # type: ignore[assignment]
        point = under(inner, _SHOWN)
        taken, every = _rows_taken(point), math.prod(shape_of(point)[:-1])
        if taken is None or not _fewer(taken, every):
            return
        self.emit.origin = point
        if point.target in _HEADS:
            if hint(taken) <= self.share * hint(every):
                self._take_before_matmul(node, point, taken)
        elif (operand := _operand(point)) is not None:
            self._take_before_point(node, point, operand)

    def _take_before_point(self, node: Node, point: Node, operand: Node) -> None:
        """take(f(x, number of each row)) -> f(take(x), take(number of each row))"""
        operands = [each for each in point.all_input_nodes if rank_of(each)]
        if len(operands) > 1 and not self.of_heads:
            return
        taken = {each: self._taken(node, node.args[0], each) for each in operands}
        if None in taken.values():
            return
        found, kwargs = map_arg((point.args, point.kwargs), lambda each: taken.get(each, each))
        node.replace_all_uses_with(self.emit.call(point.target, *found, **kwargs))
        rows: Any = taken[operand]
        if rows.target in TAKES:
            self._take_first(rows)

    def _take_before_matmul(self, node: Node, point: Node, taken: Any) -> None:
        """take(h @ w) -> take(h) @ w"""
        args: list[Any] = list(point.args)
        at = _HEADS[point.target]
        rows = self._taken(node, node.args[0], args[at])
        if rows is None:
            return
        args[at] = self._flat(rows)
        self.heads.update(under(each, _FACTORS) for each in point.all_input_nodes)
        made = self.emit.call(point.target, *args, **point.kwargs)
        node.replace_all_uses_with(self.emit.reshape(made, self.emit.sizes(node)))
        first = self.first[made] = self.first.get(point, point)
        every = math.prod(shape_of(point)[:-1])
        if first is point:
            self.rows.setdefault(point, (taken, every))
        else:
            rows, total = self.rows[first]
            self.rows[first] = (rows - every + taken, total)

    def _taken(self, node: Node, inner: Any, of: Any) -> Node | None:
        """What `node` takes of `inner`, taken of `of`, which has as many rows; None where that would be a copy."""
        if not viewable(value(of), [*shape_of(inner)[:-1], shape_of(of)[-1]]):
            return None
        every = self.emit.reshape(of, [*self.emit.sizes(inner)[:-1], self.emit.sizes(of)[-1]])
        return self._take(node, every)

    def _take(self, node: Node, every: Node) -> Node:
        """What `node` takes, taken of `every`."""
        return self.emit.call(node.target, every, *node.args[1:], **node.kwargs)

    def _flat(self, node: Node) -> Node:
        *lead, columns = self.emit.sizes(node)
        return self.emit.reshape(node, [self.emit.product(lead), columns])

    # ---- puts last ------------------------------------------------------------------------------------------------

    def put_last(self) -> None:
        """f(put(zeros, rows)) -> put(zeros, f(rows)), for what reads a put or a sum of puts."""
        before = -1
        while before != (before := len(self.emit.created)):
            for node in self._wide():
                if _puts_in(node):
                    self._put_last(node)

    def _put_last(self, node: Node) -> None:
        for outer, turned in _readers(node):
            self.emit.origin = outer
            made = self._products(node, outer) if self._is_of_moved(outer) else None
            if made is None and (made := self._turned_round(node, outer)) is not None:
                made = self._shown(made, outer, turned)
            if made is not None:
                outer.replace_all_uses_with(made)
                below = under(made, _FACTORS)
                if _puts_in(below):
                    self._put_last(below)

    def _shown(self, made: Node, outer: Node, turned: bool) -> Node:
        """`made`, which has its rows first, in the shape of `outer`."""
        sizes = self.emit.sizes(outer)
        if not turned:
            return self.emit.reshape(made, sizes)
        return self.emit.call(aten.permute.default, self.emit.reshape(made, sizes[::-1]), [1, 0])

    def _is_of_moved(self, outer: Node) -> bool:
        """A gradient of a matmul that was moved: where its logits are of all rows, so is their gradient."""
        of_head = any(under(each, _FACTORS) in self.heads for each in outer.all_input_nodes)
        return of_head or (bool(self.heads) and outer.target is aten.sum.dim_IntList)

    def _products(self, node: Node, outer: Node) -> Node | None:
        """A matmul of what is put, by its columns or over its rows, or its sum over the rows."""
        made = [self._product(put, node, outer) for put in _puts_in(node)]
        return None if None in made else self._sum(made)  # type: ignore[arg-type]

    def _product(self, put: Node, node: Node, outer: Node) -> Node | None:
        """The part of `outer`, a product of `node`, that is of `put`."""
        rows = rows_put(put)
        assert rows is not None, put
        if outer.target is aten.mm.default:
            left, right = outer.args
            if under(left, _SHOWN) is node:  # type: ignore[arg-type]
                made = self.emit.call(aten.mm.default, self._flat(rows), right)
                sizes = [*self.emit.sizes(rows)[:-1], self.emit.sizes(made)[-1]]
                among = self._put(put, self.emit.reshape(made, sizes))
                return self.emit.reshape(among, self.emit.sizes(outer))
            turned = is_transpose(left) and under(left.args[0], _SHOWN) is node  # type: ignore[arg-type, union-attr]
            if turned and (taken := self._taken_as_put(put, right)) is not None:
                first = self.emit.call(aten.permute.default, self._flat(rows), [1, 0])
                return self.emit.call(aten.mm.default, first, self._flat(taken))
        if outer.target is aten.sum.dim_IntList and outer.args[1:2] == ([0],):
            return self.emit.call(outer.target, self._flat(rows), *outer.args[1:], **outer.kwargs)
        return None

    def _put(self, node: Node, rows: Node) -> Node:
        """`rows`, put as `node` puts its own."""
        emit = self.emit
        if node.target in (aten.slice_backward.default, aten.select_backward.default):
            lead: Any = node.args[1]
            sizes = [*lead[:-1], emit.sizes(rows)[-1]]
            return emit.call(node.target, rows, sizes, *node.args[2:])
        zeros = emit.full(
            [*emit.sizes(node)[:-1], emit.sizes(rows)[-1]], 0, value(rows).dtype, node
        )
        if node.target in BY_NUMBERS:
            return emit.call(node.target, zeros, node.args[1], rows, *node.args[3:])
        return emit.call(node.target, zeros, rows, *node.args[2:])

    def _taken_as_put(self, node: Node, of: Any) -> Node | None:
        """The rows of `of`, [all rows..., D], among which `node` puts its own; None where that would be a copy."""
        emit = self.emit
        if not viewable(value(of), [*shape_of(node)[:-1], shape_of(of)[-1]]):
            return None
        every = emit.reshape(of, [*emit.sizes(node)[:-1], emit.sizes(of)[-1]])
        if node.target in BY_NUMBERS:
            return emit.call(aten.index.Tensor, every, node.args[1])
        target = aten.slice.Tensor if PUTS[node.target] == "slice" else aten.select.int
        return emit.call(target, every, *node.args[2:])

    def _turned_round(self, node: Node, outer: Node) -> Node | None:
        """A cast, a product with a number or with what a head makes, a sum of what is put alike."""
        if rows_put(node) is None:
            return None
        rows: Any = rows_put(node)
        # rows put by their numbers may be added, in the wider dtype
        once = node.target not in BY_NUMBERS
        if once and outer.target in CASTS and value(outer).dtype.is_floating_point:
            cast = self.emit.call(outer.target, rows, *outer.args[1:], **outer.kwargs)
            return self._put(node, cast)
        if _is_scaled(outer):
            return self._put(node, self.emit.call(outer.target, rows, outer.args[1]))
        if once and self.of_heads and (by := _factor(node, outer)) is not None:
            taken = self._taken_as_put(node, by)
            if taken is not None:
                return self._put(node, self.emit.call(outer.target, rows, taken))
        if _are_put_alike(outer):
            one, other = (rows_put(under(each, _SHOWN)) for each in outer.all_input_nodes)
            return self._put(node, self.emit.call(aten.add.Tensor, one, other))
        return None


def _added_to_zero(node: Node) -> Node | None:
    """x + 0"""
    if node.kwargs or len(node.all_input_nodes) != 2:
        return None
    one, other = node.all_input_nodes
    zero, rest = (one, other) if is_zero(one) else (other, one)
    same_kind = value(rest).dtype == value(node).dtype and _same_rows(rest, node)
    return rest if is_zero(zero) and same_kind else None


def _told(rows: Any) -> str:
    return f"{rows:,}" if isinstance(rows, int) else str(rows)


def _dim(dim: Any, node: Node) -> int | None:
    """A dimension of rows; None of columns."""
    rank = len(shape_of(node))
    return dim % rank if dim % rank != rank - 1 else None


def _fewer(taken: Any, every: Any) -> bool:
    return hint(taken) < hint(every)


def _is_of_each_row(node: Node, point: Node) -> bool:
    """[..., 1] beside `point`, [..., V], be it one number for several rows."""
    if rank_of(node) != rank_of(point) or not same(shape_of(node)[-1], 1):
        return False
    pairs = zip(shape_of(node)[:-1], shape_of(point)[:-1], strict=True)
    return all(same(own, size) or same(own, 1) for own, size in pairs)


def _same_rows(one: Node, other: Node) -> bool:
    return same_shape(shape_of(one), shape_of(other))


def _rows_taken(node: Node) -> Any:
    """How many rows are taken of it; None where something reads all of them."""
    takes = _takes_of(node)
    if takes is None:
        return None
    different = {str((each.target, each.args[1:], shape_of(each))): each for each in takes}
    return sum(math.prod(shape_of(each)[:-1]) for each in different.values())


def _takes_of(node: Node) -> list[Node] | None:
    found = []
    for user in node.users:
        if is_dead(user):
            continue
        if user.target in TAKES and is_of_rows(user):
            found.append(user)
            continue
        shows = user.target in _SHOWN and same_columns(user, node)
        takes = _takes_of(user) if shows else None
        if takes is None:
            return None
        found += takes
    return found


def _readers(node: Node, turned: bool = False) -> list[tuple[Node, bool]]:
    """What reads `node`, in whatever shape, and whether it reads [V, N]."""
    found = []
    for user in node.users:
        if user.target in _SHOWN and same_columns(user, node):
            found += _readers(user, turned)
        elif is_transpose(user):
            found += _readers(user, not turned)
        else:
            found.append((user, turned))
    return found


def _puts_in(node: Node) -> list[Node]:
    """Those whose sum `node` is; none where it is something else."""
    if rows_put(node) is not None:
        return [node]
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return []
    one, other = node.all_input_nodes
    if not (_same_rows(one, node) and _same_rows(other, node)):
        return []
    found = [_puts_in(under(each, _SHOWN)) for each in (one, other)]
    return found[0] + found[1] if all(found) else []


def _is_scaled(outer: Node) -> bool:
    if outer.target not in _SCALES or outer.kwargs or not isinstance(outer.args[0], Node):
        return False
    number = outer.args[1]
    return isinstance(number, (int, float)) and math.isfinite(number) and number != 0


def _factor(node: Node, outer: Node) -> Node | None:
    """What the put `node` is multiplied with or divided by: a number of each row, or a function of a head's logits."""
    if outer.target not in _PRODUCTS or outer.kwargs or len(outer.all_input_nodes) != 2:
        return None
    one, by = outer.all_input_nodes
    if under(one, _SHOWN) is not node and outer.target is aten.mul.Tensor:
        one, by = by, one
    of_row = _is_of_each_row(by, outer)
    of_head = _same_rows(by, outer) and _head_under(by) is not None
    return by if under(one, _SHOWN) is node and (of_row or of_head) else None


def _are_put_alike(outer: Node) -> bool:
    if outer.target is not aten.add.Tensor or outer.kwargs or len(outer.all_input_nodes) != 2:
        return False
    one, other = (under(each, _SHOWN) for each in outer.all_input_nodes)
    if None in (rows_put(one), rows_put(other)):
        return False
    same_places = one.target is other.target and _where(one) == _where(other)
    alike = _same_rows(one, other) and value(one).dtype == value(other).dtype
    return same_places and alike and _same_rows(*outer.all_input_nodes)


def _where(node: Node) -> tuple[Any, ...]:
    """The arguments of a put that say where."""
    if node.target in BY_NUMBERS:
        return node.args[1], *node.args[3:]
    return node.args[2:]
