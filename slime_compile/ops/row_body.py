"""The body of a loop over chunks of rows: compiled by inductor once for any number of rows, or run step by step.

Entry point: `body_of`. If inductor cannot compile a body, it runs step by step, and the log says so once.
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fx_passes.rows.program import values_read
from slime_compile.torch_private import ConstantSource, DimDynamic, FakeTensorMode, ShapeEnv

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chunk:
    """The input of a body: tensors of the chunk's rows, complete tensors, sizes; and its outputs with rows."""

    rows: list[Tensor]
    whole: list[Tensor]
    sizes: Sequence[int]
    out: list[Tensor]

    @property
    def count(self) -> int:
        return self.rows[0].shape[0]

    @property
    def given(self) -> list[Tensor]:
        return [*self.rows, *self.whole]


@dataclass(frozen=True)
class Steps:
    """The computation of a body.

    Attributes:
        steps: see NOTE [Loops as text].
        written: the values to write into `Chunk.out`, by their numbers.
        over: a value, and the tensor of the chunk that it overwrites at the end.
        returned: the returned values.
    """

    steps: tuple[Any, ...]
    written: tuple[int, ...]
    returned: tuple[int, ...]
    over: tuple[int, int] | None = None


Body = Callable[[Chunk], dict[int, Tensor]]
"""Writes into `out`, and returns the other results, by their numbers."""

_FACTORIES = {"aten.full.default", "aten.zeros.default", "aten.ones.default", "aten.empty.memory_format",
              "prims.iota.default"}  # fmt: skip
_OVER = {"slime_fused.row_grad_.default"}
"""Steps that overwrite their first argument; their result is that argument."""


def body_of(text: str, steps: Steps, compiled: bool) -> Body:
    """The body of the loop of `text`; the text is the key of compiled bodies."""
    return _Compiled(text, steps) if compiled else functools.partial(_interpreted, steps)


# ---- step by step -------------------------------------------------------------------------------------------------


def function_of(name: str) -> Callable[..., Any]:
    """The operator of that name."""
    if name == "getitem":
        return operator.getitem
    namespace, packet, overload = name.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return found


def _argument(arg: Any, values: Any, sizes: Sequence[Any], rows: Any) -> Any:
    if isinstance(arg, list):
        return [_argument(each, values, sizes, rows) for each in arg]
    if not isinstance(arg, dict):
        return arg
    if "v" in arg:
        return values[arg["v"]]
    if "s" in arg:
        return sizes[arg["s"]]
    return rows if "n" in arg else getattr(torch, arg["d"])


@functools.cache
def may_show(name: str) -> bool:
    """Whether the operator's result may be a view of its operand."""
    if name in ("getitem", "prims.convert_element_type.default"):
        return True
    target: Any = function_of(name)
    return any(each.alias_info is not None for each in target._schema.returns)


def _interpreted(told: Steps, chunk: Chunk) -> dict[int, Tensor]:
    values: dict[int, Any] = dict(enumerate(chunk.given))
    first = len(values)
    ends = _last_reads(told, first)
    for at, (name, args, kwargs) in enumerate(told.steps):
        values[first + at] = _called(name, args, kwargs, values, chunk)
        for place, out in zip(told.written, chunk.out, strict=True):
            if place == first + at:
                out.copy_(values[place])
        for used in ends.get(at, ()):
            del values[used]
    for place, out in zip(told.written, chunk.out, strict=True):
        if place < first:
            out.copy_(values[place])
    found = {place: values[place] for place in told.returned}
    if told.over is not None:
        value, into = told.over
        chunk.rows[into].copy_(values[value])
    return found


def _called(name: str, args: Any, kwargs: Any, values: Any, chunk: Chunk) -> Any:
    sizes, rows = chunk.sizes, chunk.count
    keywords = {key: _argument(arg, values, sizes, rows) for key, arg in kwargs.items()}
    if name in _FACTORIES:
        keywords["device"] = chunk.rows[0].device
    positional = [_argument(arg, values, sizes, rows) for arg in args]
    if name == "prims.convert_element_type.default":
        return positional[0].to(
            positional[1]
        )  # the operator's own kernel returns a leaf that requires grad for such a leaf
    made = function_of(name)(*positional, **keywords)
    return positional[0] if name in _OVER else made


