"""The gradient of sliced logits, computed for all rows; rows outside the slice get zeros.

Entry point: `compute_all_rows`, on the joint graph once it is rewritten.

NOTE [The gradient of a slice is another buffer]
A loss over two logits, `student[:, :-1]` and `teacher[:, :-1]`, is arithmetic but for its statistics, and its gradient
has a part that is summed over the vocabulary and then read again: the compiler stores that, and where nothing is sliced
it writes the gradient over it. So it does with a long sum of terms. The gradient of a slice is written into zeros as
large as the logits, which no buffer of the slice's size can be: one more N. So the same arithmetic is done on all rows
of the logits, and what it gives in the rows that are left out, which may be anything, is replaced by zeros. Few rows
more are computed, and one buffer is left.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from fx_passes.graph.changes import changes_of
from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import (
    TAG,
    SizeArg,
    hint,
    is_backward,
    is_float_tensor,
    is_wide,
    rank_of,
    same,
    same_shape,
    shape_of,
    value,
)
from fx_passes.graph.operators import (
    RESHAPES,
    SAME_VALUE,
    is_elementwise,
    is_pure,
    is_zero,
    under,
)
from fx_passes.graph.order import tidy
from fx_passes.torch_private import detect_fake_mode

aten = torch.ops.aten

_LEAST_KEPT = 0.5
"""Of the rows: what is computed beside them costs at most as much again."""

_MOST_INLINED = 20
"""Element-wise operators that the compiler computes where their value is read; it stores what takes more than about 30
operations, loads and constants among them.
"""

_DIVISIONS: set[Any] = {
    aten.div.Tensor_mode,
    aten.fmod.Tensor,
    aten.remainder.Tensor,
    aten.remainder.Scalar_Tensor,
}
_OVER_LAST: set[Any] = {aten.sum.dim_IntList, aten.amax.default, aten.amin.default}


def compute_all_rows(graph: Graph, min_vocab: int) -> int:
    """Gradients of slices of rows become gradients of all rows, where that saves a buffer.

    Args:
        graph: a joint graph with fake values, rewritten by `fuse`.
        min_vocab: the smallest last dimension that is taken for a vocabulary.

    Returns:
        How many; with 0 the graph is exactly as it was. A gradient stays where anything but element-wise operators and
        reductions over the vocabulary computes it of slices like it, where it is short and nothing of its size is
        reduced, or where it would be computed of what forward changes in place.
    """
    done = 0
    for write in graph.find_nodes(op="call_function", target=aten.slice_scatter.default):
        kept = _kept(write, min_vocab)  # read now: what it keeps may have been rewritten
        if kept is not None:
            done += _rewritten(graph, kept)
    if done:
        tidy(graph)
    return done


@dataclass(frozen=True)
class _Kept:
    """The rows of a gradient that `write` puts into zeros: those from `start` on, along dimension `dim`."""

    write: Node
    part: Node
    dim: int
    start: int


def _kept(write: Node, min_vocab: int) -> _Kept | None:
    """What `write` keeps, if it is the gradient of a slice of enough rows."""
    into, part = write.args[:2]
    dim, start, step = _place(write, 2)
    if not (isinstance(part, Node) and isinstance(into, Node) and is_zero(into)):
        return None
    wide = is_backward(write) and is_wide(write, min_vocab) and dim < rank_of(write) - 1
    if not wide or step != 1 or start is None:
        return None
    rows, all_rows = hint(shape_of(part)[dim]), hint(shape_of(write)[dim])
    enough = all_rows > 0 and _LEAST_KEPT * all_rows <= rows
    return _Kept(write, part, dim, start) if enough else None


def _place(node: Node, first: int) -> tuple[int, int | None, object]:
    """Dimension, start and step of a slice, or of a write into one; None for a start that is no number."""
    given: list[Any] = [*node.args[first:], *(0, None, None, 1)[len(node.args) - first :]]
    dim, start, step = given[0] % rank_of(node), given[1], given[3]
    size = shape_of(node.args[0])[dim]
    start = 0 if start is None else start
    if isinstance(start, int) and start < 0:
        start = max(start + size, 0) if isinstance(size, int) else None
    return dim, start if isinstance(start, int) else None, step


def _rewritten(graph: Graph, kept: _Kept) -> bool:
    fake_mode = detect_fake_mode([value(kept.write)])
    assert fake_mode is not None
    emit = Emitter(graph, fake_mode)
    for node in graph.nodes:
        emit.adopt(node)
    emit.origin = kept.write
    with graph.inserting_before(kept.write):
        filled = _filled(_AllRows(emit, kept))
    changed = changes_of(graph).in_forward
    if filled is None or any(changed.intersection(node.all_input_nodes) for node in emit.created):
        emit.discard()
        return False
    for node in emit.created:
        # what is computed of the logits alone is backward's too, and nothing to keep
        node.meta[TAG] = "must_be_in_backward"
    kept.write.replace_all_uses_with(filled)
    return True


def _filled(rows: _AllRows) -> Node | None:
    """The gradient of all rows; None where it has to stay."""
    emit, write = rows.emit, rows.kept.write
    try:
        grown = rows.wide(rows.kept.part)
    except _Stays:
        return None
    if not rows.reduced and sum(map(is_elementwise, emit.created)) <= _MOST_INLINED:
        return None
    zero = emit.full([], 0.0, value(write).dtype, write)
    return emit.where(rows.are_kept(), grown, zero)


def _may_raise(node: Node) -> bool:
    """For an element that the program does not have: an integer divided by one."""
    return node.target in _DIVISIONS and not is_float_tensor(node)


class _Stays(Exception):
    """Something computes the gradient that cannot be done for rows beside it."""


@dataclass
class _AllRows:
    """Values of the slice, `[*rows, V]` or one number per row in any arrangement of these rows, for all rows.

    Attributes:
        reduced: whether a value of the slice's size is reduced, that is no slice itself.
    """

    emit: Emitter
    kept: _Kept
    reduced: bool = False
    _known: dict[Node, Node] = field(default_factory=dict)
    _for_all: dict[Node, bool] = field(default_factory=dict)

    def wide(self, node: Node) -> Node:
        """`node`, which is as large as the slice, of the logits' shape."""
        return self._once(node, self._wide)

    def _once(self, node: Node, make: Callable[[Node], Node]) -> Node:
        if node not in self._known:
            self._known[node] = make(node)
        return self._known[node]

    def are_kept(self) -> Node:
        """`[*all rows, 1]`: True for those of the slice."""
        kept, emit = self.kept, self.emit
        size, count = emit.size(kept.write, kept.dim), emit.size(kept.part, kept.dim)
        trailing = rank_of(kept.write) - kept.dim - 1
        places = emit.reshape(emit.iota(size, kept.write), [size] + [1] * trailing)
        stop = count if not kept.start else self._plus(count, kept.start)
        found = emit.call(aten.lt.Scalar, places, stop)
        if kept.start:
            after = emit.call(aten.ge.Scalar, places, kept.start)
            found = emit.call(aten.logical_and.default, after, found)
        every = emit.expand(found, [*emit.sizes(kept.write)[:-1], 1])
        return self._stored(
            emit.call(aten.clone.default, every, memory_format=torch.contiguous_format)
        )

    def _plus(self, size: SizeArg, number: int) -> SizeArg:
        if isinstance(size, int):
            return size + number
        return self.emit.call(operator.add, size, number)

    # -- as large as the slice -------------------------------------------------------------------

    def _wide(self, node: Node) -> Node:
        if node.op != "call_function":
            raise _Stays
        whole = self._sliced(node)
        if whole is not None:
            return whole
        if node.target in RESHAPES and self._is_wide(node.args[0]):  # type: ignore[arg-type]
            return self.wide(node.args[0])  # type: ignore[arg-type]
        sizes = self.emit.sizes(self.kept.write)
        if node.target is aten.expand.default:
            return self.emit.expand(self._operand(node.args[0], node), sizes)
        if node.target is aten.full.default:
            return self.emit.call(aten.full.default, sizes, *node.args[1:], **node.kwargs)
        return self._mapped(node)

    def _sliced(self, node: Node) -> Node | None:
        """What `node` is the same slice of."""
        if node.target is not aten.slice.Tensor:
            return None
        kept, whole = self.kept, node.args[0]
        dim, start, step = _place(node, 1)
        alike = (dim, start, step) == (kept.dim, kept.start, 1)
        if not (alike and rank_of(node) == rank_of(kept.part)):
            return None
        matches = same_shape(shape_of(node)[:-1], shape_of(kept.part)[:-1])
        fits = same_shape(shape_of(whole)[:-1], shape_of(kept.write)[:-1])
        return whole if matches and fits else None  # type: ignore[return-value]

    def _mapped(self, node: Node) -> Node:
        """An element-wise operator, of all rows of its operands."""
        if not (is_elementwise(node) and is_pure(node)) or _may_raise(node):
            raise _Stays
        if node.target in SAME_VALUE:
            return self._operand(node.args[0], node)
        args = [self._operand(arg, node) for arg in node.args]
        if any(isinstance(each, Node) for each in node.kwargs.values()):
            raise _Stays
        return self.emit.call(node.target, *args, **node.kwargs)

    # -- operands --------------------------------------------------------------------------------

    # Which numbers are those of a row is said by their place alone: there may be as many columns as rows. All that is
    # looked at is arranged as the slice or a reshape of it, rows in order.

    def _operand(self, arg: Any, reader: Node) -> Any:
        """What the element-wise operator `reader` reads, broadcastable to all rows."""
        if not isinstance(arg, Node) or not isinstance(value(arg), torch.Tensor):
            return arg
        shape = shape_of(arg)
        if all(same(size, 1) for size in shape):
            return self._of_any_row(arg)
        if not self._is_wide(reader):
            return self.row(self.emit.expand(arg, self.emit.sizes(reader)))
        if same(shape[-1], 1):
            return self.row(self.emit.expand(arg, [*self.emit.sizes(reader)[:-1], 1]))
        if self._is_wide(arg):
            return self.wide(arg)
        if all(same(size, 1) for size in shape[:-1]):
            return self._of_any_row(arg)
        raise _Stays

    def _of_any_row(self, node: Node) -> Node:
        """Of one row, or a number: at most as many dimensions as the logits."""
        most = rank_of(self.kept.write)
        if rank_of(node) <= most:
            return node
        return self.emit.reshape(node, [1] * (most - 1) + self.emit.sizes(node)[-1:])

    def _is_wide(self, node: Node) -> bool:
        fake, part = value(node), value(self.kept.part)
        columns = fake.ndim > 1 and same(fake.shape[-1], part.shape[-1])
        return columns and same(fake.numel(), part.numel())

    # -- one number per row ----------------------------------------------------------------------

    def row(self, node: Node) -> Node:
        """`node`, a number per row, as `[*all rows, 1]`: zeros in rows beside the slice, or what is computed there."""
        return self._once(node, self._row)

    def _row(self, node: Node) -> Node:
        whole = self._sliced(node)
        if whole is not None:
            return whole
        if not self._is_for_all(node):
            return self._padded(node)
        if node.target in RESHAPES:
            return self.row(node.args[0])  # type: ignore[arg-type]
        if node.target not in _OVER_LAST:
            return self._mapped(node)
        operand = node.args[0]
        assert isinstance(operand, Node)
        self.reduced = self.reduced or self._sliced(under(operand, SAME_VALUE)) is None
        return self.emit.call(node.target, self.wide(operand), [-1], True, **node.kwargs)

    def _is_for_all(self, node: Node) -> bool:
        """A number per row that is made of ones of all rows, or in backward of values as large as the slice."""
        if node not in self._for_all:
            self._for_all[node] = self._is_made_of_such(node)
        return self._for_all[node]

    def _is_made_of_such(self, node: Node) -> bool:
        if node.op != "call_function" or not self._is_row(node):
            return False
        if node.target in _OVER_LAST:
            return is_backward(node) and self._is_over_last(node)
        made = node.target in RESHAPES or is_elementwise(node)
        inside = made and any(map(self._is_for_all, node.all_input_nodes))
        return inside or self._sliced(node) is not None

    def _is_row(self, node: Node) -> bool:
        fake, rows = value(node), math.prod(shape_of(self.kept.part)[:-1])
        tensor = isinstance(fake, torch.Tensor) and not self._is_wide(node)
        return tensor and same(fake.numel(), rows)

    def _is_over_last(self, node: Node) -> bool:
        operand: Any = node.args[0]
        dims: Any = node.args[1] if len(node.args) > 1 else None
        last = rank_of(operand) - 1
        return self._is_wide(operand) and [dim % (last + 1) for dim in dims or ()] == [last]

    def _padded(self, node: Node) -> Node:
        kept, emit = self.kept, self.emit
        part = emit.reshape(node, [*emit.sizes(kept.part)[:-1], 1])
        zeros = emit.full([*emit.sizes(kept.write)[:-1], 1], 0, value(node).dtype, node)
        return self._stored(
            emit.call(aten.slice_scatter.default, zeros, part, *kept.write.args[2:])
        )

    def _stored(self, node: Node) -> Node:
        """A number per row that the compiler does not compute in the loop over the vocabulary.

        Where a loop asks for the place of a row, its rows are counted dimension by dimension, and the compiler does not
        join it with others, which count them all together. It stores what is shown in other strides.
        """
        strides = self.emit.strides(node)
        return self.emit.call(aten.as_strided.default, node, self.emit.sizes(node), strides)
