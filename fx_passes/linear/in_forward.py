"""Can forward compute the gradient of the logits, chunk by chunk? If so, the program for it.

Entry point: `in_forward`. Each row's coefficients of the gradient must follow from that row's own statistics and picked
columns, from values that do not depend on these logits, and from one number that backward brings (the gradient of a
scalar loss), of which they must be a multiple. Then the chunk's gradient is taken with 1 in the place of that number,
and backward only multiplies: 6 instead of 8 products of rows x vocabulary x hidden. What follows from that number and
not from the logits is computed once in the graph, for 1, whatever its shape. Longer than other files: the proof and the
program that it yields are one walk, operator by operator.

NOTE [Row programs]
The arithmetic between statistics and coefficients is told to the operator as JSON, so that compiled code can be kept by
torch's caches: a list of values, each one of

    ["stat", s, k] ["pick", from, to]      statistic k of scale s, picked columns     [n, 1], [n, columns]
    ["row", i] ["whole", i]                tensor i, rows of it or all of it          [n, ...], one element
    ["rows", v, rest] ["expand", v, rest]  value v in another shape                   [n, *rest]
    ["cast", v, dtype] ["cat", [v, ..], d] ["call", operator, args, kwargs]

and the places of terms, affine, index and values among them. `slime_compile/ops/row_program.py` runs it on n rows at a
time. Leading dimensions, [B, S] or [N], are one there.
"""

from __future__ import annotations

import functools
import json
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fx_passes.graph.backward import is_tangent
from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import same, shape_of, value
from fx_passes.graph.operators import CASTS, RESHAPES, SAME_ROWS, WRITES, is_zero
from fx_passes.graph.order import ancestors, descendants
from fx_passes.graph.slices import takes_all
from fx_passes.linear.degrees import MULTIPLE, PLAIN, ZERO, Units, degree_of_result, line_of
from fx_passes.linear.samples import Part, Written, addends, are_all, part_of
from fx_passes.refused import Refused

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True)
class RowProgram:
    """The program, its tensors as nodes that forward can compute, and backward's number."""

    text: str
    inputs: tuple[Node, ...]
    tangent: Node


def in_forward(
    grad: Node,
    readers: Iterable[Node],
    stats: Mapping[Node, tuple[int, int]],
    picks: Mapping[Node, tuple[int, int]],
    rows: Any,
    emit: Emitter,
) -> RowProgram:
    """The row program for the coefficients of `grad`, a `row_grad`.

    Args:
        readers: all that is read of these logits.
        stats: results of `row_stats`, each as (scale, statistic).
        picks: gathers, each as columns [from, to) of what is picked.
        rows: N, as a size.

    Raises:
        Refused: with the reason.
    """
    tangents = [n for n in grad.graph.find_nodes(op="placeholder") if is_tangent(n)]
    _, terms, affine, index, values, *_ = grad.args
    wanted: list[Any] = [terms, affine, index, values]
    above = ancestors(wanted) | set(wanted)
    reached = [n for n in tangents if n in above]
    if len(reached) != 1 or shape_of(reached[0]):
        raise Refused("the gradient does not come from one scalar loss")
    moving = descendants(readers)
    units = Units(reached[0], descendants(tangents), emit)
    builder = _Builder(stats, picks, moving, units, rows, emit)
    results = [
        builder.cells(terms, 2, [PLAIN] * 3 + [MULTIPLE] * 2),  # type: ignore[arg-type]
        builder.cells(affine, 1, [MULTIPLE]),  # type: ignore[arg-type]
        builder.cells(index, 1, [PLAIN]),  # type: ignore[arg-type]
        builder.cells(values, 1, [MULTIPLE]),  # type: ignore[arg-type]
    ]
    text = json.dumps({"values": builder.values, "results": results}, separators=(",", ":"))
    text = urllib.parse.quote(text, safe="{}[]:,/ ")  # inductor's C++ wrapper escapes no quotes
    return RowProgram(text, tuple(builder.inputs), reached[0])


