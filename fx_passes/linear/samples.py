"""Rows split and stacked again: `torch.stack([f(row) for row in logits])`, and its backward.

Entry points: `part_of`, what a view takes of the first dimension, `addends`, what a sum is made of, parts that are
written into zeros among it, and `are_all`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fx_passes.graph.facts import shape_of, value
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
    """`sign * source`, written into zeros as a part of their first dimension and multiplied by `steps` in turn."""

    source: Node
    part: Part
    steps: tuple[Node, ...] = ()
    sign: int = 1


@dataclass(frozen=True)
class Addend:
    """`sign * node`."""

    node: Node
    sign: int


def addends(node: Node, moving: Set[Node]) -> tuple[list[Written], list[Addend]]:
    """What `node` is the sum of: parts, in their order, and everything else. Only what is `moving` is taken apart."""
    written: list[Written] = []
    others: list[Addend] = []
    waiting = [Addend(node, 1)]
    while waiting:
        each = waiting.pop()
        part = _written(each) if each.node in moving else None
        if part is not None:
            written.append(part)
        elif each.node in moving and _is_sum(each.node):
            signs = zip(each.node.args, _SIGNS[each.node.target], strict=True)
            waiting += [Addend(arg, each.sign * sign) for arg, sign in signs]  # type: ignore[arg-type]
        else:
            others.append(each)
    return sorted(written, key=lambda each: each.part.start), others


def _is_sum(node: Node) -> bool:
    """A sum of one dtype: in another order it would be rounded otherwise."""
    if node.target not in _SIGNS or node.kwargs:
        return False
    dtype = value(node).dtype
    return all(isinstance(arg, Node) and value(arg).dtype == dtype for arg in node.args)


def _written(addend: Addend) -> Written | None:
    node, sign, steps = addend.node, addend.sign, []
    while _keeps_zeros(node):
        if node.target is aten.neg.default:
            sign = -sign
        else:
            steps.append(node)
        node = node.args[0]  # type: ignore[assignment]
    if node.target not in WRITES.values():
        return None
    zeros, source = node.args[:2]
    part = _part(node, zeros, 2) if isinstance(zeros, Node) and is_zero(zeros) else None
    if part is None or not isinstance(source, Node) or value(source).dtype != value(node).dtype:
        return None
    return Written(source, part, tuple(reversed(steps)), sign)


def _keeps_zeros(node: Node) -> bool:
    """Whether `node` is a multiple of its first argument; 0 times what is in a tensor need not be 0."""
    if node.target not in (aten.neg.default, aten.mul.Tensor) or node.kwargs:
        return False
    first, *factors = node.args
    numbers = all(isinstance(factor, int | float) and math.isfinite(factor) for factor in factors)
    return isinstance(first, Node) and numbers


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
