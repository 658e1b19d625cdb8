"""A case for every row of the rule tables: how the operator is applied to operands that are there.

`CASES` and `ROW_CASES` map an operator to a function that takes a `Making`, draws operands in every shape, step, bound
and dtype that torch allows (and some that it does not: `Impossible`), and returns the operator's node. What a rule can
say something about is made more often than the rest. Nothing here knows the rules. Long as the tables are: one case for
each row, short functions in the tables' order.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch.fx import Node

from fx_passes.graph.facts import hint, shape_of, value
from tests.support.scratch import VOCAB, Impossible, Scratch

aten = torch.ops.aten
prims = torch.ops.prims

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LEADS = ((3,), (2, 3), (1,), (VOCAB,), (3, 1), (1, 3), (2, 1, 2), (VOCAB, 2))
NUMBERS = (2.0, -1.0, 1.0, 0.5, 3, 0.0, -2.5)
LOWEST = tuple(torch.finfo(dtype).min for dtype in FLOATS)


class Making:
    """A scratch graph in the making, with the operands that there are.

    Attributes:
        wides: floating values with the vocabulary in a dimension.
        masks: boolean ones.
        rows: numbers per row.
        failed: torch does not apply the operator to what was drawn.
    """

    def __init__(self, draw: st.DrawFn, dynamic: bool = False) -> None:
        self._draw = draw
        self.s = Scratch(self.one(*FLOATS), dynamic)
        self.lead: tuple[int, ...] = self.one(*LEADS)
        self.wides: list[Node] = []
        self.masks: list[Node] = []
        self.rows: list[Node] = []
        self.failed = False
        self.logits()

    # -- choosing ------------------------------------------------------------------------------------

    def one(self, *options: Any) -> Any:
        return (
            options[self._draw(st.integers(0, len(options) - 1))]
            if len(options) > 1
            else options[0]
        )

    def some(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def rarely(self) -> bool:
        return self.one(False, False, False, True)

    # -- operands ------------------------------------------------------------------------------------

    def logits(self, lead: tuple[int, ...] | None = None) -> Node:
        layout = self.one("contiguous", "contiguous", "expanded", "permuted", "sliced")
        lead = self.lead if lead is None else lead
        node = self.s.input("logits", (*lead, VOCAB), self.s.dtype, layout)
        self.wides.append(node)
        return node

    def wide(self) -> Node:
        """A full-vocabulary value; the latest most often."""
        return self.wides[-1 - min(self.some(0, 2), len(self.wides) - 1)]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.keep(self.s.call(target, *args, **kwargs))

    def keep(self, node: Node) -> Node:
        """Sorts a new value in with its like."""
        found = value(node)
        if not isinstance(found, torch.Tensor):
            return node
        shape = sizes(node)
        if VOCAB in shape and len(shape) > 1 and found.dtype.is_floating_point:
            self.wides.append(node)
        elif VOCAB in shape and found.dtype is torch.bool:
            self.masks.append(node)
        elif found.dtype.is_floating_point:
            self.rows.append(node)
        return node

    def shape_beside(self, shape: Sequence[int], columns: int = 1) -> tuple[int, ...]:
        """A shape that broadcasts to `shape`, with one column as a rule."""
        if self.rarely():
            return tuple(self.one(size, 1) for size in shape)[self.some(0, len(shape)) :]
        return (*shape[:-1], columns)

    def row(self, beside: Node, role: str = "rows") -> Node:
        """A number per row: one that there is, or an input."""
        near = [r for r in self.rows if sizes(r) == (*sizes(beside)[:-1], 1)]
        if near and role == "rows" and self.one(True, False):
            return self.one(*near)
        if self.rarely():
            return self.s.call(
                aten.full.default, [], self.one(*NUMBERS), dtype=self.s.dtype, device="cpu"
            )
        return self.s.input(role, self.shape_beside(sizes(beside)))

    def index(self, shape: Sequence[int], role: str = "hits") -> Node:
        kinds = (torch.int64, torch.int64, torch.int64, torch.int32)
        if role == "index":
            kinds = (*kinds, torch.float32, torch.uint8, torch.bool)
        return self.s.input(role, shape, self.one(*kinds))

    def iota(self, count: int, start: int = 0, step: int = 1) -> Node:
        return self.s.iota(count, start, step, self.one(torch.int64, torch.int64, torch.int32))

    def dim(self, node: Node) -> int:
        """The vocabulary's dimension as a rule."""
        rank = len(sizes(node))
        return self.one(-1, -1, rank - 1, self.some(-rank, rank - 1))

    def partner(self, beside: Node) -> Node:
        """What may meet a full-vocabulary value: another one, a number per row, a constant, a broadcast one."""
        kind = self.some(0, 6)
        if kind <= 1:
            return self.wide()
        if kind <= 3:
            return self.row(beside)
        if kind == 4:
            return one_hot(self, beside)
        if kind == 5:
            return self.s.call(
                aten.full.default,
                list(self.shape_beside(sizes(beside), VOCAB)),
                self.one(*NUMBERS),
                dtype=self.s.dtype,
                device="cpu",
            )
        return self.logits(self.shape_beside(sizes(beside))[:-1])

    def mask(self, beside: Node) -> Node:
        """A condition: over the vocabulary, or per row."""
        if self.masks and self.one(True, False):
            return self.masks[-1]
        if self.one(True, False):
            return self.s.input("flags", self.shape_beside(sizes(beside)), torch.bool)
        return self.one(compare(aten.eq.Scalar), compare(aten.gt.Scalar), columns_equal)(self)


