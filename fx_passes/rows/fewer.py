"""Work on all rows moves to a part of them, if only this part is read or not zero.

    (h @ w / t)[:, :-1]                  ->  h[:, :-1] @ w / t
    (zeros; zeros[:, :-1] = g) / t @ w   ->  zeros; zeros[:, :-1] = g / t @ w

Entry point: `work_on_parts`. Rows without a reader are not computed. Their gradient is zero, whatever their values are.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fx_passes.graph.aliases import Aliases
from fx_passes.graph.backward import is_tangent
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
    wide_nodes,
)
from fx_passes.graph.operators import (
    CASTS,
    RESHAPES,
    SAME_VALUE,
    SPLITS,
    TURNS,
    is_elementwise,
    is_pure,
    turns,
    under,
)
from fx_passes.graph.order import ancestors, is_dead, tidy
from fx_passes.graph.returned import Returned
from fx_passes.graph.user_lines import source_of
from fx_passes.refused import Refused
from fx_passes.rows.parts import BY_NUMBERS, PUTS, TAKES, is_of_rows, rows_put, same_columns
from fx_passes.rows.spelling import added, expand_operands, is_of_numbers, spell_alike
from fx_passes.torch_private import detect_fake_mode

__all__ = ["HEADS", "head_under", "takes_of_heads", "work_on_parts"]

aten = torch.ops.aten

HEADS: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1}
"""Matmuls, and the argument whose rows are those of the result."""
_SHOWN = RESHAPES | {aten.alias.default, aten.detach.default}
_FACTORS = _SHOWN | TURNS
_PRODUCTS = (aten.mul.Tensor, aten.div.Tensor)
_SCALES: set[Any] = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}


def work_on_parts(
    graph: Graph, min_vocab: int, of_heads: bool = False, share: float = 1.0
) -> tuple[int, tuple[str, ...]]:
    """Moves arithmetic and matmuls to fewer rows. Returns the number of new nodes, and the report's texts.

    Args:
        of_heads: only results of matmuls; given logits stay as they are.
        share: of a matmul's rows; if the program reads more, the matmul stays, because its operand would be copied.
    """
    fake_mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    if fake_mode is None or (of_heads and not takes_of_heads(graph, min_vocab)):
        return 0, ()
    emit, returned = Emitter(graph, fake_mode), Returned(graph)
    asked = [node for node in graph.nodes if _is_asked_for_size(node, min_vocab)]
    for node in graph.nodes:
        first = node if node in asked else emit.adopt(node)
        if node.target in TAKES:
            node.replace_all_uses_with(first)
    with graph.inserting_before(graph.output_node()):
        _answer(emit, asked, min_vocab)
        work = _Work(emit, min_vocab, share, of_heads)
        spell_alike(emit, min_vocab, work.returned, of_heads)
        expand_operands(emit, min_vocab)
        if of_heads:
            work.put_last()
        work.take_first()
        if work.heads or not of_heads:
            work.put_last()
    tidy(graph)
    returned.keep_apart(fake_mode, lambda node: is_wide(node, min_vocab))
    _make_in_forward(graph)
    return len(emit.created), tuple(work.notes())


def takes_of_heads(graph: Graph, min_vocab: int) -> bool:
    """Does the program take rows of a matmul's result?"""
    return any(_is_of_head(node) and is_wide(node, min_vocab) for node in graph.nodes)


def _is_of_head(node: Node) -> bool:
    """Does it take rows of a matmul's result, or of an element-wise function of it?"""
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    gathers = node.target is aten.gather.default and is_of_numbers(node)
    return (gathers or node.target in {*TAKES, *SPLITS}) and head_under(node.args[0]) is not None


def head_under(node: Any) -> Node | None:
    """The matmul below `node`, an element-wise function of its result and of numbers per row."""
    below: Node | None = node
    while below is not None and below.target not in HEADS:
        below = under(below, _SHOWN) if below.target in _SHOWN else _operand(below)
    return below