class _Builder:
    def __init__(
        self,
        stats: Mapping[Node, tuple[int, int]],
        picks: Mapping[Node, tuple[int, int]],
        moving: set[Node],
        units: Units,
        rows: Any,
        emit: Emitter,
    ) -> None:
        self.stats, self.picks = stats, picks
        self.moving, self.units = moving, units
        self.rows = rows
        self.emit = emit
        self.values: list[Any] = []
        self.inputs: list[Node] = []
        self._places: dict[Node, int] = {}
        self._degrees: list[str] = []
        self._steps: dict[str, int] = {}
        self._parts: dict[Node, tuple[Part, Any]] = {}

    # -- results ---------------------------------------------------------------------------------

    def cells(self, node: Node, dims: int, degrees: Sequence[str]) -> int:
        """The place of `node`, [n, ...] with `dims` further dimensions.

        The last one's entries must be of the given degrees, in turn.
        """
        packed = node
        while packed.op == "call_function" and packed.target in RESHAPES:
            packed = packed.args[0]  # type: ignore[assignment]
        joined = packed.target is aten.cat.default
        parts: Any = packed.args[0] if joined else [packed]
        empty = any(same(size, 0) for size in shape_of(node))
        for at, part in enumerate(parts):
            found, wanted = self._degree(part), degrees[at % len(degrees)]
            if not empty and found not in (ZERO, wanted):
                raise Refused(
                    f"a coefficient is not a multiple of the loss's gradient: {line_of(part)}"
                )
        place, rest = self.place(node), self._rest(node)
        if rest is None or len(rest) == dims:
            return place
        flat = self._fixed_rest(node)[-dims:]  # rows were [N, 1]
        return self._add(["rows", place, flat], self._degrees[place])

    def _degree(self, node: Node) -> str:
        return self._degrees[self.place(node)]

    # -- values ----------------------------------------------------------------------------------

    def place(self, node: Node) -> int:
        if node not in self._places:
            self._places[node] = self._placed(node)
        return self._places[node]

    def _add(self, step: list[Any], degree: str) -> int:
        key = json.dumps([step, degree])
        if key not in self._steps:
            self._steps[key] = len(self.values)
            self.values.append(step)
            self._degrees.append(degree)
        return self._steps[key]

    def _placed(self, node: Node) -> int:
        if node in self.stats:
            return self._in_shape_of(node, self._add(["stat", *self.stats[node]], PLAIN))
        if node in self.picks:
            wide: Node = node.args[0]  # type: ignore[assignment]
            if self._is_part(wide):
                self._mark(node, wide)
            return self._in_shape_of(node, self._add(["pick", *self.picks[node]], PLAIN))
        if self._is_part(node):
            return self._taken(node)
        if node not in self.moving:
            return self._input(node, node)
        if node.op != "call_function" or not isinstance(value(node), torch.Tensor):
            raise Refused(f"a coefficient depends on {line_of(node)}")
        return self._called(node)

    def _in_shape_of(self, node: Node, at: int) -> int:
        """The value `at`, [n, columns], with what `node` has after its rows, which may have been [N, 1]."""
        rest = self._rest(node)
        if rest is None or len(rest) == 1:
            return at
        return self._add(["rows", at, self._fixed_rest(node)], self._degrees[at])

    def _input(self, node: Node, like: Node) -> int:
        """A value that these logits and backward have no part in, in the rows of `like`."""
        degree = self.units.degree(node)
        node = self.units.of(node)
        if _is_one_element(node):
            return self._add(["whole", self._input_number(node)], degree)
        if not self._has_rows_of(node, like):
            if self._rest(like) is None or like in self._parts:
                raise Refused(f"a coefficient depends on other rows: {line_of(like)}")
            node = self.emit.expand(
                self.emit.align(node, len(shape_of(like))), self.emit.sizes(like)
            )
        rest = self._rest(node)
        assert rest is not None, node
        sizes = self.emit.sizes(node)
        flat = self.emit.reshape(node, [self._row_count(), *sizes[len(sizes) - len(rest) :]])
        return self._add(["row", self._input_number(flat)], degree)

    def _input_number(self, node: Node) -> int:
        for at, known in enumerate(self.inputs):
            if node is known or _is_same_constant(node, known):
                return at
        self.inputs.append(node)
        return len(self.inputs) - 1

    def _row_count(self) -> Any:
        return self.rows if isinstance(self.rows, int) else self.emit.size_of(self.rows.node.expr)

    def _rest(self, node: Node) -> tuple[Any, ...] | None:
        """Sizes after those of the rows; None where `node` is not a value per row."""
        count: Any = 1
        shape = shape_of(node)
        _, rows = self._parts.get(node, (None, self.rows))
        for at, size in enumerate(shape):
            count = count * size
            if same(count, rows):
                return shape[at + 1 :]
        return None

    def _has_rows_of(self, node: Node, like: Node) -> bool:
        """Whether `node`, an operand of `like`, has for each row its own values: what is broadcast has not.

        A size says nothing: there may be as many columns as rows.
        """
        shape, wanted, rest = shape_of(node), shape_of(like), self._rest(like)
        if rest is None or len(shape) != len(wanted):
            return False
        rows = len(wanted) - len(rest)
        return all(same(a, b) for a, b in zip(shape[:rows], wanted[:rows], strict=True))

    def _fixed_rest(self, node: Node) -> list[int]:
        rest = self._rest(node)
        if rest is None or not all(isinstance(size, int) for size in rest):
            raise Refused(f"a coefficient depends on other rows: {line_of(node)}")
        return list(rest)

    # -- parts of the rows -----------------------------------------------------------------------
    #
    # What is computed of a part of the rows is computed of all of them: row by row it is the same. Put together again,
    # the parts have to be the same value.

    def _is_part(self, node: Node) -> bool:
        part, whole = part_of(node), node.args[0] if node.args else None
        if part is None or not isinstance(whole, Node) or whole in self._parts:
            return False
        rest = self._rest(whole)
        return rest is not None and len(shape_of(whole)) - len(rest) > part.dropped

    def _taken(self, node: Node) -> int:
        whole: Node = node.args[0]  # type: ignore[assignment]
        at = self.place(whole)
        if whole in self._parts:
            raise Refused(f"a coefficient depends on other rows: {line_of(node)}")
        self._mark(node, node)
        return at

    def _mark(self, node: Node, view: Node) -> None:
        """`node` has the rows of `view`, which is a part."""
        whole, part = view.args[0], part_of(view)
        assert isinstance(whole, Node), view
        assert part is not None, view
        shape, rest = shape_of(whole), self._rest(whole)
        assert rest is not None, view
        count: Any = part.stop - part.start
        for size in shape[1 : len(shape) - len(rest)]:
            count = count * size
        self._parts[node] = part, count

    def _note_part(self, node: Node) -> None:
        """What is computed of a part is of that part."""
        found = []
        for arg in node.all_input_nodes:
            if isinstance(value(arg), torch.Tensor) and (arg in self.moving or self._is_part(arg)):
                self.place(arg)
                found += [self._parts[arg]] if arg in self._parts else []
        if any(part != found[0][0] or not same(rows, found[0][1]) for part, rows in found):
            raise Refused(f"a coefficient depends on other rows: {line_of(node)}")
        if found:
            self._parts[node] = found[0]

    def _put_together(self, node: Node) -> int | None:
        """The place of the value whose parts are joined, or written into zeros and added; None for anything else."""
        joined = self._joined_parts(node)
        written, others = (joined, []) if joined else addends(node, self.moving)
        if not written:
            return None
        sets: dict[int, list[Written]] = {}
        for each in written:
            sets.setdefault(self._of_all(each), []).append(each)
        if not all(self._are_whole(parts, node) for parts in sets.values()):
            raise Refused(f"a coefficient depends on other rows: {line_of(node)}")
        rest = [self._signed(self._operand(each.node, node), each.sign) for each in others]
        return functools.reduce(lambda left, right: self._plus(left, right, node), [*sets, *rest])

    def _of_all(self, written: Written) -> int:
        """The place of what is written, of all rows."""
        at = self.place(written.source)
        for node in written.steps:
            args = [{"value": at}, *node.args[1:]]
            at = self._add(["call", str(node.target), args, {}], self._degrees[at])
        return self._signed(at, written.sign)

    def _signed(self, at: int, sign: int) -> int:
        if sign > 0:
            return at
        return self._add(["call", str(aten.neg.default), [{"value": at}], {}], self._degrees[at])

    def _plus(self, left: int, right: int, node: Node) -> int:
        add = aten.add.Tensor
        degree = degree_of_result(node, [self._degrees[left], self._degrees[right]], add)
        return self._add(["call", str(add), [{"value": left}, {"value": right}], {}], degree)

    def _are_whole(self, found: Sequence[Written], node: Node) -> bool:
        """Whether they are, in this order, the parts of all rows."""
        parts = [each.part for each in found]
        if parts != [self._part_under(each.source) for each in found] or not are_all(parts):
            return False
        rest = self._fixed_rest(node)
        return all(self._fixed_rest(each.source) == rest for each in found)

    def _joined_parts(self, node: Node) -> list[Written]:
        sources: Any = node.args[0] if node.target is aten.cat.default else []
        dim: Any = node.args[1] if len(node.args) > 1 else 0
        if not sources or dim % len(shape_of(node)):
            return []
        parts = [(source, self._part_under(source)) for source in sources]
        return [Written(source, part) for source, part in parts if part is not None]

    def _part_under(self, node: Node) -> Part | None:
        if node in self.moving or self._is_part(node):
            self.place(node)
        return self._parts.get(node, (None, None))[0]

    # -- operators -------------------------------------------------------------------------------

    def _called(self, node: Node) -> int:
        together = self._put_together(node)
        if together is not None:
            return together
        self._note_part(node)
        target, first = node.target, node.args[0]
        if target in SAME_ROWS or target is aten.expand.default:
            assert isinstance(first, Node), node
            return self._reshaped(node, first)
        if target in CASTS:
            at = self.place(first)  # type: ignore[arg-type]
            return self._add(["cast", at, _name(value(node).dtype)], self._degrees[at])
        if target is aten.cat.default:
            return self._joined(node)
        if target in _WITHIN_A_ROW:
            return self._within_a_row(node)
        tags = getattr(target, "tags", ())
        if torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags:
            raise Refused(f"a coefficient depends on other rows: {line_of(node)}")
        return self._pointwise(node)

    def _reshaped(self, node: Node, first: Node) -> int:
        at = self.place(first)
        if not shape_of(node) and not shape_of(first):
            return at
        step = "expand" if node.target is aten.expand.default else "rows"
        rest = self._fixed_rest(node)
        if step == "rows" or shape_of(first):
            before = self._fixed_rest(first)
            ranks = len(shape_of(first)), len(before)
            if step == "expand" and ranks != (len(shape_of(node)), len(rest)):
                raise Refused(f"a coefficient depends on other rows: {line_of(node)}")
        return self._add([step, at, rest], self._degrees[at])

    def _joined(self, node: Node) -> int:
        parts: Any = node.args[0]
        rank = len(shape_of(node))
        dim: Any = node.args[1] if len(node.args) > 1 else 0
        kept = len(self._fixed_rest(node))
        place = dim % rank - (rank - kept)
        if place < 0:
            raise Refused(f"a coefficient depends on other rows: {line_of(node)}")
        places = [self._operand(part, node, joined=True) for part in parts]
        degrees = {self._degrees[at] for at in places}
        return self._add(["cat", places, place + 1], degrees.pop() if len(degrees) == 1 else PLAIN)

    def _within_a_row(self, node: Node) -> int:
        """Columns of a value that has some per row, their sum, or what is written over them."""
        at = _WITHIN_A_ROW[node.target]
        whole: Node = node.args[0]  # type: ignore[assignment]
        tensors: list[Any] = list(node.args[:at])
        dims: Any = node.args[at] if len(node.args) > at else 0
        if node.target in _SLICES and _takes_all(node, shape_of(whole)[dims], at + 1):
            return self.place(tensors[-1])
        rank = len(shape_of(whole))
        rows = rank - len(self._fixed_rest(whole))
        listed = dims if isinstance(dims, list) else [dims]
        places = [0 if dim is None else dim % rank - rows + 1 for dim in listed]
        if not places or min(places) < 1:  # none listed: a sum of all
            raise Refused(f"a coefficient depends on other rows: {line_of(node)}")
        args = [{"value": self._operand(each, each)} for each in tensors]
        moved: Any = places if isinstance(dims, list) else places[0]
        others = [self._argument(arg, node) for arg in node.args[at + 1 :]]
        kwargs = {name: self._argument(arg, node) for name, arg in node.kwargs.items()}
        degree = self._degree_of(whole) if at == 1 else self._multiple(node)
        return self._add(["call", str(node.target), [*args, moved, *others], kwargs], degree)

    def _pointwise(self, node: Node) -> int:
        args = [self._argument(arg, node) for arg in node.args]
        kwargs = {name: self._argument(arg, node) for name, arg in node.kwargs.items()}
        step = ["call", str(node.target), args, kwargs]
        return self._add(step, self._multiple(node))

    def _argument(self, arg: Any, node: Node) -> Any:
        if isinstance(arg, Node):
            return {"value": self._operand(arg, node)}
        if isinstance(arg, torch.dtype):
            return {"dtype": _name(arg)}
        if arg is None or isinstance(arg, bool | int | float | str):
            return arg
        raise Refused(f"an argument of {line_of(node)} is {arg}, no real number")

    def _operand(self, arg: Node, node: Node, joined: bool = False) -> int:
        """The place of an operand whose rows are those of `node`."""
        if not isinstance(value(arg), torch.Tensor):
            raise Refused(f"a size is an operand of {line_of(node)}")
        if not shape_of(arg):
            return self.place(arg)
        if (
            arg not in self.moving
            and _is_one_element(arg)
            and value(arg).dtype != value(node).dtype
        ):
            raise Refused(f"an operand of {line_of(node)} has another dtype than its result")
        of_others = node in self._parts and arg not in self._parts and not _is_one_element(arg)
        if not shape_of(node) or of_others:
            raise Refused(f"a coefficient depends on other rows: {line_of(node)}")
        self._fixed_rest(node)  # or it waits
        if self._has_rows_of(arg, node):
            return self.place(arg)
        if arg in self.moving or joined:
            raise Refused(f"rows are broadcast in {line_of(node)}")
        return self._input(arg, node)

    # -- multiples -------------------------------------------------------------------------------

    def _multiple(self, node: Node) -> str:
        """The degree of a pointwise result.

        Raises:
            Refused: it is neither independent of backward's number nor a multiple of it.
        """
        return degree_of_result(node, [self._degree_of(arg) for arg in node.args])

    def _degree_of(self, arg: Any) -> str:
        if not isinstance(arg, Node):
            return ZERO if isinstance(arg, int | float) and arg == 0 else PLAIN
        if is_zero(arg):
            return ZERO
        return self._degree(arg) if arg in self.moving else self.units.degree(arg)


_WITHIN_A_ROW: dict[Any, int] = {
    **dict.fromkeys(WRITES, 1),
    **dict.fromkeys(WRITES.values(), 2),
    aten.sum.dim_IntList: 1,
}
"""Where their dimensions stand among the arguments, after the tensors."""

_SLICES: set[Any] = {aten.slice.Tensor, aten.slice_scatter.default}


def _takes_all(node: Node, size: Any, at: int) -> bool:
    """Whether a slice, whose bounds and step begin at argument `at`, is of everything: `[:, 0]` where sizes vary."""
    given: list[Any] = list(node.args[at:])
    given += [None, None, 1][len(given) :]
    return takes_all(size, *given)


def _is_same_constant(one: Node, other: Node) -> bool:
    made = one.op == other.op == "call_function" and one.target is other.target
    plain = made and one.target in (aten.scalar_tensor.default, aten.full.default)
    same_args = plain and not one.all_input_nodes and one.args == other.args
    return same_args and one.kwargs == other.kwargs


def _is_one_element(node: Node) -> bool:
    return all(same(size, 1) for size in shape_of(node))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