def sizes(node: Node) -> tuple[int, ...]:
    return tuple(map(hint, shape_of(node)))


# -- values that people make ----------------------------------------------------------------------------


def log_softmax(m: Making) -> Node:
    x = m.wide()
    peak = m.call(aten.amax.default, x, [-1], True)
    shifted = m.call(aten.sub.Tensor, x, peak)
    total = m.call(aten.sum.dim_IntList, m.call(aten.exp.default, shifted), [-1], True)
    return m.call(aten.sub.Tensor, shifted, m.call(aten.log.default, total))


def softmax(m: Making) -> Node:
    x = m.wide()
    weights = m.call(
        aten.exp.default, m.call(aten.sub.Tensor, x, m.call(aten.amax.default, x, [-1], True))
    )
    return m.call(aten.div.Tensor, weights, m.call(aten.sum.dim_IntList, weights, [-1], True))


def tempered(m: Making) -> Node:
    x = m.wide()
    return m.call(aten.div.Tensor, x, m.row(x, "positive"))


def masked_rows(m: Making) -> Node:
    x = m.wide()
    keep = m.s.input("flags", m.shape_beside(sizes(x)), torch.bool)
    zero = m.s.call(aten.full.default, [], 0.0, dtype=m.s.dtype, device="cpu")
    return m.call(aten.where.self, keep, x, zero)


def one_hot(m: Making, beside: Node) -> Node:
    mask = columns_equal(m, beside)
    return m.call(prims.convert_element_type.default, mask, m.s.dtype)


def smoothed(m: Making) -> Node:
    """A target: one number everywhere but at a column of the row, which may be missed."""
    x = m.wide()
    numbers = (0.1, 0.9, 1e-4, 1.0, 0.0, -0.5, 1e-12)
    if m.one(True, False):
        filled = m.call(aten.full_like.default, x, m.one(*numbers))
        return m.call(aten.scatter.value, filled, -1, m.index((*sizes(x)[:-1], 1)), m.one(*numbers))
    scaled = m.call(aten.mul.Tensor, one_hot(m, x), m.one(*numbers))
    return m.call(aten.add.Tensor, scaled, m.one(*numbers))


RECIPES: tuple[Callable[[Making], Node], ...] = (
    log_softmax,
    softmax,
    tempered,
    masked_rows,
    smoothed,
)


# -- pointwise ----------------------------------------------------------------------------------------

Case = Callable[[Making], Node]


def unary(target: Any) -> Case:
    return lambda m: m.call(target, m.wide())


def copied(m: Making) -> Node:
    written = m.one(m.wide(), m.wide(), m.row(m.wide()))
    into = m.one(
        m.wide(),
        m.call(aten.full_like.default, written, 1.0),
        m.call(aten.expand.default, written, sizes(m.wide())),
    )
    return m.call(aten.copy.default, into, written)


def binary(target: Any) -> Case:
    def case(m: Making) -> Node:
        left = m.wide()
        right = m.partner(left)
        if m.one(False, True):
            left, right = right, left
        takes_alpha = target in (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor)
        alpha = {"alpha": m.one(*NUMBERS)} if takes_alpha and m.rarely() else {}
        return m.call(target, left, right, **alpha)

    return case


def divided(m: Making) -> Node:
    """By what it is a product of, too: the derivative of a logarithm."""
    if not m.rarely():
        return binary(aten.div.Tensor)(m)
    weights = m.call(aten.exp.default, m.one(m.wide, lambda: log_softmax(m))())
    factor = m.one(lambda: m.row(weights), lambda: m.wides[0])()
    return m.call(aten.div.Tensor, m.call(aten.mul.Tensor, weights, factor), weights)


def with_number(target: Any, *numbers: Any) -> Case:
    return lambda m: m.call(target, m.wide(), m.one(*(numbers or NUMBERS)))


def product(m: Making) -> Node:
    left = m.wide()
    if m.masks and m.rarely():
        return m.call(aten.mul.Tensor, m.masks[-1], m.partner(m.masks[-1]))
    return m.call(aten.mul.Tensor, left, m.partner(left))