def _operand(point: Node) -> Node | None:
    """The value below `point`, an element-wise function of it and of numbers per row."""
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


def _answer(emit: Emitter, asked: list[Node], min_vocab: int) -> None:
    """A value asked for its size only is not computed."""
    for node in asked:
        expr = value(node).node.expr
        size = emit.size_of(expr) or _narrow_size(emit, expr, min_vocab)
        if isinstance(size, Node) and node not in ancestors([size]):
            node.replace_all_uses_with(size)


def _narrow_size(emit: Emitter, expr: Any, min_vocab: int) -> Node | None:
    """The same size of a value narrower than a vocabulary."""
    for node in emit.graph.nodes:
        early = not (is_backward(node) or is_tangent(node))
        if is_wide(node, min_vocab) or not early or not isinstance(value(node), torch.Tensor):
            continue
        for dim, size in enumerate(shape_of(node)):
            if isinstance(size, torch.SymInt) and size.node.expr == expr:
                return emit.call(aten.sym_size.int, node, dim)
    return None


def _make_in_forward(graph: Graph) -> None:
    """The operand in forward; it may be an equal node of backward."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not is_backward(node):
            for each in node.all_input_nodes:
                each.meta.pop(TAG, None)


class _Work:
    """The edits.

    Attributes:
        returned: values in the memory of an output.
        heads: factors of moved matmuls.
        first: for each new matmul, the user's own.
        rows: for each moved matmul of the user's, the number of rows taken, and of all.
    """

    def __init__(self, emit: Emitter, min_vocab: int, share: float, of_heads: bool) -> None:
        self.emit, self.min_vocab = emit, min_vocab
        self.share, self.of_heads = share, of_heads
        self.returned = Aliases(emit.graph).of_outputs(emit.graph)
        self.heads: set[Node] = set()
        self.first: dict[Node, Node] = {}
        self.rows: dict[Node, tuple[Any, Any]] = {}

    def notes(self) -> Iterator[str]:
        for node, (rows, every) in self.rows.items():
            source = source_of(node)
            where = f" of the logits at {source}" if source else ""
            yield f"rows computed: {_told(rows)} of {_told(every)}{where}; the others are unread"

    # ---- takes first ----------------------------------------------------------------------------------------------

    def take_first(self) -> None:
        """take(f(x)) -> f(take(x)), until nothing moves: a value may be read in forward and in backward."""
        before = -1
        while before != (before := len(self.emit.created)):
            for node in wide_nodes(self.emit.graph, self.min_vocab):
                takes = node.target in TAKES and is_of_rows(node)
                if takes and node.users and (not self.of_heads or _is_of_head(node)):
                    self._take_first(node)

    def _take_first(self, node: Node) -> None:
        inner: Node = node.args[0]  # type: ignore[assignment]
        point = under(inner, _SHOWN)
        takes, every = _takes_of(point) or [], math.prod(shape_of(point)[:-1])
        taken = sum(math.prod(shape_of(each)[:-1]) for each in takes)
        if not takes or not _fewer(taken, every):
            return
        if len(takes) > 1 and not self.returned.isdisjoint(takes):
            return  # what the caller writes to one is in the other
        self.emit.origin = point
        if point.target in HEADS:
            bias = point.args[0] if point.target is aten.addmm.default else None
            if rank_of(bias) <= 1 and hint(taken) <= self.share * hint(every):
                self._take_before_matmul(node, point, taken)
        elif (operand := _operand(point)) is not None:
            self._take_before_point(node, point, operand)

    def _take_before_point(self, node: Node, point: Node, operand: Node) -> None:
        """take(f(x, number of each row)) -> f(take(x), take(number of each row))"""
        operands = [each for each in point.all_input_nodes if rank_of(each)]
        if len(operands) > 1 and not self.of_heads:
            return
        taken = {each: self._taken(node, each) for each in operands}
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
        at = HEADS[point.target]
        rows = self._taken(node, args[at])
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

    def _taken(self, node: Node, of: Any) -> Node | None:
        """`node`'s selection, applied to `of` with as many rows; None if this would be a copy."""
        made = self._selected(node.args[0], of, node.target, node.args[1:], node)
        if made is not None and "unbacked_bindings" in node.meta:
            made.meta["unbacked_bindings"] = node.meta["unbacked_bindings"]
        return made

    def _selected(self, every: Any, of: Any, target: Any, args: Any, like: Node) -> Node | None:
        """As many rows of `of` as `like` has; the rows of `of` are those of `every`, [..., V]."""
        emit = self.emit
        if not viewable(value(of), [*shape_of(every)[:-1], shape_of(of)[-1]]):
            return None
        rows = emit.reshape(of, [*emit.sizes(every)[:-1], emit.sizes(of)[-1]])
        try:
            made = emit.call(target, rows, *args)
        except Refused:  # the sizes are those that data gives to `like`
            if not self.of_heads:
                return None
            made = emit.call_like(like, shape_of(of)[-1], target, rows, *args)
        for dim, size in enumerate(shape_of(made)):
            if not isinstance(size, int):
                known: Any = emit.size(made, dim)
                emit.known_sizes.setdefault(size.node.expr, known)
        return made

    def _flat(self, node: Node) -> Node:
        *lead, columns = self.emit.sizes(node)
        return self.emit.reshape(node, [self.emit.product(lead), columns])

    # ---- puts last ------------------------------------------------------------------------------------------------

    def put_last(self) -> None:
        """f(put(zeros, rows)) -> put(zeros, f(rows)), for readers of a put or of a sum of puts."""
        before = -1
        while before != (before := len(self.emit.created)):
            for node in wide_nodes(self.emit.graph, self.min_vocab):
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
        """`made`, with its rows first, in the shape of `outer`."""
        sizes = self.emit.sizes(outer)
        if not turned:
            return self.emit.reshape(made, sizes)
        return self.emit.call(aten.permute.default, self.emit.reshape(made, sizes[::-1]), [1, 0])

    def _is_of_moved(self, outer: Node) -> bool:
        """A gradient of a moved matmul: logits of all rows have a gradient of all rows."""
        of_head = any(under(each, _FACTORS) in self.heads for each in outer.all_input_nodes)
        return of_head or (bool(self.heads) and outer.target is aten.sum.dim_IntList)

    def _ends_in_moved(self, node: Node) -> bool:
        """Do moved matmuls read all element-wise functions of `node`?"""
        return bool(node.users) and all(
            self._is_of_moved(user)
            or ((user.target in _FACTORS or is_elementwise(user)) and self._ends_in_moved(user))
            for user in node.users
            if not is_dead(user)
        )

    def _products(self, node: Node, outer: Node) -> Node | None:
        """A matmul of the put rows, by their columns or over the rows, or the sum over the rows."""
        made = [self._product(put, node, outer) for put in _puts_in(node)]
        return None if None in made else added(self.emit, made)  # type: ignore[arg-type]

    def _product(self, put: Node, node: Node, outer: Node) -> Node | None:
        """The part of `outer`, a product of `node`, made from `put`."""
        rows = rows_put(put)
        assert rows is not None, put
        if outer.target is aten.mm.default:
            left, right = outer.args
            if _shows_rows(left, node):
                made = self.emit.call(aten.mm.default, self._flat(rows), right)
                sizes = [*self.emit.sizes(rows)[:-1], self.emit.sizes(made)[-1]]
                among = self._put(put, self.emit.reshape(made, sizes))
                return self.emit.reshape(among, self.emit.sizes(outer))
            turned = turns(left) and _shows_rows(left.args[0], node)  # type: ignore[arg-type, union-attr]
            if turned and (taken := self._taken_as_put(put, right)) is not None:
                first = self.emit.call(aten.permute.default, self._flat(rows), [1, 0])
                return self.emit.call(aten.mm.default, first, self._flat(taken))
        over_rows = outer.target is aten.sum.dim_IntList and outer.args[1:2] == ([0],)
        if over_rows and rank_of(outer.args[0]) == 2:
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
        """The rows of `of`, [all rows..., D], at the places of `node`'s rows; None if this would be a copy."""
        if node.target in BY_NUMBERS:
            target, args = aten.index.Tensor, node.args[1:2]
        else:
            target = aten.slice.Tensor if PUTS[node.target] == "slice" else aten.select.int
            args = node.args[2:]
        rows: Any = rows_put(node)
        return self._selected(node, of, target, args, rows)

    def _turned_round(self, node: Node, outer: Node) -> Node | None:
        """A cast, a product with a number or with a head's result, a sum of rows put in the same way."""
        rows: Any = rows_put(node)
        if rows is None:
            return None
        # rows put by their numbers may be added, in the wider dtype
        once = node.target not in BY_NUMBERS
        if once and outer.target in CASTS and value(outer).dtype.is_floating_point:
            cast = self.emit.call(outer.target, rows, *outer.args[1:], **outer.kwargs)
            return self._put(node, cast)
        if _is_scaled(outer):
            return self._put(node, self.emit.call(outer.target, rows, outer.args[1]))
        by = _factor(node, outer) if once and self.of_heads else None
        # 0 / 0 and 0 x inf are NaN in a gradient that leaves; of logits of a matmul those rows are unread
        if by is not None and (head_under(by) is not None or self._ends_in_moved(outer)):
            taken = self._taken_as_put(node, by)
            if taken is not None:
                return self._put(node, self.emit.call(outer.target, rows, taken))
        if _are_put_alike(outer):
            one, other = (rows_put(under(each, _SHOWN)) for each in outer.all_input_nodes)
            return self._put(node, self.emit.call(aten.add.Tensor, one, other))
        return None


