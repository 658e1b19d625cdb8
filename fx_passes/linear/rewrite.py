"""The edits: a `linear_row_stats` for each set of rows with statistics, a `linear_row_grad` per gradient.

Entry point: `Rewrite`. New nodes are made first; `commit` puts them in the place of the old ones. Nothing here can
refuse once `commit` has begun. Longer than other files, since all edits of a head stand together, in their order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.fx import Node

from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import BACKWARD, TAG, is_backward, same_shape, shape_of, value
from fx_passes.graph.operators import is_collective
from fx_passes.graph.order import ancestors
from fx_passes.linear.gradients import Products
from fx_passes.linear.head import Head
from fx_passes.linear.in_forward import RowProgram, in_forward
from fx_passes.linear.readers import Readers, Rows, origin_of
from fx_passes.linear.samples import are_all, part_of
from fx_passes.refused import Refused

aten = torch.ops.aten
fused = torch.ops.slime_fused


@dataclass
class _Group:
    """Readers of the same rows of the logits: all of `origin`."""

    origin: Node
    stats: list[Node] = field(default_factory=list)
    picks: list[Node] = field(default_factory=list)


@dataclass
class _Columns:
    """Columns that one operator takes along, and who gets them.

    Attributes:
        index: [N, M]
        taken: gathers, each with what makes it of what was taken, [N, M].
        of_all_rows: each gather's rows are all rows, or a part of them without another writer.
    """

    index: Node
    taken: list[tuple[Node, Callable[[Node], Node]]]
    of_all_rows: bool


@dataclass
class _Wanted:
    """What forward's operator makes of `hidden` [N, D]: statistics by (scale, factor), columns."""

    hidden: Node
    statistics: list[tuple[Node | None, float]]
    places: dict[Node, int]
    picks: list[_Columns]

    @property
    def nodes(self) -> list[Node]:
        return [*self.places, *(node for columns in self.picks for node, _ in columns.taken)]

    def read(self, name: str) -> list[bool]:
        """For each scale whether the statistic `name` is read."""
        found = [False] * len(self.statistics)
        for node, place in self.places.items():
            found[place] |= bool(node.kwargs.get(name, True))
        return found

    def of_stats(self) -> dict[Node, tuple[int, int]]:
        """Results of `row_stats` as (scale, statistic)."""
        return {
            user: (place, cast(int, user.args[1]))
            for node, place in self.places.items()
            for user in node.users
        }

    def of_picks(self) -> dict[Node, tuple[int, int]]:
        """Gathers from all rows as columns [from, to) of what is picked.

        Raises:
            Refused: their number is symbolic.
        """
        found, start = {}, 0
        for columns in self.picks:
            count = shape_of(columns.index)[1]
            if not isinstance(count, int):
                raise Refused("the number of picked columns is symbolic")
            if columns.of_all_rows:
                found.update(dict.fromkeys((n for n, _ in columns.taken), (start, start + count)))
            start += count
        return found