def cast(target: Any) -> Case:
    def case(m: Making) -> Node:
        kinds = (torch.float64,) if m.s.dtype is torch.float64 else FLOATS
        kind = m.one(*kinds, *((torch.int64,) if m.rarely() else ()))
        given = m.masks[-1] if m.masks and m.one(False, True) else m.wide()
        if m.rarely():
            given = columns_equal(m)
        elif m.rarely():
            given, kind = whole_one_hot(m), torch.bool
        if target is aten._to_copy.default:
            return m.call(target, given, dtype=kind)
        return m.call(target, given, kind)

    return case


def fma(m: Making) -> Node:
    left = m.wide()
    return m.call(prims.fma.default, left, m.partner(left), m.partner(left))


# -- guards -------------------------------------------------------------------------------------------


def compare(target: Any) -> Case:
    def case(m: Making) -> Node:
        number = m.one(0.0, -math.inf, torch.finfo(m.s.dtype).min, *LOWEST, 1.0)
        if target in (aten.gt.Scalar, aten.ge.Scalar):
            number = m.one(torch.finfo(m.s.dtype).min, 0.0, number)
        x = m.wide()
        if m.rarely():
            return m.call(target, whole_one_hot(m), m.one(0, 1, 2, 253))
        if number == 0.0 and m.one(True, False):
            x = m.one(lambda m: m.call(aten.exp.default, x), smoothed)(m)
        return m.call(target, x, number)

    return case


def infinite(m: Making) -> Node:
    return m.call(aten.isinf.default, log_softmax(m) if m.one(True, False) else m.wide())


def columns_equal(m: Making, beside: Node | None = None, target: Any = aten.eq.Tensor) -> Node:
    """[v == index]: the number of a column with an index per row, either of which may be something else."""
    shape = sizes(beside or m.wide())
    at = m.one(-1, -1, -1, m.some(-len(shape), -1))
    counted = m.iota(shape[at], start=m.one(0, 0, 0, 1), step=m.one(1, 1, 1, 2))
    view = [1] * len(shape)
    view[at] = shape[at]
    if at != -1 or m.one(False, True):
        counted = m.s.call(aten.view.default, counted, view)
    index = m.index(
        (*shape[:-1], 1) if m.one(True, True, False) else m.shape_beside(shape), "index"
    )
    given = (counted, index) if m.one(True, False) else (index, counted)
    return m.call(target, *given)


def equals(m: Making) -> Node:
    if not m.rarely():
        return columns_equal(m)
    x = m.wide()
    other = m.wide() if m.rarely() else x
    return m.call(aten.eq.Tensor, x, m.call(aten.amax.default, other, [-1], True))


def differ(m: Making) -> Node:
    if not m.rarely():
        return columns_equal(m, target=aten.ne.Tensor)
    return m.call(aten.ne.Tensor, m.wide(), m.wide())


def whole_one_hot(m: Making) -> Node:
    """Of whole numbers, some of them others than 0 and 1."""
    kind = m.one(torch.int64, torch.int32, torch.uint8)
    hot = m.call(prims.convert_element_type.default, columns_equal(m), kind)
    return hot if m.one(True, False) else m.call(aten.mul.Tensor, hot, m.one(2, -3))


def inverted(target: Any) -> Case:
    return lambda m: m.call(target, columns_equal(m) if m.one(False, True) else m.mask(m.wide()))


def spread_flags(m: Making) -> Node:
    x = m.wide()
    flags = m.s.input("flags", (*(m.one(size, size, 1) for size in sizes(x)[:-1]), 1), torch.bool)
    return m.call(aten.expand.default, flags, list(sizes(x)))


def either(target: Any) -> Case:
    def case(m: Making) -> Node:
        one = spread_flags(m)
        if m.rarely():
            one = m.call(aten.logical_not.default, one)
        two = m.one(spread_flags, spread_flags, lambda m: m.mask(one))(m)
        return m.call(target, *((one, two) if m.one(True, False) else (two, one)))

    return case


def both(target: Any) -> Case:
    def case(m: Making) -> Node:
        if m.rarely():
            return either(target)(m)
        p = m.call(aten.exp.default, m.wide()) if m.one(True, True, False) else m.wide()
        first = m.call(m.one(aten.eq.Scalar, aten.le.Scalar), p, 0.0)
        compared = m.wide() if m.rarely() else p
        again = m.one(aten.le.Scalar, aten.eq.Scalar, aten.ne.Scalar, aten.gt.Scalar)
        return m.call(target, first, m.call(again, compared, 0.0))

    return case


def where(m: Making) -> Node:
    x = m.wide()
    if m.rarely():  # the guard that people write, of a value or of another
        other = m.wide()
        guard = m.call(m.one(aten.eq.Scalar, aten.gt.Scalar), other, m.one(0.0, -math.inf))
        mask = guard
    else:
        mask = m.mask(x)
    fill = m.one(0.0, 0.0, 0.0, -math.inf, math.nan, 1.0)
    filled = m.s.call(aten.full.default, [], fill, dtype=m.s.dtype, device="cpu")
    other = filled if m.one(True, False) else m.partner(x)
    pair = (x, other) if m.one(True, False) else (other, x)
    return m.call(aten.where.self, mask, *pair)