def _read_by(step: Any) -> set[int]:
    """The values that a step reads."""
    _, args, kwargs = step
    return values_read([args, *kwargs.values()])


def _last_reads(told: Steps, first: int) -> dict[int, list[int]]:
    """For each step, the values without readers after it, returned ones excepted."""
    last: dict[int, int] = {}
    for at, step in enumerate(told.steps):
        for used in _read_by(step) | {first + at}:
            last[used] = at
    ends: dict[int, list[int]] = {}
    kept = {*told.returned, *(told.over or ())[:1]}
    for used, at in last.items():
        if used not in kept and used >= first:
            ends.setdefault(at, []).append(used)
    return ends


# ---- compiled -----------------------------------------------------------------------------------------------------

_lock = threading.RLock()


class _Compiled:
    """Compiled at the first call, for these layouts and any number of rows but one.

    Inductor may decide by the number of rows that it is shown; where its decision is wrong, there is further code.

    Some bodies overwrite a tensor they read, and inductor cannot compile them: the result is then copied over it.
    """

    def __init__(self, text: str, steps: Steps) -> None:
        self.text, self.steps = text, steps

    def __call__(self, chunk: Chunk) -> dict[int, Tensor]:
        run = self._run(self.steps, chunk) if chunk.count > 1 else None
        if run is not None:
            return self._called(run, chunk)
        if self.steps.over is None or chunk.count < 2:
            return _interpreted(self.steps, chunk)
        value, into = self.steps.over
        beside = Steps(self.steps.steps, (*self.steps.written, value), self.steps.returned)
        scratch = torch.empty_like(chunk.rows[into])
        found = _Compiled(self.text, beside)(replace(chunk, out=[*chunk.out, scratch]))
        chunk.rows[into].copy_(scratch)
        return found

    def _called(self, run: Callable[..., Any], chunk: Chunk) -> dict[int, Tensor]:
        given = chunk.given
        made = dict(zip(self._computed(len(given)), run(*given, *chunk.out), strict=True))
        return {p: given[p] if p < len(given) else made[p] for p in self.steps.returned}

    def _computed(self, given: int) -> list[int]:
        return [place for place in self.steps.returned if place >= given]

    def _run(self, steps: Steps, chunk: Chunk) -> Callable[..., Any] | None:
        of_rows = [
            (each.dtype, each.shape[1:], each.stride()) for each in (*chunk.rows, *chunk.out)
        ]
        whole = [(each.dtype, each.shape, each.stride()) for each in chunk.whole]
        device = chunk.rows[0].device
        results = (steps.written, steps.returned, steps.over)
        key = repr((self.text, results, tuple(chunk.sizes), of_rows, whole, device))
        with _lock:
            found = _kept.setdefault(key, [])
            for each in found:
                if each.holds(chunk.count):
                    return each.run
            found.append(self._compiled(chunk))
            return found[-1].run

    def _compiled(self, chunk: Chunk) -> _Code:
        from slime_compile.torch_private import compile_fx  # slow to import

        shapes, rows, given = _symbolic(chunk)
        try:
            made: Any = compile_fx(self._module(chunk), given)
            return _Code(made, rows, shapes.guards)
        except Exception as error:
            if self.steps.over is None:
                _log_failure(f"{type(error).__name__}: {error}")
            return _Code(None)

    def _read_before(self, at: int, first: int) -> list[int]:
        """The values to compute before step `at` overwrites what they are computed from.

        Inductor computes an element-wise value where its result is needed, and it does not see that a custom operator
        overwrites the value's input: NOTE [Readers of the logits] in fx_passes/inplace.py.
        """
        steps = self.steps.steps
        reads = list(map(_read_by, steps))
        root = steps[at][1][0]["v"]
        while root >= first and may_show(steps[root - first][0]):
            root = steps[root - first][1][0]["v"]
        depends = {root}
        for place, read in enumerate(reads[:at], first):
            if not read.isdisjoint(depends):
                depends.add(place)
        return sorted(
            depends & set().union(self.steps.written, self.steps.returned, *reads[at + 1 :])
        )

    def _tensors(self, graph: Graph, place: int, node: Node) -> list[Node]:
        """The tensors of a step's result that others read; a maximum with its index are two."""
        read = [
            args[1] for n, args, _ in self.steps.steps if n == "getitem" and args[0]["v"] == place
        ]
        return [graph.call_function(operator.getitem, (node, part)) for part in read] or [node]

    def _module(self, chunk: Chunk) -> GraphModule:
        """The steps as a graph of ATen operators, over any number of rows."""
        graph, first = Graph(), len(chunk.given)
        values: dict[int, Any] = {at: graph.placeholder(f"given_{at}") for at in range(first)}
        out = [graph.placeholder(f"out_{at}") for at in range(len(chunk.out))]
        count = graph.call_function(torch.ops.aten.sym_size.int, (values[0], 0))
        for at, (name, args, kwargs) in enumerate(self.steps.steps):
            keywords = {k: _argument(arg, values, chunk.sizes, count) for k, arg in kwargs.items()}
            if name in _FACTORIES:
                keywords["device"] = chunk.rows[0].device
            positional = tuple(_argument(arg, values, chunk.sizes, count) for arg in args)
            if name in _OVER:
                before = self._read_before(at, first)
                keywords["after"] = [n for p in before for n in self._tensors(graph, p, values[p])]
            made = graph.call_function(function_of(name), positional, keywords)
            values[first + at] = positional[0] if name in _OVER else made
        for place, into in zip(self.steps.written, out, strict=True):
            graph.call_function(torch.ops.aten.copy_.default, (into, values[place]))
        if self.steps.over is not None:
            value, at = self.steps.over
            graph.call_function(torch.ops.aten.copy_.default, (values[at], values[value]))
        graph.output(tuple(values[place] for place in self._computed(first)))
        return GraphModule(torch.nn.Module(), graph)


