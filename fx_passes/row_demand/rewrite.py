"""The edits: select rows of hidden, multiply those, and repeat the logits' nodes on the result.

Entry points: `place_of`, which may still refuse, and `rewrite`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fx_passes.graph.order import following
from fx_passes.graph.writes import example
from fx_passes.row_demand.heads import copied
from fx_passes.row_demand.moves import Replay
from fx_passes.row_demand.region import Region

_SIZE: set[Any] = {"size", torch.ops.aten.sym_size.int}


def place_of(region: Region) -> Node | None:
    """The node behind which all operands of the moves are there; None where something between may change them.

    That is the matmul where it can be: autocast is switched on and off around it.
    """
    head = region.head.node
    moves = region.inner.keys() - region.points
    needed = {each for node in moves for each in node.all_input_nodes if each not in region}
    last = max([head, *(node for node in needed if node.op != "placeholder")])
    between = [node for node in following(head) if node <= last]
    switched = any("autocast" in getattr(node.target, "__name__", "") for node in between)
    return None if switched or region.disturbed_by(between) else last


def rewrite(region: Region, place: Node) -> None:
    """Replaces the boundary of `region` by what a smaller matmul makes, behind `place`."""
    head, graph = region.head, region.head.node.graph
    following = place.next
    with graph.inserting_before(following):
        moved = Replay(head.node, head.hidden, region.inner, head.columns())
        taken = [moved.of(node) for node in region.boundary]
        parts = _made(region, taken)
    for node, part in zip(region.boundary, parts, strict=True):
        for point in region.chain(node):
            where = following if point < following else point.next
            with graph.inserting_before(where):
                part = _pointwise(region, point, node, part, moved)
        part.meta = {name: v for name, v in node.meta.items() if name != "unbacked_bindings"}
        node.replace_all_uses_with(part)
    _ask_hidden(region, moved, following)
    for node in reversed([head.node, *region.inner]):
        if not node.users:
            graph.erase_node(node)


def _made(region: Region, taken: list[Node]) -> list[Node]:
    """The logits of the rows `taken`, by one matmul."""
    head, graph = region.head, region.head.node.graph
    if not region.flat:
        return [head.over(taken[0])]
    shapes = [tuple(example(node).shape[:-1]) for node in region.boundary]
    columns = head.columns()
    flat = [
        graph.call_method("reshape", (rows, math.prod(shape), columns))
        for rows, shape in zip(taken, shapes, strict=True)
    ]
    logits = head.over(flat[0] if len(flat) == 1 else graph.call_function(torch.cat, (flat,)))
    found, start = [], 0
    for shape in shapes:
        part = graph.call_method("narrow", (logits, 0, start, math.prod(shape)))
        found.append(graph.call_method("view", (part, *shape, head.vocab)))
        start += math.prod(shape)
    return found


def _pointwise(region: Region, point: Node, boundary: Node, part: Node, moved: Replay) -> Node:
    """What `point` does to the logits, done to the rows `part` of them, which `boundary` takes."""
    inner = region.inner[point]

    def operand(arg: Any) -> Any:
        if arg is inner:
            return part
        found = example(arg)
        if not isinstance(arg, Node) or not isinstance(found, Tensor) or found.dim() < 2:
            return arg
        return _numbers_of(region, arg, inner, boundary, moved)

    args, kwargs = torch.fx.map_arg((point.args, point.kwargs), operand)
    return copied(point, args, kwargs)


def _numbers_of(region: Region, arg: Node, inner: Node, boundary: Node, moved: Replay) -> Node:
    """Numbers for the rows of `inner`, [..., 1], at those that `boundary` takes."""
    graph = arg.graph
    lead = enumerate(example(inner).shape[:-1])
    hidden = moved.of(inner)
    sizes = [s if isinstance(s, int) else graph.call_method("size", (hidden, d)) for d, s in lead]
    every = graph.call_method("expand", (arg, *sizes, 1))
    return Replay(inner, every, region.inner, 1).of(boundary)


def _ask_hidden(region: Region, moved: Replay, following: Node) -> None:
    """Who asks for a number of rows needs no logits."""
    for node in (region.head.node, *region.inner):
        for user in list(node.users):
            dim = user.args[1] if len(user.args) == 2 else None
            if user.target not in _SIZE or not isinstance(dim, int) or user.args[0] is not node:
                continue
            if (
                not isinstance(example(node), Tensor)
                or dim % example(node).dim() == example(node).dim() - 1
            ):
                continue
            if user > following or user is following:
                with node.graph.inserting_before(following):
                    user.args = (moved.of(node), dim)