def clamp(target: Any) -> Case:
    def case(m: Making) -> Node:
        low = m.one(torch.finfo(m.s.dtype).min, *LOWEST, 0.0, -math.inf)
        args = (low, m.one(None, None, 1.0)) if target is aten.clamp.default else (low,)
        return m.call(target, m.wide(), *args)

    return case


# -- reductions ---------------------------------------------------------------------------------------


def dims(m: Making, node: Node) -> list[int]:
    rank = len(sizes(node))
    return m.one([-1], [-1], [rank - 1], [m.dim(node)], list(range(rank)), [])


def reduced(target: Any) -> Case:
    def case(m: Making) -> Node:
        x = m.wide()
        return m.call(target, x, dims(m, x), m.one(True, False))

    return case


def summed(m: Making) -> Node:
    x = m.masks[-1] if m.masks and m.rarely() else m.wide()
    if m.rarely():
        x = m.s.call(
            aten.full.default,
            list(sizes(x)),
            m.one(3, 0.1, 2**53 + 1),
            dtype=m.one(m.s.dtype, torch.int64),
            device="cpu",
        )
    kwargs = {"dtype": m.one(torch.float64, torch.int64)} if m.rarely() else {}
    return m.call(aten.sum.dim_IntList, x, dims(m, x), m.one(True, False), **kwargs)


def peak(m: Making) -> Node:
    x = m.wide()
    both = m.s.call(aten.max.dim, x, m.dim(x), m.one(True, False))
    m.call(operator.getitem, both, 1)
    return m.call(operator.getitem, both, 0)


def place(m: Making) -> Node:
    x = m.wide()
    return m.call(aten.argmax.default, x, m.one(m.dim(x), m.dim(x), None), m.one(True, False))


def items(m: Making) -> Node:
    x = m.wide()
    if m.one(True, False):
        return peak(m)
    parts = m.s.call(aten.split.Tensor, x, m.some(1, 3), m.dim(x))
    return m.call(operator.getitem, parts, m.some(0, len(value(parts)) - 1))


def bmm(m: Making) -> Node:
    x = m.wide()
    flat = m.call(aten.reshape.default, x, [-1, 1, sizes(x)[-1]])
    count = sizes(flat)[0]
    if m.rarely():
        return m.call(
            aten.bmm.default, flat, m.s.input("rows", (count, sizes(x)[-1], m.some(1, 2)))
        )
    if m.one(False, True):
        turned = m.call(aten.permute.default, flat, [0, 2, 1])
        scalar = m.s.input("rows", (count, 1, 1))
        return m.call(
            aten.bmm.default, *((scalar, flat) if m.one(True, False) else (turned, scalar))
        )
    other = m.call(aten.reshape.default, m.wide(), [-1, 1, sizes(x)[-1]])
    return m.call(aten.bmm.default, flat, m.call(aten.permute.default, other, [0, 2, 1]))


# -- columns ------------------------------------------------------------------------------------------


def rows_named(m: Making, node: Node, columns: int) -> tuple[int, ...]:
    """The rows of an index: all, or some at the beginning."""
    lead = sizes(node)[:-1]
    if m.rarely():
        lead = tuple(m.one(size, max(1, size - 1), 1) for size in lead)
    return (*lead, columns)


def gather(m: Making) -> Node:
    x = m.wide()
    if m.rarely():
        return m.call(aten.gather.default, x, m.dim(x), m.index(rows_named(m, x, 1)))
    return m.call(aten.gather.default, x, -1, m.index(rows_named(m, x, m.one(1, 1, 2, VOCAB))))


def counted_rows(m: Making, node: Node, shape: Sequence[int]) -> list[Node]:
    """0, 1, 2, ... for every leading dimension; now and then something else, or spread from one row."""
    found = []
    for dim, size in enumerate(shape):
        rows = m.iota(m.one(size, size, size, 1), start=m.one(0, 0, 0, 0, 1))
        count = sizes(rows)[0]
        view = [count] + [1] * (len(shape) - dim - 1)
        if m.rarely() and count == 1:
            rows = m.s.call(
                aten.expand.default, m.s.call(aten.view.default, rows, view), list(shape)
            )
        elif len(view) > 1:
            rows = m.s.call(aten.view.default, rows, view)
        found.append(rows)
    return found


def indexed(m: Making) -> Node:
    x = m.wide()
    shape = rows_named(m, x, 1)[:-1]
    columns = m.index(shape)
    if m.rarely():
        columns = m.s.call(aten.sub.Tensor, columns, 2)  # from the end
    return m.call(aten.index.Tensor, x, [*counted_rows(m, x, shape), columns])


