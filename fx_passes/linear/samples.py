"""Rows that a program takes apart and puts together again: `torch.stack([f(row) for row in logits])`, and its backward.

Entry points: `part_of`, what a view takes of the first dimension, `written_home`, what is added up of parts that are
written into zeros, and `are_all`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fx_passes.graph.facts import shape_of
from fx_passes.graph.operators import WRITES, is_zero
from fx_passes.graph.slices import END, bounds

aten = torch.ops.aten

_SIGNS: dict[Any, tuple[int, ...]] = {
    aten.add.Tensor: (1, 1),
    aten.sub.Tensor: (1, -1),
    aten.neg.default: (-1,),
}


@dataclass(frozen=True)
class Part:
    """Numbers [start, stop) of the first dimension, `size` in all; `dropped`: one, without its dimension."""

    size: int
    start: int
    stop: int
    dropped: bool


def part_of(node: Node) -> Part | None:
    """What `node` takes of the first dimension of its first argument; None where it is no such view, or takes all."""
    whole = node.args[0] if node.target in WRITES else None
    return _part(node, whole, 1) if isinstance(whole, Node) else None


@dataclass(frozen=True)
class Written:
    """`sign * source`, written into zeros as a part of their first dimension."""

    source: Node
    part: Part
    sign: int


def written_home(node: Node) -> list[Written] | None:
    """What `node` is the sum of, in the order of the parts; None where anything else is in it."""
    found: list[Written] = []
    waiting: list[tuple[Any, int]] = [(node, 1)]
    while waiting:
        each, sign = waiting.pop()
        if not isinstance(each, Node):
            return None
        signs = _SIGNS.get(each.target)
        if signs is not None and not each.kwargs:
            waiting += [(arg, sign * s) for arg, s in zip(each.args, signs, strict=True)]
            continue
        written = _written(each, sign)
        if written is None:
            return None
        found.append(written)
    return sorted(found, key=lambda each: each.part.start)


def _written(node: Node, sign: int) -> Written | None:
    if node.target not in WRITES.values():
        return None
    zeros, source = node.args[:2]
    part = _part(node, zeros, 2) if isinstance(zeros, Node) and is_zero(zeros) else None
    if part is None or not isinstance(source, Node):
        return None
    return Written(source, part, sign)


def are_all(parts: Sequence[Part]) -> bool:
    """Whether they are all of one first dimension, in order."""
    at = 0
    for part in parts:
        if part.start != at or (part.size, part.dropped) != (parts[0].size, parts[0].dropped):
            return False
        at = part.stop
    return bool(parts) and at == parts[0].size


def _part(node: Node, whole: Node, first: int) -> Part | None:
    """What the arguments from number `first` on name: a dimension and a number, or a dimension, bounds and a step."""
    dim, *rest = node.args[first:] or (0,)
    shape = shape_of(whole)
    size = shape[0] if shape else None
    if not isinstance(dim, int) or not isinstance(size, int) or dim % len(shape):
        return None
    if node.target in (aten.select.int, aten.select_scatter.default):
        at = rest[0]
        return Part(size, at % size, at % size + 1, True) if isinstance(at, int) else None
    given: list[Any] = [*rest, *(None, None, 1)[len(rest) :]]
    (start, stop), step = bounds(size, *given[:2]), given[2]
    stop = size if stop == END else stop
    if step != 1 or not (isinstance(start, int) and isinstance(stop, int)):
        return None
    return Part(size, start, stop, False) if 0 < stop - start < size else None
