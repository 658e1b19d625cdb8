"""The nodes from the logits to the selected rows; and does any other node read the other rows?

Entry point: `region_of`. Between the matmul and what is taken there may be operators that work element by element with
numbers, or with one number per row; behind the first selection there may be more selections and views.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fx_passes.graph.facts import same_shape
from fx_passes.graph.order import descendants, following
from fx_passes.graph.writes import Writes, example
from fx_passes.row_demand.heads import Head
from fx_passes.row_demand.moves import joins, kind_of

POINTWISE: set[Any] = {
    operator.truediv, operator.mul, operator.add, operator.sub, operator.neg,
    torch.div, torch.mul, torch.tanh, torch.neg, torch.add, torch.sub,
    "div", "mul", "add", "sub", "neg", "tanh", "float", "double", "half", "bfloat16", "to", "type",
    "contiguous", "clone", "detach",
}  # fmt: skip
_SIZES: set[Any] = {"size", "dim", "numel", torch.ops.aten.sym_size.int, getattr}
_SHARE = 7 / 8  # of the rows: where more is taken, a copy of hidden is the dearer of the two
_MANY = (
    1 << 16
)  # what a symbolic size counts as, so that the graph decides and not the sizes at hand


@dataclass
class Region:
    """A head whose rows are not all read.

    Attributes:
        writes: of the graph.
        inner: of each node of the region, the value whose rows it has, or some of them.
        points: nodes that work element by element.
        takes: nodes that leave rows out, and what is made of their rows.
        boundary: those of `takes` with a reader outside, in the order of the graph.
    """

    head: Head
    writes: Writes
    inner: dict[Node, Node] = field(default_factory=dict)
    points: set[Node] = field(default_factory=set)
    takes: set[Node] = field(default_factory=set)
    boundary: list[Node] = field(default_factory=list)

    @property
    def rows(self) -> Any:
        return sum(_rows_of(node) for node in self.boundary)

    @property
    def total(self) -> Any:
        return _rows_of(self.head.node)

    @property
    def flat(self) -> bool:
        """Whether the matmul is made over [N, D], and its result cut into what is taken."""
        return len(self.boundary) > 1 or (
            self.head.only_matrices and example(self.boundary[0]).dim() != 2
        )

    def disturbed_by(self, nodes: Iterable[Node]) -> bool:
        """Whether one of `nodes` may change what the region reads or makes."""
        mine = {self.head.node, *self.inner}
        read = mine.union(*(each.all_input_nodes for each in mine))
        return self.writes.change(nodes, self.writes.memory(read))

    def __contains__(self, node: Node) -> bool:
        return node is self.head.node or node in self.inner

    def chain(self, node: Node) -> list[Node]:
        """What works element by element between the matmul and `node`, in order."""
        found = []
        while node is not self.head.node:
            if node in self.points:
                found.append(node)
            node = self.inner[node]
        return found[::-1]


def _rows_of(node: Node) -> Any:
    return math.prod(example(node).shape[:-1])


def region_of(head: Head, writes: Writes) -> Region | None:
    """None where the rows have to be made as they are written."""
    region = Region(head, writes)
    for node in sorted(descendants([head.node]) - {head.node}):
        _enter(region, node)
    if not _bounded(region) or not region.boundary or not _pays(region):
        return None
    return region if _undisturbed(region) else None


def _enter(region: Region, node: Node) -> None:
    """Takes `node` into the region if it belongs there."""
    inputs = [each for each in node.all_input_nodes if each in region]
    if not inputs or node.op not in ("call_function", "call_method"):
        return
    pieces = joins(node)
    if pieces is not None:
        if all(piece in region.takes for piece in pieces) and _alike(region, pieces):
            region.inner[node] = pieces[0]
            region.takes.add(node)
        return
    if len(inputs) > 1:
        return
    (inner,) = inputs
    kind = kind_of(node, inner) if node.args and node.args[0] is inner else None
    if kind is not None:
        region.inner[node] = inner
        if inner in region.takes or kind != "view":
            region.takes.add(node)
    elif inner not in region.takes and _is_point(node, inner):
        region.inner[node] = inner
        region.points.add(node)


def _alike(region: Region, pieces: Sequence[Node]) -> bool:
    """The same was done to all of them."""
    chains = [region.chain(piece) for piece in pieces]
    return all(chain == chains[0] for chain in chains)


def _is_point(node: Node, inner: Node) -> bool:
    """Each element of the result follows from the same element of `inner`, and from numbers or values of its row."""
    if node.target not in POINTWISE or not _same_shape(node, inner):
        return False
    others = [example(each) for each in node.all_input_nodes if each is not inner]
    return all(is_narrow(each, example(inner)) for each in others)


def _same_shape(node: Node, inner: Node) -> bool:
    found = example(node)
    return isinstance(found, Tensor) and same_shape(found.shape, example(inner).shape)


def is_narrow(other: Any, wide: Tensor) -> bool:
    """A number, one value per column, or one per row."""
    if not isinstance(other, Tensor):
        return True
    return other.dim() <= 1 or (other.dim() <= wide.dim() and _is_one(other.shape[-1]))


def _is_one(size: object) -> bool:
    return isinstance(size, int) and size == 1


# ---- who reads it -------------------------------------------------------------------------------------------------


def _bounded(region: Region) -> bool:
    """Finds the boundary; False if a node outside reads all rows."""
    while True:
        region.boundary = [n for n in region.inner if _read_outside(region, n)]
        if any(n not in region.takes for n in region.boundary):
            return False
        if _read_outside(region, region.head.node):
            return False
        below = [n for n in region.inner if _behind(region, n)]
        if not below:
            return all(isinstance(example(n), Tensor) for n in region.boundary)
        for node in below:
            del region.inner[node]
            region.takes.discard(node)


def _read_outside(region: Region, node: Node) -> bool:
    return any(user not in region and user.target not in _SIZES for user in node.users)


def _behind(region: Region, node: Node) -> bool:
    """Whether `node` is made from a boundary, or from what is: it stays as it is, and reads the new one."""
    rows = joins(node) or [region.inner[node]]
    return any(each in region.boundary for each in node.all_input_nodes) or any(
        each not in region for each in rows
    )


def _pays(region: Region) -> bool:
    if not all(example(node).dim() > 1 for node in region.boundary):
        return False
    sizes = dict.fromkeys(_symbols(region.total), _MANY)
    every = _as_number(region.total, sizes)
    # a number of rows that nothing about all rows tells: half of them
    others = _symbols(region.rows) - set(sizes)
    half = min(every, _MANY) // 2
    return _as_number(region.rows, sizes | dict.fromkeys(others, half)) <= _SHARE * every


def _symbols(size: Any) -> set[Any]:
    return set() if isinstance(size, int) else set(size.node.expr.free_symbols)


def _as_number(size: Any, sizes: dict[Any, int]) -> int:
    return size if isinstance(size, int) else int(size.node.expr.subs(sizes))


# ---- what stands between ------------------------------------------------------------------------------------------


def _undisturbed(region: Region) -> bool:
    """Nothing is changed in place and no gradient is switched between the matmul and what is taken.

    Several selections become parts of one value, where they may have been one memory: neither the graph nor its caller
    may write to them.
    """
    last = max(region.inner)
    between = [node for node in following(region.head.node) if node <= last]
    if region.disturbed_by(between) or any(map(_switches_gradient, between)):
        return False
    if not region.flat:
        return True
    if any(_symbols(size) for node in region.boundary for size in example(node).shape[:-1]):
        return False
    writes, taken = region.writes, region.writes.memory(region.boundary)
    several = len(region.boundary) > 1 and not taken.isdisjoint(writes.returned())
    return not several and not writes.change(following(region.head.node), taken)


def _switches_gradient(node: Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return "set_grad_enabled" in name or "inference_mode" in name