def scattered(target: Any) -> Case:
    def case(m: Making) -> Node:
        x = m.wide()
        if m.one(True, False):
            x = m.call(aten.full.default, list(sizes(x)), 0.0, dtype=m.s.dtype, device="cpu")
        columns = m.one(1, 1, 1, 2, VOCAB) if target is aten.scatter_add.default else m.one(1, 1, 2)
        index = m.index(rows_named(m, x, columns))
        if m.rarely():
            best = m.s.call(aten.topk.default, m.s.input("rows", sizes(x)), m.some(1, 3))
            index = m.s.call(operator.getitem, best, 1)
        at = m.dim(x) if m.rarely() else -1
        if target is aten.scatter.value:
            return m.call(target, x, at, index, m.one(*NUMBERS))
        source = m.s.input("rows", sizes(index))
        if m.rarely():
            source = m.s.input("rows", sizes(x))
        if m.rarely():
            source = m.s.call(
                aten.full.default, list(sizes(index)), 2.0, dtype=m.s.dtype, device="cpu"
            )
        return m.call(target, x, at, index, source)

    return case


def index_put(m: Making) -> Node:
    x = m.wide()
    if m.one(True, False):
        x = m.call(aten.full.default, list(sizes(x)), 0.0, dtype=m.s.dtype, device="cpu")
    shape = rows_named(m, x, 1)[:-1]
    columns = m.index(shape)
    if m.rarely():
        columns = m.s.call(aten.sub.Tensor, columns, 2)
    values = m.s.call(aten.full.default, [], m.one(*NUMBERS), dtype=m.s.dtype, device="cpu")
    if m.one(True, False):
        values = m.s.input("rows", m.one(shape, shape, tuple(m.one(n, 1) for n in shape)))
    indices = [*counted_rows(m, x, shape), columns]
    return m.call(aten.index_put.default, x, indices, values, m.one(False, True))


# -- what begins a value --------------------------------------------------------------------------------


def filled(m: Making) -> Node:
    shape = list(m.shape_beside(sizes(m.wide()), VOCAB))
    kind = m.one(m.s.dtype, m.s.dtype, torch.int64, torch.bool)
    return m.call(aten.full.default, shape, m.one(*NUMBERS), dtype=kind, device="cpu")


def filled_like(m: Making) -> Node:
    kwargs = {"dtype": m.one(torch.int64, m.s.dtype)} if m.rarely() else {}
    return m.call(aten.full_like.default, m.wide(), m.one(*NUMBERS, math.inf, math.nan), **kwargs)


def expanded(m: Making) -> Node:
    if m.rarely():
        return spread_flags(m)
    x = m.wide()
    if m.one(True, True, False):
        row = m.s.input("rows", (*(m.one(size, size, 1) for size in sizes(x)[:-1]), 1))
        return m.call(aten.expand.default, row, list(sizes(x)))
    return m.call(aten.expand.default, x, m.one(list(sizes(x)), [2, *sizes(x)]))


# -- rows moved ---------------------------------------------------------------------------------------

BOUNDS = (None, 0, 1, 2, -1, -2, 3, 9223372036854775807)


def sliced(m: Making) -> Node:
    x = m.wide()
    step = m.one(1, 1, 1, 2)
    at = m.some(0, len(sizes(x)) - 1)
    return m.call(aten.slice.Tensor, x, at, m.one(*BOUNDS), m.one(*BOUNDS), step)


def selected(m: Making) -> Node:
    x = m.wide()
    return m.call(aten.select.int, x, m.some(-len(sizes(x)), len(sizes(x)) - 1), m.some(-2, 2))


def pieces(target: Any) -> Case:
    def case(m: Making) -> Node:
        x = m.wide()
        at = m.some(0, len(sizes(x)) - 1)
        if target is aten.split_with_sizes.default:
            first = m.some(0, sizes(x)[at])
            parts = m.s.call(target, x, [first, sizes(x)[at] - first], at)
        elif target is aten.split.Tensor:
            parts = m.s.call(target, x, m.some(1, 3), at)
        else:
            parts = m.s.call(target, x, at)
        found = [m.call(operator.getitem, parts, k) for k in range(len(value(parts)))]
        if not found:
            raise Impossible(f"{target} of nothing")
        return m.one(*found)

    return case


def viewed(target: Any) -> Case:
    def case(m: Making) -> Node:
        x = m.wide()
        *lead, last = sizes(x)
        shapes = (
            [math.prod(lead), last],
            [-1, last],
            [1, *lead, last],
            [*lead, 1, last],
            [*lead, last, 1],
            [*lead[:-1], lead[-1] * last] if lead else [last],
            [last, *lead],
        )
        return m.call(target, x, m.one(*shapes))

    return case


def with_dim(target: Any, grow: int = 0) -> Case:
    def case(m: Making) -> Node:
        x = m.wide()
        rank = len(sizes(x)) + grow
        return m.call(target, x, m.some(-rank, rank - 1))

    return case


