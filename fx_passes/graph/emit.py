"""New nodes of the graph: emitted once each, with fake values, and thrown away again if the rewrite is refused.

`Emitter.call` is the only function of the passes that creates a node. Equal nodes are shared, so that row scalars
computed twice by the user's program cancel in the polynomials (`algebra/poly.py`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from fx_passes.graph.facts import (
    BACKWARD,
    TAG,
    SizeArg,
    is_backward,
    numbers,
    same_layout,
    same_shape,
    shape_of,
    value,
)
from fx_passes.graph.fakes import result_of
from fx_passes.graph.operators import RESHAPES, Target, is_pure
from fx_passes.torch_private import FakeTensorMode, FloorDiv

aten = torch.ops.aten
prims = torch.ops.prims

_SIZE_ARITHMETIC = {sympy.Add: operator.add, sympy.Mul: operator.mul, FloorDiv: operator.floordiv}
PROVENANCE = ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr")
"""Torch's meta keys for a node's origin in the user's code."""


class Emitter:
    """Emits nodes into `graph`, and shares equal ones.

    Attributes:
        origin: the current node of the user; new nodes get its place in the user's code.
        created: new nodes, in order.
        represents: for a node of the user, the equal node used in its place.
        packed: for each copy needed by a reshape, the copied node.
        known_sizes: for each symbolic size's expression, the node that computes it.
    """

    def __init__(self, graph: Graph, fake_mode: FakeTensorMode) -> None:
        self.graph = graph
        self.fake_mode = fake_mode
        self.origin: Node | None = None
        self.created: dict[Node, None] = {}
        self.represents: dict[Node, Node] = {}
        self.packed: dict[Node, Node] = {}
        self.known_sizes: dict[Any, Node] = {}
        self._shared: dict[Hashable, Node] = {}
        self._pure: dict[Target, bool] = {}  # torch takes long to tell

    # -- nodes -----------------------------------------------------------------------------------

    def adopt(self, node: Node) -> Node:
        """The first node of the user's graph with the same computation as `node`."""
        fake = value(node)
        if isinstance(fake, torch.SymInt):
            self.known_sizes.setdefault(fake.node.expr, node)
        if node.op != "call_function" or not isinstance(fake, torch.Tensor):
            return node
        if node.target not in self._pure:
            self._pure[node.target] = is_pure(node)
        if not self._pure[node.target]:
            return node
        first = self._shared.setdefault(self._key(node.target, node.args, node.kwargs), node)
        self.represents[node] = first
        return first

    def adopt_all(self) -> None:
        for node in self.graph.nodes:
            self.adopt(node)

    def call(self, target: Target, *args: Any, **kwargs: Any) -> Node:
        key = self._key(target, args, kwargs)
        if key in self._shared:
            return self._shared[key]
        result = result_of(self.fake_mode, target, *torch.fx.map_arg((args, kwargs), value))
        return self._made(key, result, target, args, kwargs)

    def call_like(self, like: Node, columns: Any, target: Target, *args: Any) -> Node:
        """As `call`, for a result with the rows of `like`: needed if sizes depend on data."""
        key = self._key(target, args, {})
        if key not in self._shared:
            with self.fake_mode:
                result = value(args[0]).new_empty([*shape_of(like)[:-1], columns])
            self._made(key, result, target, args, {})
        return self._shared[key]

    def _made(self, key: Hashable, result: Any, target: Target, args: Any, kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = result
        node.meta["slime_fused"] = True
        self._copy_provenance(node)
        self.created[node] = None
        self._shared[key] = node
        return node

    def discard(self) -> None:
        """Erases every new node; the graph is the user's again."""
        for node in self.created:  # the first new nodes may read their own replacements by now
            node.args, node.kwargs = (), {}
        for node in self.created:
            self.graph.erase_node(node)
        self.created.clear()

    def made(self, node: Node) -> bool:
        return node in self.created

    def _key(self, target: Target, args: Any, kwargs: Any) -> Hashable:
        def freeze(arg: Any) -> Hashable:
            if isinstance(arg, Node):
                return ("node", self.represents.get(arg, arg))
            if isinstance(arg, (list, tuple)):
                return ("list", *(freeze(item) for item in arg))
            if isinstance(arg, dict):
                return ("dict", *((key, freeze(arg[key])) for key in sorted(arg)))
            return (type(arg).__name__, repr(arg))

        return (target, freeze(args), freeze(kwargs))

    def _copy_provenance(self, node: Node) -> None:
        if any(is_backward(arg) for arg in node.all_input_nodes):
            node.meta[TAG] = BACKWARD
        if self.origin is not None:
            for key in PROVENANCE:
                if key in self.origin.meta:
                    node.meta[key] = self.origin.meta[key]

    # -- sizes -----------------------------------------------------------------------------------

    def size(self, node: Node, dim: int) -> SizeArg:
        """`node.shape[dim]` as a number, or as the node that computes it."""
        size = shape_of(node)[dim]
        if isinstance(size, int):
            return size
        computed = self.size_of(size.node.expr)
        return self.call(aten.sym_size.int, node, dim) if computed is None else computed

    def size_of(self, expr: Any) -> SizeArg | None:
        """A symbolic size from the sizes in the graph; None if they do not determine it."""
        if expr.is_number:
            return int(expr)
        if expr in self.known_sizes:
            return self.known_sizes[expr]
        operation = _SIZE_ARITHMETIC.get(expr.func)
        parts = [self.size_of(arg) for arg in expr.args]
        if operation is None or any(part is None for part in parts):
            return None
        return functools.reduce(lambda left, right: self.call(operation, left, right), parts)

    def sizes(self, node: Node) -> list[SizeArg]:
        return [self.size(node, dim) for dim in range(len(shape_of(node)))]

    def strides(self, node: Node) -> list[SizeArg]:
        """Those of a tensor without gaps, its last dimension the innermost."""
        found: list[SizeArg] = [1]
        for size in reversed(self.sizes(node)[1:]):
            found.insert(0, self.times(found[0], size))
        return found

    def times(self, left: SizeArg, right: SizeArg) -> SizeArg:
        if isinstance(left, int) and isinstance(right, int):
            return left * right
        if 1 in (left, right):
            return right if left == 1 else left
        return self.call(operator.mul, left, right)

    def product(self, sizes: Sequence[SizeArg]) -> SizeArg:
        found: SizeArg = 1
        for size in sizes:
            found = self.times(found, size)
        return found

    # -- views, casts, constants -----------------------------------------------------------------

    def reshape(self, node: Node, sizes: Sequence[SizeArg]) -> Node:
        """`node` with another shape. Reshapes of reshapes collapse; a reshape to the same shape is `node` itself."""
        while node.op == "call_function" and (node.target in RESHAPES or node in self.packed):
            inner = node.args[0]
            node = self.packed.get(node) or self.represents.get(inner, inner)  # type: ignore[arg-type, assignment]
        if same_shape(shape_of(node), sizes):
            return node
        if not viewable(value(node), sizes):
            packed = self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
            self.packed[packed] = node
            node = packed
        return self.call(aten.view.default, node, list(sizes))

    def laid_out_as(self, node: Node, other: Node) -> Node:
        """`node`, copied if its strides order the dimensions differently from those of `other`. No gaps, no repeats."""
        if same_layout(value(node), value(other)):
            return node
        strides = numbers(value(other).stride())
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim] or -math.inf)
        turned = self.permute(node, order)
        with self.fake_mode:
            dense = torch.empty(value(turned).shape, device="meta")
        if same_layout(value(turned), dense):  # no guard, as is_contiguous() would need
            return node
        packed = self.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
        return self.permute(packed, [order.index(dim) for dim in range(len(order))])

    def permute(self, node: Node, order: list[int]) -> Node:
        return node if order == sorted(order) else self.call(aten.permute.default, node, order)

    def expand(self, node: Node, sizes: Sequence[SizeArg]) -> Node:
        if same_shape(shape_of(node), sizes):
            return node
        return self.call(aten.expand.default, node, list(sizes))

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        if value(node).dtype == dtype:
            return node
        return self.call(prims.convert_element_type.default, node, dtype)

    def align(self, node: Node, rank: int) -> Node:
        """`node` with leading dimensions of size 1, up to `rank` dimensions."""
        missing = rank - len(shape_of(node))
        if missing <= 0:
            return node
        return self.reshape(node, [1] * missing + self.sizes(node))

    def full(self, sizes: Sequence[SizeArg], number: float, dtype: torch.dtype, like: Node) -> Node:
        """A constant on `like`'s device."""
        return self.call(
            aten.full.default,
            list(sizes),
            number,
            dtype=dtype,
            layout=torch.strided,
            device=value(like).device,
            pin_memory=False,
        )

    def iota(self, size: SizeArg, like: Node) -> Node:
        """[0, 1, ...], int64, on `like`'s device."""
        return self.call(
            prims.iota.default,
            size,
            start=0,
            step=1,
            dtype=torch.int64,
            device=value(like).device,
            requires_grad=False,
        )

    def where(self, condition: Node, chosen: Node, other: Node) -> Node:
        return self.call(aten.where.self, condition, chosen, other)


def viewable(fake: torch.Tensor, sizes: Sequence[object]) -> bool:
    """Whether the kernel of `view` can show the tensor in these sizes; its fake version also accepts some others.

    Dimensions contiguous in memory can be split and joined, others keep their borders (ATen's `computeStride`).
    Symbolic sizes count by their `numbers`, as for every layout of a compiled graph.
    """
    found = numbers([*fake.shape, *fake.stride(), *map(value, sizes)])
    shape, strides, wanted = (
        found[: fake.ndim],
        found[fake.ndim :][: fake.ndim],
        found[2 * fake.ndim :],
    )
    if math.prod(shape) != math.prod(wanted) or 0 in shape:
        return 0 in shape
    remaining = wanted[::-1]
    for run in _runs(shape, strides):
        while run > 1:
            if not remaining or run % remaining[0]:
                return False
            run //= remaining.pop(0)
    return all(size == 1 for size in remaining)


def _runs(shape: list[int], strides: list[int]) -> Iterator[int]:
    """The number of elements of each run of contiguous dimensions, the last run first."""
    run, expected = 1, None
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if expected is not None and stride != expected:
            yield run
            run = 1
        run *= size
        expected = stride * size
    yield run
