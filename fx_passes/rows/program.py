"""A loop as text, run by the operator `slime_fused::row_loop`.

Entry point: `Program`. NOTE [Loops as text] says how it looks; `slime_compile/ops/row_loop.py` reads it.

NOTE [Loops as text]
The text of a loop is an argument of its operator. Torch's caches can then keep compiled code, because their key is the
graph's text. The text is JSON:

    rows      of each tensor with rows its block: [dims], or [dims, value]: the rows of these numbers
    steps     [operator, arguments, keyword arguments], in a runnable order
    results   ["rows", value, dtype, sizes]         chunks one behind the other              [N, *sizes]
              ["rows", value, dtype, sizes, dim]    the same; in memory the rows are dimension number dim
              ["matmul", left, right, dtype, sizes]   left @ right, written as chunks of rows  [N, *sizes]
              ["put", value, dtype, sizes, value]   at these row numbers, zero else        [N of all, V]
              ["sum", value, dtype, sizes]          added over chunks, or "max", "min"        sizes
              ["product", left, right, dtype, sizes]  left.t() @ right, added over chunks     sizes
    wide      [columns, bytes of one, multiple, depth]: of the widest value of a chunk, its rows, its matmuls
    columns   whether the rows are the columns of logits

The result of a step overwriting its first argument (`row_grad_`) is this argument.

Values are numbered: tensors with rows, tensors without, then the result of each step. An argument is a number, a list,
or one of {"v": value}, {"n": 1} for the rows of the chunk, {"s": i} for size number i, {"d": dtype}.
"""

from __future__ import annotations

import json
import operator
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import SizeArg, rank_of, value
from fx_passes.graph.operators import MATMULS, VIEWS, turns
from fx_passes.graph.rows import (
    COUNT,
    NUMBERS,
    Across,
    Block,
    Rows,
    Step,
    Whole,
    in_front,
    normal,
    shape_of_value,
    wide_dtype,
)
from fx_passes.refused import Refused
from fx_passes.rows.loops import Loop
from fx_passes.rows.parts import Part, taken

aten = torch.ops.aten

_GRADIENT = "slime_fused.row_grad.default"
_MATMULS = set(map(str, MATMULS))
_VIEWS = frozenset(map(str, VIEWS)) | {"getitem"}
_ONCE = _VIEWS - {str(aten.expand.default)}  # each element once


def _has_its_dtype(node: Node) -> bool:
    """A gradient in the dtype of the logits."""
    return bool(value(node).dtype == value(node.args[0]).dtype)


def wide_results(text: str) -> tuple[int, set[int]]:
    """Columns of the widest value of a chunk of rows, 0 for a loop over columns; and the results possibly as wide."""
    told = json.loads(urllib.parse.unquote(text))
    columns = 0 if told["columns"] else told["wide"][0]
    found = {at for at, (how, *_) in enumerate(told["results"]) if how in ("rows", "put")}
    return columns, found


def values_read(arg: Any) -> set[Any]:
    """The values named in a part of a loop's text."""
    if isinstance(arg, dict):
        return {arg["v"]} if "v" in arg else set()
    if isinstance(arg, list):
        return set().union(*map(values_read, arg))
    return set()