@dataclass(frozen=True)
class _Code:
    """A compiled body.

    Attributes:
        run: None if inductor cannot compile it.
        rows: the symbol of the number of rows.
        guards: what inductor decided by the number of rows of the first chunk.
    """

    run: Callable[..., Any] | None
    rows: Any = None
    guards: Sequence[Any] = ()

    def holds(self, count: int) -> bool:
        """Whether it may run with so many rows."""
        return all(guard.expr.subs(self.rows, count) for guard in self.guards)


_kept: dict[str, list[_Code]] = {}


def _symbolic(chunk: Chunk) -> tuple[ShapeEnv, Any, list[Tensor]]:
    """The symbol of the number of rows, and fake tensors with the layouts of the chunk's and so many rows."""
    shapes = ShapeEnv()
    source = ConstantSource("rows")
    symbol = shapes.create_symbol(chunk.count, source, DimDynamic.DYNAMIC, constraint_dim=None)
    rows = shapes.create_symintnode(symbol, hint=chunk.count, source=source)
    with FakeTensorMode(shape_env=shapes):

        def like(tensor: Tensor, *lead: Any) -> Tensor:
            shape = (*lead, *tensor.shape[len(lead) :])
            return torch.empty_strided(
                shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )

        of_rows = [like(each, rows) for each in chunk.rows]
        whole = [like(each) for each in chunk.whole]
        return shapes, symbol, [*of_rows, *whole, *(like(each, rows) for each in chunk.out)]


@functools.cache
def _log_failure(cause: str) -> None:
    log.warning(
        "a loop over chunks of rows runs step by step, inductor could not compile it: %s", cause
    )