def squeezed(m: Making) -> Node:
    x = m.wide()
    ones = [dim for dim, size in enumerate(sizes(x)) if size == 1]
    return m.call(aten.squeeze.dims, x, m.one(ones, [0], [0, -1]))


def permuted(m: Making) -> Node:
    x = m.wide()
    order = list(range(len(sizes(x))))
    swapped = [m.some(0, len(order) - 1) for _ in range(2)]
    order[swapped[0]], order[swapped[1]] = order[swapped[1]], order[swapped[0]]
    return m.call(aten.permute.default, x, m.one(order, [d - len(order) for d in order]))


def transposed(m: Making) -> Node:
    x = m.wide()
    rank = len(sizes(x))
    return m.call(aten.transpose.int, x, m.some(-rank, rank - 1), m.some(-rank, rank - 1))


def counted(m: Making) -> Node:
    x = m.wide()
    return m.call(aten.sym_size.int, x, m.some(0, len(sizes(x)) - 1))


# -- rows written home --------------------------------------------------------------------------------


def changed(m: Making, piece: Node) -> Node:
    """Arithmetic on a piece before it is written home."""
    kind = m.one(0, 1, 2, 3, 0, 1, 2, 3, 4)
    if kind == 0:
        return piece
    if kind == 1:
        return m.call(aten.exp.default, piece)
    if kind == 2:
        return m.call(aten.mul.Tensor, piece, m.row(piece))
    if kind == 3:
        return m.call(aten.sub.Tensor, piece, m.call(aten.amax.default, piece, [-1], True))
    return one_hot(m, piece)


def base(m: Making, node: Node) -> Node:
    """What is written into: zeros, another constant, or the value itself."""
    kind = m.one(0, 0, 0, 1, 2)
    if kind == 2:
        return node if m.one(True, False) else m.wide()
    return m.s.call(
        aten.full.default, list(sizes(node)), float(kind), dtype=m.s.dtype, device="cpu"
    )


def slice_scatter(m: Making) -> Node:
    x = m.wide()
    where_ = (
        0 if m.one(True, True, False) else m.some(0, len(sizes(x)) - 1),
        m.one(*BOUNDS),
        m.one(*BOUNDS),
        m.one(1, 1, 1, 2),
    )
    piece = changed(m, m.call(aten.slice.Tensor, x, *where_))
    if m.rarely():
        where_ = (where_[0], m.one(*BOUNDS), m.one(*BOUNDS), m.one(1, 2))
    return m.call(aten.slice_scatter.default, base(m, x), piece, *where_)


def select_scatter(m: Making) -> Node:
    x = m.wide()
    at, index = m.some(0, max(len(sizes(x)) - 2, 0)), m.some(-1, 1)
    piece = changed(m, m.call(aten.select.int, x, at, index))
    return m.call(aten.select_scatter.default, base(m, x), piece, at, m.one(index, index, 0))