class Rewrite:
    """The rewrite of one head whose readers are known to allow it."""

    def __init__(self, emit: Emitter, head: Head, limit: int) -> None:
        self.emit = emit
        self.head = head
        self.limit = limit
        self.replacements: dict[Node, Node] = {}
        self.into_forward: list[Node] = []
        self.weight = head.weight.emit(emit)
        self.hidden = emit.reshape(head.hidden.emit(emit), self._matrix_sizes())
        self.bias = None if head.bias is None else emit.reshape(head.bias, [self._vocab()])
        self.rows = Rows(emit, head.root)

    def _matrix_sizes(self) -> list[Any]:
        return self.emit.sizes(self.head.hidden.emit(self.emit))

    def _vocab(self) -> Any:
        return self.emit.size(self.weight, 0)

    def _head_of(self, origin: Node) -> Node:
        """The hidden states of the rows of `origin`, [N, D]."""
        if origin is self.head.root:
            return self.hidden
        root = self.emit.sizes(self.head.root)[:-1]
        wide = self.emit.reshape(self.hidden, [*root, self.emit.size(self.hidden, 1)])
        return self._flat(self.rows.replay(origin, wide), 1)

    def _flat(self, node: Node, kept: int) -> Node:
        """[rows..., *kept] as [N, *kept], the last `kept` dimensions as they are."""
        rank = len(shape_of(node))
        if rank - kept == 1:
            return node
        sizes = self.emit.sizes(node)
        return self.emit.reshape(node, [self._count(sizes[: rank - kept]), *sizes[rank - kept :]])

    def _count(self, sizes: Sequence[Any]) -> Any:
        total: Any = 1
        for size in sizes:
            if isinstance(size, int) and size == 1:
                continue
            both = isinstance(size, int) and isinstance(total, int)
            if both or (isinstance(total, int) and total == 1):
                total = size * total if both else size
            else:
                total = self.emit.call(operator.mul, total, size)
        return total

    def restart(self) -> None:
        """Forgets what was to be replaced; nodes that were made and are not used go with the graph's dead code."""
        self.replacements.clear()
        self.into_forward.clear()

    @property
    def _softcap(self) -> dict[str, Any]:
        """Arguments of all three operators."""
        cap = self.head.softcap
        return {} if cap is None else {"softcap": cap.value, "capped": cap.dtype}

    # -- forward ---------------------------------------------------------------------------------

    def forward(self, readers: Readers) -> None:
        for group in self._groups(readers):
            self._emit_stats(self._wanted_of(group))

    def both(self, readers: Readers, grad: Node, products: Products) -> None:
        """Statistics, and the gradients that `grad` ends in, by one operator in forward.

        Raises:
            Refused: with the reason; nothing that was made is used.
        """
        groups = self._groups(readers)
        if len(groups) > 1 or groups[0].origin is not self.head.root:
            raise Refused("some rows of the logits are read alone")
        wanted = self._wanted_of(groups[0])
        hidden_rows = shape_of(self.hidden)[0]
        stats, picks = wanted.of_stats(), wanted.of_picks()
        program = in_forward(grad, wanted.nodes, stats, picks, hidden_rows, self.emit)
        self._emit_both(wanted, program, products)

    def _groups(self, readers: Readers) -> list[_Group]:
        """Readers by the rows they read; columns alone go along with all rows where rows can be told apart."""
        groups: dict[Node, _Group] = {}
        for node in readers.stats:
            origin = origin_of(node.args[0])  # type: ignore[arg-type]
            groups.setdefault(origin, _Group(origin)).stats.append(node)
        for node in readers.picks:
            origin = origin_of(node.args[0])  # type: ignore[arg-type]
            if origin not in groups and self.head.root in groups and self.rows.can_undo(origin):
                origin = self.head.root
            groups.setdefault(origin, _Group(origin)).picks.append(node)
        return list(groups.values())

    def _wanted_of(self, group: _Group) -> _Wanted:
        self.emit.origin = (group.stats or group.picks)[0]
        hidden = self._head_of(group.origin)
        keys = [self._key(node) for node in group.stats]
        statistics = list(dict.fromkeys(keys))
        places = {node: statistics.index(key) for node, key in zip(group.stats, keys, strict=True)}
        return _Wanted(hidden, statistics, places, self._columns(group))

    def _arguments(self, wanted: _Wanted) -> tuple[Any, ...]:
        """What both forward operators begin with."""
        scales = [scale for scale, _ in wanted.statistics]
        factors = [factor for _, factor in wanted.statistics]
        means, totals = wanted.read("mean"), wanted.read("total")
        index = self._joined([columns.index for columns in wanted.picks], wanted.hidden)
        return wanted.hidden, self.weight, self.bias, scales, factors, means, totals, index

    def _emit_stats(self, wanted: _Wanted) -> None:
        made = self.emit.call(
            fused.linear_row_stats.default,
            *self._arguments(wanted),
            self.limit,
            "",
            **self._softcap,
        )
        backward = any(is_backward(node) for node in wanted.nodes)
        self._tag(made, backward)
        self._replace_stats(wanted, made)

    def _emit_both(self, wanted: _Wanted, program: RowProgram, products: Products) -> None:
        made = self.emit.call(
            fused.linear_row_both.default,
            *self._arguments(wanted),
            list(program.inputs),
            program.text,
            list(products.wanted),
            not products.weight,
            self.limit,
            "",
            **self._softcap,
        )
        self._check_collectives(made)
        self._tag(made, backward=False)
        self._replace_stats(wanted, made)
        self._replace_products(products, made, 2, program.tangent)

    def _check_collectives(self, made: Node) -> None:
        """Forward may run only the collectives that it ran: others may leave theirs in backward, and would wait."""
        returned = made.graph.output_node().all_input_nodes
        kept = ancestors(n for n in returned if not is_backward(n))
        if any(is_collective(node) and node not in kept for node in ancestors([made])):
            raise Refused(
                "it needs a collective of backward; other ranks may not run it in forward"
            )

    def _tag(self, made: Node, backward: bool) -> None:
        """Forward's operators may read what only backward did until now, and what came before that."""
        if backward:
            made.meta[TAG] = BACKWARD
            return
        made.meta.pop(TAG, None)
        self.into_forward.append(made)

    def _key(self, node: Node) -> tuple[Node | None, float]:
        """Scale, [N, 1] or without dimensions, and factor."""
        wide, scale, factor, _ = node.args
        if isinstance(scale, Node) and shape_of(scale):
            lead = [*self.emit.sizes(wide)[:-1], 1]  # type: ignore[arg-type]
            missing = len(lead) - len(shape_of(scale))
            scale = self.emit.reshape(scale, [1] * missing + self.emit.sizes(scale))
            scale = self._flat(self.emit.expand(scale, lead), 1)
        return scale, factor  # type: ignore[return-value]

    def _replace_stats(self, wanted: _Wanted, made: Node) -> None:
        """Results of `made` in the place of those of `row_stats`, and of gathers."""
        stats = self.emit.call(operator.getitem, made, 0)
        for node, place in wanted.places.items():
            lead = [*self.emit.sizes(node.args[0])[:-1], 1]  # type: ignore[arg-type]
            of_scale = self.emit.call(aten.select.int, stats, 0, place)
            for user in list(node.users):
                found = self.emit.call(aten.select.int, of_scale, 0, user.args[1])
                self._put(user, self.emit.reshape(found, lead))
        self._replace_picks(wanted.picks, made)

    def _columns(self, group: _Group) -> list[_Columns]:
        found = []
        for nodes in _sets_of_parts(group):
            moves = [(node, self._move_of(node, group)) for node in nodes]
            flat = [self._flat(self._index_of(node, group, len(nodes) > 1), 1) for node in nodes]
            index = flat[0] if len(flat) == 1 else self.emit.call(aten.cat.default, flat, 0)
            of_all = len(nodes) > 1 or origin_of(nodes[0].args[0]) is group.origin  # type: ignore[arg-type]
            found.append(_Columns(index, moves, of_all))
        return found

    def _index_of(self, node: Node, group: _Group, one_of_several: bool) -> Node:
        wide, _, index = node.args[:3]
        assert isinstance(wide, Node), node
        assert isinstance(index, Node), node
        own = one_of_several or origin_of(wide) is group.origin
        return index if own else self.rows.undo(wide, index)

    def _move_of(self, node: Node, group: _Group) -> Callable[[Node], Node]:
        wide: Node = node.args[0]  # type: ignore[assignment]
        if origin_of(wide) is group.origin:
            return lambda taken: self._as_rows(taken, node)
        return lambda taken: self._moved(taken, wide)

    def _as_rows(self, taken: Node, node: Node) -> Node:
        return self.emit.reshape(taken, self.emit.sizes(node))

    def _moved(self, taken: Node, wide: Node) -> Node:
        """[N, M] of all rows, as rows of `wide`."""
        root = self.emit.sizes(self.head.root)[:-1]
        return self.rows.replay(wide, self.emit.reshape(taken, [*root, self.emit.size(taken, 1)]))

    def _joined(self, index: list[Node], hidden: Node) -> Node:
        if not index:
            return self.emit.full([self.emit.size(hidden, 0), 0], 0, torch.int64, hidden)
        return index[0] if len(index) == 1 else self.emit.call(aten.cat.default, index, 1)

    def _replace_picks(self, picks: list[_Columns], made: Node) -> None:
        if not picks:
            return
        taken = self.emit.call(operator.getitem, made, 1)
        start: Any = 0
        for columns in picks:
            part = taken
            if len(picks) > 1:
                stop = self._plus(start, self.emit.size(columns.index, 1))
                part = self.emit.call(aten.slice.Tensor, taken, 1, start, stop)
                start = stop
            for node, move in columns.taken:
                self._put(node, move(part))

    def _plus(self, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            return left + right
        return self.emit.call(operator.add, left, right)

    # -- backward --------------------------------------------------------------------------------

    def backward(self, grad: Node, products: Products) -> None:
        self.emit.origin = grad
        _, terms, affine, index, values, *_ = grad.args
        made = self.emit.call(
            fused.linear_row_grad.default,
            self.hidden,
            self.weight,
            self.bias,
            self._flat(terms, 2),  # type: ignore[arg-type]
            *(self._flat(each, 1) for each in (affine, index, values)),  # type: ignore[arg-type]
            list(products.wanted),
            not products.weight,
            self.limit,
            "",
            **self._softcap,
        )
        made.meta[TAG] = BACKWARD
        self._replace_products(products, made, 0, None)

    def _replace_products(
        self, products: Products, made: Node, first: int, tangent: Node | None
    ) -> None:
        """Results of `made`, from number `first` on, in the place of matmuls and sums; times `tangent` if given."""
        both = [*products.weight, *products.transposed]
        for place, nodes in enumerate((products.hidden, both, products.bias), first):
            for node in nodes:
                turned = bool(products.weight) and node in products.transposed
                self._replace_product(node, made, place, turned, tangent)

    def _replace_product(
        self, node: Node, made: Node, place: int, turned: bool, tangent: Node | None
    ) -> None:
        self.emit.origin = node
        found = self.emit.call(operator.getitem, made, place)
        if tangent is not None:
            found = self.emit.call(aten.mul.Tensor, found, tangent)
            found.meta[TAG] = BACKWARD
        if turned:
            found = self.emit.call(aten.permute.default, found, [1, 0])
        self._put(node, self.emit.reshape(found, self.emit.sizes(node)))

    # -- putting ---------------------------------------------------------------------------------

    def _put(self, old: Node, new: Node) -> None:
        """`new` in the place of `old`, and laid out as it."""
        new = self.emit.laid_out_as(new, old)
        assert same_shape(shape_of(old), shape_of(new)), (old, new)
        assert value(old).dtype == value(new).dtype, (old, new)
        self.replacements[old] = new

    def sizes(self, nodes: Sequence[Node]) -> None:
        """What only asks for a size of the logits asks for one of hidden or weight."""
        for node in nodes:
            wide, dim = node.args
            assert isinstance(wide, Node), node
            found = self._size(wide, dim)
            if not isinstance(found, Node):
                raise Refused("a needed size of the logits appears nowhere else in the graph", node)
            self.replacements[node] = found

    def _size(self, wide: Node, dim: Any) -> Any:
        rank = len(shape_of(wide))
        if dim % rank == rank - 1:
            return self._vocab()
        if wide is self.head.root and rank == 2:
            return self.emit.size(self.hidden, 0)
        size: Any = shape_of(wide)[dim]
        if isinstance(size, int):
            return size
        return self.emit.size_of(size.node.expr)

    # -- committing ------------------------------------------------------------------------------

    def commit(self) -> None:
        for node in ancestors(self.into_forward):
            if is_backward(node):
                del node.meta[TAG]
        for old, new in self.replacements.items():
            old.replace_all_uses_with(new)


def _sets_of_parts(group: _Group) -> list[list[Node]]:
    """The gathers, those together that are of the parts of all rows: a loop over samples, with one column each."""
    found: list[list[Node]] = []
    by_whole: dict[tuple[Node, Any], list[Node]] = {}
    for node in group.picks:
        wide, _, index = node.args[:3]
        assert isinstance(wide, Node), node
        part = part_of(wide)
        columns = shape_of(index)[-1]
        of_all = part is not None and origin_of(wide.args[0]) is group.origin  # type: ignore[arg-type]
        if of_all and isinstance(columns, int):
            by_whole.setdefault((wide.args[0], columns), []).append(node)  # type: ignore[arg-type]
        else:
            found.append([node])
    for nodes in by_whole.values():
        parts = [part_of(node.args[0]) for node in nodes]  # type: ignore[arg-type]
        found += [nodes] if are_all(parts) else [[node] for node in nodes]  # type: ignore[arg-type]
    return found