class Program:
    """The text of a loop, and the arguments of its operator.

    Args:
        puts: the row numbers of results put among other rows.
        made: results of earlier loops, as [N, *sizes]; sums in their own shape.
        given: a value of the graph as the loop is given it.
    """

    def __init__(
        self,
        loop: Loop,
        emit: Emitter,
        puts: Mapping[Node, Part],
        made: Mapping[Node, Node],
        given: Callable[[Node], Node],
    ) -> None:
        self.loop, self.region, self.emit, self.made, self.given = (
            loop,
            loop.region,
            emit,
            made,
            given,
        )
        self.puts = {node: part for node, part in puts.items() if node in loop.results}
        self.rows: dict[tuple[Node, Block, int | None], int] = {}
        self.whole: dict[Node, int] = {}
        self.sizes: list[Node] = []
        self.steps: list[list[Any]] = []
        self._at: dict[Node, Any] = {}
        self._known: dict[str, Any] = {}
        self.results: list[list[Any]] = []
        for node in loop.body:
            if node not in self.region.sums and not self._is_last_matmul(node):
                self._at[node] = self._step(self.region.steps[node])
        for node in loop.results:
            self.results.append(self._result(node))
        for node in loop.body:
            if str(node.target) == _GRADIENT and _has_its_dtype(node):
                self._write_over_logits(self._at[node]["v"])

    def text(self) -> str:
        """See NOTE [Loops as text]."""
        first = len(self.rows), len(self.rows) + len(self.whole)

        def numbered(arg: Any) -> Any:
            if isinstance(arg, dict) and "v" in arg:
                kind, at = arg["v"]
                return {"v": at + {"rows": 0, "whole": first[0], "step": first[1]}[kind]}
            if isinstance(arg, list):
                return [numbered(each) for each in arg]
            if isinstance(arg, dict):
                return {key: numbered(each) for key, each in arg.items()}
            return arg

        region, body = self.region, self.loop.body
        found = {
            "rows": [
                [block.dims, *([] if at is None else [first[0] + at])] for _, block, at in self.rows
            ],
            "steps": numbered(self.steps),
            "results": numbered(self.results),
            "wide": [*region.widest(body), region.multiple, region.depth(body)],
            "columns": region.of_columns,
        }
        return urllib.parse.quote(json.dumps(found, separators=(",", ":")), safe="{}[]:,/ ")

    def _write_over_logits(self, at: tuple[str, int]) -> None:
        """The gradient of this step overwrites logits of a matmul in the loop, if no later step reads them."""
        at = self._shown(at)
        name, args, kwargs = self.steps[at[1]]
        if name != _GRADIENT:
            return  # an equal one has been looked at
        root = self._shown(args[0]["v"], _ONCE)
        if root[0] != "step" or self.steps[root[1]][0] not in _MATMULS:
            return
        later = [*self.steps[at[1] + 1 :], *self.results]
        if any(self._shown(read) == root for read in values_read(later)):
            return
        terms = args[:6] + args[7:]  # without the dtype
        self.steps[at[1]] = [name.replace("row_grad.", "row_grad_."), terms, kwargs]

    def _shown(self, at: tuple[str, int], views: frozenset[str] = _VIEWS) -> tuple[str, int]:
        """The value below its views."""
        while at[0] == "step" and self.steps[at[1]][0] in views:
            at = self.steps[at[1]][1][0]["v"]
        return at

    # -- values ----------------------------------------------------------------------------------

    def _step(self, step: Step) -> Any:
        args = [self._argument(arg) for arg in step.args]
        kwargs = {name: self._argument(arg) for name, arg in step.kwargs.items()}
        name = "getitem" if step.target is operator.getitem else str(step.target)
        return self._told([name, args, kwargs])

    def _told(self, step: list[Any]) -> Any:
        """The value of a step; equal steps are one."""
        key = repr(step)
        if key not in self._known:
            self._known[key] = {"v": ("step", len(self.steps))}
            self.steps.append(step)
        return self._known[key]

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, Rows):
            return self._chunk(arg)
        if isinstance(arg, Whole):
            return self._given(arg)
        if isinstance(arg, Step):
            return self._step(arg)
        if arg is COUNT:
            return {"n": 1}
        if arg is NUMBERS:
            numbers = self.emit.iota(self._count(self.region.rows), next(iter(self.loop.body)))
            return self._chunk(Rows(numbers, in_front(1)))
        if isinstance(arg, Node):
            return self._size(arg)
        if isinstance(arg, torch.dtype):
            return {"d": str(arg).removeprefix("torch.")}
        if isinstance(arg, (list, tuple)):
            return [self._argument(each) for each in arg]
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return arg
        raise Refused(f"an argument is {arg}")

    def _size(self, node: Node) -> Any:
        if not isinstance(value(node), torch.SymInt):
            raise Refused(f"an argument is {node}, no size")
        if node not in self.sizes:
            self.sizes.append(node)
        return {"s": self.sizes.index(node)}

    def _chunk(self, operand: Rows) -> Any:
        node, block = operand.node, operand.block
        if node in self._at:
            found = self._at[node]
        else:
            of_loop = self.made.get(node)
            outer, block = (self.given(node), block) if of_loop is None else (of_loop, in_front(1))
            block = normal(block, shape_of_value(outer))
            while turns(outer) and rank_of(outer) == 2 and len(block.dims) == 1:
                outer, block = outer.args[0], Block((1 - block.dims[0],))  # type: ignore[assignment]
            found = self._rows_of(outer, block)
        if not operand.gap:
            return found
        rest = operand.block.rest(shape_of_value(node))
        return self._reshaped(found, [*[1] * operand.gap, *rest])

    def _reshaped(self, found: Any, rest: Sequence[Any]) -> Any:
        """A chunk in the shape [n, *rest]."""
        sizes = [{"n": 1}, *map(self._number, rest)]
        return self._told([str(aten.reshape.default), [found, sizes], {}])

    def _rows_of(self, outer: Node, block: Block) -> Any:
        """A chunk of a tensor: of a larger one, if the loop puts a result among the same of its rows."""
        shape = shape_of_value(outer)
        part = taken(outer) if block == normal(in_front(len(shape) - 1), shape) else None
        if part is None or not any(part.key == each.key for each in self.puts.values()):
            return {"v": ("rows", self.rows.setdefault((outer, block, None), len(self.rows)))}
        key = part.every, part.block, self._numbers(part)
        found = {"v": ("rows", self.rows.setdefault(key, len(self.rows)))}
        rest = block.rest(shape)
        return self._reshaped(found, rest) if len(rest) > 1 else found

    def _numbers(self, part: Part) -> int:
        return self.whole.setdefault(part.numbers(self.emit), len(self.whole))

    def _number(self, size: Any) -> Any:
        found = self._count(size)
        return found if isinstance(found, int) else self._size(found)

    def _count(self, size: Any) -> SizeArg:
        found = size if isinstance(size, int) else self.emit.size_of(size.node.expr)
        if found is None:
            raise Refused(f"an argument is {size}")
        return found

    def _given(self, operand: Whole) -> Any:
        node = self.made.get(operand.node) or self.given(operand.node)
        if turns(node) and rank_of(node) == 2 and operand.without is None:
            return self._turned(node)
        if operand.without is not None and operand.without.dims:
            sizes = self.emit.sizes(node)
            node = self.emit.reshape(node, operand.without.rest(sizes))
        return {"v": ("whole", self.whole.setdefault(node, len(self.whole)))}

    def _turned(self, node: Node) -> Any:
        """A matrix as the program has it, and turned for each chunk: a weight is given once."""
        inner: Node = node.args[0]  # type: ignore[assignment]
        if turns(inner):
            return self._given(Whole(inner.args[0]))  # type: ignore[arg-type]
        return self._told([str(aten.permute.default), [self._given(Whole(inner)), [1, 0]], {}])

    def _is_last_matmul(self, node: Node) -> bool:
        """A matmul of a head's gradient without a reader in the loop: it is written into the result at once."""
        step = self.region.steps.get(node)
        made = self.loop.results.keys() - self.puts.keys()
        if step is None or node not in made or node.target is not aten.mm.default:
            return False
        if any(user in self.loop.body for user in node.users) or step.target is not node.target:
            return False
        wide = (n for n in self.loop.body if self.region.made_wide(n))
        return any(n.target in MATMULS and n is not node for n in wide)

    # -- results ---------------------------------------------------------------------------------

    def _result(self, node: Node) -> list[Any]:
        found, part = self.region.sums.get(node), self.puts.get(node)
        dtype = str(value(node).dtype).removeprefix("torch.")
        if part is not None:
            every = [self._number(size) for size in shape_of_value(part.every)]
            numbers = {"v": ("whole", self._numbers(part))}
            flat = self._reshaped(self._at[node], shape_of_value(node)[-1:])
            return ["put", flat, dtype, every, numbers]
        if found is None:
            block = self.region.blocks[node]
            rest = [self._number(size) for size in block.rest(shape_of_value(node))]
            if self._is_last_matmul(node):
                left, right = map(self._argument, self.region.steps[node].args)
                return ["matmul", left, right, dtype, rest]
            first, *others = block.dims
            place = [first] if others == [*range(first + 1, first + len(block.dims))] else []
            wide = first > 0 and self.region.is_wide(node)
            return ["rows", self._at[node], dtype, rest, *(place if wide else [])]
        return self._sum(node, found, dtype)

    def _sum(self, node: Node, found: Across, dtype: str) -> list[Any]:
        shape = [self._number(size) for size in shape_of_value(node)]
        if found.how == "product":
            left, right = (self._argument(arg) for arg in found.step.args)
            return ["product", left, right, dtype, shape]
        if found.how == "sum":
            wide = wide_dtype(value(node).dtype)
            dtype = str(wide if found.mean_of else value(node).dtype).removeprefix("torch.")
        return [found.how, self._step(found.step), dtype, shape]