def joined(m: Making) -> Node:
    x = m.wide()
    at = m.one(0, 0, m.some(0, len(sizes(x)) - 1))
    if m.rarely():
        return m.call(aten.cat.default, [x, m.wide()], at)
    size = sizes(x)[at]
    cut, step = m.one(1, 1, size // 2, m.some(0, size)), m.one(1, 1, 1, 2)
    parts = [
        m.call(aten.slice.Tensor, x, at, start, stop, step)
        for start, stop in ((0, cut), (cut, size))
    ]
    if m.rarely():
        parts = [m.call(aten.select.int, x, at, k) for k in range(size)]
        parts = [m.call(aten.unsqueeze.default, part, at) for part in parts]
    parts = [changed(m, part) for part in parts]
    return m.call(aten.cat.default, parts[::-1] if m.rarely() else parts, at)


CASES: dict[Any, Case] = {
    aten.clone.default: unary(aten.clone.default),
    aten.alias.default: unary(aten.alias.default),
    aten.detach.default: unary(aten.detach.default),
    aten.lift_fresh_copy.default: unary(aten.lift_fresh_copy.default),
    prims.convert_element_type.default: cast(prims.convert_element_type.default),
    aten._to_copy.default: cast(aten._to_copy.default),
    aten.copy.default: copied,
    aten.neg.default: unary(aten.neg.default),
    aten.add.Tensor: binary(aten.add.Tensor),
    aten.add.Scalar: with_number(aten.add.Scalar),
    aten.sub.Tensor: binary(aten.sub.Tensor),
    aten.sub.Scalar: with_number(aten.sub.Scalar),
    aten.rsub.Scalar: with_number(aten.rsub.Scalar),
    aten.rsub.Tensor: binary(aten.rsub.Tensor),
    aten.mul.Tensor: product,
    aten.mul.Scalar: with_number(aten.mul.Scalar),
    aten.div.Tensor: divided,
    aten.div.Scalar: with_number(aten.div.Scalar, 2.0, -1.0, 0.5, 3),
    prims.fma.default: fma,
    aten.pow.Tensor_Scalar: with_number(aten.pow.Tensor_Scalar, 1, 2, 2.0, 3, 0.5, 0),
    aten.exp.default: unary(aten.exp.default),
    aten.log.default: lambda m: m.call(
        aten.log.default,
        m.one(m.wide(), softmax(m), smoothed(m), m.call(aten.exp.default, m.wide())),
    ),
    aten.eq.Scalar: compare(aten.eq.Scalar),
    aten.ne.Scalar: compare(aten.ne.Scalar),
    aten.gt.Scalar: compare(aten.gt.Scalar),
    aten.ge.Scalar: compare(aten.ge.Scalar),
    aten.le.Scalar: compare(aten.le.Scalar),
    aten.eq.Tensor: equals,
    aten.ne.Tensor: differ,
    aten.isnan.default: lambda m: m.call(aten.isnan.default, m.one(Making.wide, smoothed)(m)),
    aten.isinf.default: infinite,
    aten.bitwise_and.Tensor: both(aten.bitwise_and.Tensor),
    aten.logical_and.default: both(aten.logical_and.default),
    aten.bitwise_or.Tensor: either(aten.bitwise_or.Tensor),
    aten.logical_or.default: either(aten.logical_or.default),
    aten.logical_not.default: inverted(aten.logical_not.default),
    aten.bitwise_not.default: inverted(aten.bitwise_not.default),
    aten.where.self: where,
    aten.clamp_min.default: clamp(aten.clamp_min.default),
    aten.clamp.default: clamp(aten.clamp.default),
    aten.amax.default: reduced(aten.amax.default),
    aten.max.dim: peak,
    aten.argmax.default: place,
    aten.sum.dim_IntList: summed,
    aten.sum.default: unary(aten.sum.default),
    aten.mean.dim: reduced(aten.mean.dim),
    aten.mean.default: unary(aten.mean.default),
    aten.bmm.default: bmm,
    operator.getitem: items,
    aten.gather.default: gather,
    aten.index.Tensor: indexed,
    aten.scatter.value: scattered(aten.scatter.value),
    aten.scatter.src: scattered(aten.scatter.src),
    aten.scatter_add.default: scattered(aten.scatter_add.default),
    aten.index_put.default: index_put,
    aten.full.default: filled,
    aten.full_like.default: filled_like,
    aten.zeros_like.default: unary(aten.zeros_like.default),
    aten.ones_like.default: unary(aten.ones_like.default),
    aten.expand.default: expanded,
    aten.slice.Tensor: sliced,
    aten.select.int: selected,
    aten.split.Tensor: pieces(aten.split.Tensor),
    aten.split_with_sizes.default: pieces(aten.split_with_sizes.default),
    aten.unbind.int: pieces(aten.unbind.int),
    aten.view.default: viewed(aten.view.default),
    aten._unsafe_view.default: viewed(aten._unsafe_view.default),
    aten.reshape.default: viewed(aten.reshape.default),
    aten.unsqueeze.default: with_dim(aten.unsqueeze.default, grow=1),
    aten.squeeze.default: unary(aten.squeeze.default),
    aten.squeeze.dim: with_dim(aten.squeeze.dim),
    aten.squeeze.dims: squeezed,
    aten.permute.default: permuted,
    aten.transpose.int: transposed,
    aten.t.default: unary(aten.t.default),
    aten.sym_size.int: counted,
    aten.slice_scatter.default: slice_scatter,
    aten.select_scatter.default: select_scatter,
    aten.cat.default: joined,
}


# -- numbers per row ----------------------------------------------------------------------------------


def a_row(m: Making) -> Node:
    """A number per row, often one of a softmax."""
    if m.rows and m.one(True, True, False):
        return m.rows[-1 - min(m.some(0, 3), len(m.rows) - 1)]
    return m.keep(m.s.input(m.one("rows", "positive"), m.shape_beside((*m.lead, VOCAB))))


def a_maximum(m: Making) -> Node:
    """A number per row that is made of the logits."""
    return m.call(aten.amax.default, m.wides[0], [-1], True)


def row_unary(target: Any) -> Case:
    return lambda m: m.call(target, a_row(m))


def row_binary(target: Any) -> Case:
    def case(m: Making) -> Node:
        left = m.one(a_row, a_row, a_maximum)(m)
        right = m.one(a_row(m), a_row(m), m.one(*NUMBERS))
        alpha = (
            {"alpha": 2.0} if target in (aten.add.Tensor, aten.sub.Tensor) and m.rarely() else {}
        )
        return m.call(target, left, right, **alpha)

    return case


def row_cast(target: Any) -> Case:
    def case(m: Making) -> Node:
        kinds = (torch.float64,) if m.s.dtype is torch.float64 else FLOATS
        given = a_row(m)
        if m.rarely():
            given = m.s.input("hits", (*m.lead, 1), torch.int64)
        if target is aten._to_copy.default:
            return m.call(target, given, dtype=m.one(*kinds))
        return m.call(target, given, m.one(*kinds))

    return case


def row_view(target: Any) -> Case:
    def case(m: Making) -> Node:
        row = a_row(m)
        shape = list(sizes(row))
        count = math.prod(shape)
        return m.call(target, row, m.one([count], [count, 1], [*shape, 1], [1, *shape], [-1]))

    return case


def row_dim(target: Any, grow: int = 0) -> Case:
    def case(m: Making) -> Node:
        row = a_row(m)
        rank = len(sizes(row)) + grow
        at = m.some(-rank, max(rank - 1, 0))
        return m.call(target, row, [at] if target is aten.squeeze.dims else at)

    return case


def row_select(m: Making) -> Node:
    row = a_row(m)
    rank = len(sizes(row))
    at = m.one(-1, -1, m.some(-rank, max(rank - 1, 0)))
    return m.call(aten.select.int, row, at, m.one(0, 0, -1, 1))


def row_cat(m: Making) -> Node:
    """Pieces of one value along a dimension, cut as rows or slices, some of them changed alike, or in another order."""
    x = m.one(Making.wide, a_row)(m)
    if not sizes(x):
        raise Impossible
    dim = m.one(0, 0, m.some(-len(sizes(x)), len(sizes(x)) - 1))
    count = sizes(x)[dim]
    if not count:
        raise Impossible
    one_by_one = m.one(True, False)
    pieces = [
        m.s.call(aten.select.int, x, dim, k)
        if one_by_one
        else m.s.call(aten.slice.Tensor, x, dim, k, k + m.one(1, 1, 2))
        for k in range(count)
    ]
    reduced = m.one(None, aten.amax.default, aten.sum.dim_IntList)
    if reduced is not None:
        keep = m.one(True, False)
        pieces = [m.s.call(reduced, piece, [-1], keep) for piece in pieces]
    if m.rarely():
        pieces = m.one(pieces[::-1], pieces[1:], [*pieces, pieces[0]])
    if m.one(True, False):
        pieces = [m.s.call(aten.neg.default, piece) for piece in pieces]
    return m.call(aten.cat.default, pieces, m.one(0, 0, 0, -1))


def row_log(m: Making) -> Node:
    row = a_row(m)
    if m.one(True, False):
        row = m.call(aten.exp.default, row)
    if m.rarely():
        row = m.call(aten.mul.Tensor, row, m.call(aten.exp.default, a_row(m)))
    return m.call(aten.log.default, row)


ROW_CASES: dict[Any, Case] = {
    prims.convert_element_type.default: row_cast(prims.convert_element_type.default),
    aten._to_copy.default: row_cast(aten._to_copy.default),
    aten.view.default: row_view(aten.view.default),
    aten._unsafe_view.default: row_view(aten._unsafe_view.default),
    aten.reshape.default: row_view(aten.reshape.default),
    aten.unsqueeze.default: row_dim(aten.unsqueeze.default, grow=1),
    aten.squeeze.default: row_unary(aten.squeeze.default),
    aten.squeeze.dim: row_dim(aten.squeeze.dim),
    aten.squeeze.dims: row_dim(aten.squeeze.dims),
    aten.select.int: row_select,
    aten.cat.default: row_cat,
    aten.neg.default: row_unary(aten.neg.default),
    aten.add.Tensor: row_binary(aten.add.Tensor),
    aten.sub.Tensor: row_binary(aten.sub.Tensor),
    aten.mul.Tensor: row_binary(aten.mul.Tensor),
    aten.div.Tensor: row_binary(aten.div.Tensor),
    aten.log.default: row_log,
}


# -- whole programs -----------------------------------------------------------------------------------


def attempt(m: Making, case: Case) -> None:
    with contextlib.suppress(Impossible):
        case(m)


USED = (
    aten.sum.dim_IntList,
    aten.gather.default,
    aten.mul.Tensor,
    aten.amax.default,
    aten.exp.default,
)
"""What a value is often used by."""


@st.composite
def programs(draw: st.DrawFn, case: Case, before: int = 3) -> tuple[Making, int]:
    """A graph in which `case` comes after some other operators and before some uses; how many nodes came before."""
    m = Making(draw, dynamic=case is counted)
    for _ in range(m.some(0, before)):
        attempt(m, m.one(*RECIPES) if m.one(True, False) else m.one(*CASES.values()))
    if m.rarely():
        attempt(m, Making.logits)
    first = len(m.s.graph.nodes)
    try:
        case(m)
    except Impossible:
        m.failed = True
        return m, first
    for _ in range(m.some(0, 1)):
        attempt(m, CASES[m.one(*USED)])
    return m, first