def _told(rows: Any) -> str:
    return f"{rows:,}" if isinstance(rows, int) else str(rows)


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


def _shows_rows(shown: Any, node: Node) -> bool:
    """`node` in another shape, with its columns."""
    return under(shown, _SHOWN) is node and same_columns(shown, node)


def _takes_of(node: Node) -> list[Node] | None:
    """The nodes taking rows of it; None if another node reads all of them."""
    found: dict[str, Node] = {}
    for user in node.users:
        if is_dead(user):
            continue
        if user.target in TAKES and is_of_rows(user):
            found.setdefault(_place(user), user)
            continue
        shows = user.target in _SHOWN and same_columns(user, node)
        takes = _takes_of(user) if shows else None
        if takes is None:
            return None
        found |= {_place(each): each for each in takes}
    return list(found.values())


def _place(node: Node) -> str:
    """Equal for takes of the same rows."""
    return str((node.target, node.args[1:], shape_of(node)))


def _readers(node: Node, turned: bool = False) -> list[tuple[Node, bool]]:
    """The readers of `node` in any shape, each with a flag for the shape [V, N]."""
    found = []
    for user in node.users:
        if user.target in _SHOWN and same_columns(user, node):
            found += _readers(user, turned)
        elif turns(user) and rank_of(user) == 2:
            found += _readers(user, not turned)
        else:
            found.append((user, turned))
    return found


def _puts_in(node: Node) -> list[Node]:
    """The addends of `node`; none if it is no sum."""
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
    """The factor or divisor of the put `node`: a value, or a number per row."""
    if outer.target not in _PRODUCTS or outer.kwargs or len(outer.all_input_nodes) != 2:
        return None
    one, by = outer.all_input_nodes
    if under(one, _SHOWN) is not node and outer.target is aten.mul.Tensor:
        one, by = by, one
    of_rows = _is_of_each_row(by, outer) or _same_rows(by, outer)
    return by if under(one, _SHOWN) is node and of_rows else None


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
    """The arguments of a put with the place."""
    if node.target in BY_NUMBERS:
        return node.args[1], *node.args[3:]
    return node.args[2:]
