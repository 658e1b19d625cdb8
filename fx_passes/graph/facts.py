"""Facts about a node of an ATen graph: its fake value, shape and dtype, and whether it belongs to backward.

Sizes are `int` or `torch.SymInt`. Questions about sizes never add a guard. Exception: `guarded_same`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx import Graph, Node

from fx_passes import torch_private
from fx_passes.torch_private import (
    free_unbacked_symbols,
    group_size_by_name,
    guard_or_false,
    statically_known_true,
)

torch_private.check(torch_private.INTERFACES)  # registers the operators named by rules and passes

Size: TypeAlias = int | torch.SymInt
Shape: TypeAlias = tuple[Size, ...]
SizeArg: TypeAlias = int | Node
"""A size as an argument of a node: a number, or the node that computes it."""

TAG = "partitioner_tag"
"""Torch's meta key of a joint graph's node: forward or backward, and whether it must stay there."""

BACKWARD = "is_backward"


def value(node: object) -> Any:
    """The fake tensor (or symbolic number) of a node; other things are their own value."""
    return node.meta.get("val") if isinstance(node, Node) else node


def is_backward(node: Node) -> bool:
    """See NOTE [What belongs to backward]; true of a graph that `mark_backward` has seen."""
    return node.meta.get(TAG) in (BACKWARD, "must_be_in_backward")


def shape_of(node: object) -> Shape:
    return tuple(value(node).shape)


def rank_of(node: object) -> int:
    """Dimensions of a tensor's node; 0 for numbers."""
    return int(getattr(value(node), "ndim", 0))


def same(left: object, right: object) -> bool:
    """Equal sizes for certain; never adds a guard."""
    return statically_known_true(value(left) == value(right))


def same_shape(left: Sequence[object], right: Sequence[object]) -> bool:
    return len(left) == len(right) and all(same(x, y) for x, y in zip(left, right, strict=True))


def same_layout(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal strides. The stride of a dimension of one element does not count: Megatron's [1, T, V] has (V, V, 1)."""
    dims = zip(left.shape, left.stride(), right.stride(), strict=True)
    return all(same(size, 1) or same(old, new) for size, old, new in dims)


def guarded_same(left: object, right: object) -> bool:
    """Equal sizes; if they are equal for the sizes at hand, a guard is added.

    Needed for an index with as many rows as the logits: torch would accept fewer, so no other guard says that they are
    equal.
    """
    return bool(guard_or_false(value(left) == value(right)))


def hint(size: Size) -> int:
    """A size as a number; for a symbolic one its hint, the size during tracing, or 0 without a hint."""
    if isinstance(size, torch.SymInt):
        known: Any = size.node.hint if size.node.has_hint() else 0
        return int(known)
    return int(size)


def numbers(sizes: Sequence[Size]) -> list[int]:
    """Sizes as numbers for a decision about layouts; symbolic ones by their hints.

    A size that depends on data becomes a large number with small divisors and none in common with another size. So its
    dimension can be split and joined as in the program, and equals no other by chance.
    """
    unknown = sorted({s for size in sizes for s in free_unbacked_symbols(size)}, key=str)
    given = {
        symbol: sympy.Integer(5040 * 1_000_003**power) for power, symbol in enumerate(unknown, 1)
    }
    return [hint(_with(size, given)) for size in sizes]


def _with(size: Size, given: dict[Any, sympy.Integer]) -> Size:
    if not given or not isinstance(size, torch.SymInt):
        return size
    shapes: Any = size.node.shape_env
    found: Size = shapes.create_symintnode(size.node.expr.xreplace(given), hint=None)
    return found


def is_given(node: Node) -> bool:
    """The graph is given it, and does not compute it: an input, a tangent, a constant."""
    return node.op in ("placeholder", "get_attr")


def is_float_tensor(node: object) -> bool:
    found = value(node)
    return isinstance(found, torch.Tensor) and found.dtype.is_floating_point


def is_wide(node: object, min_vocab: int) -> bool:
    """Floating, of at least two dimensions, the last possibly a vocabulary; symbolic sizes by their hints."""
    return is_float_tensor(node) and rank_of(node) >= 2 and hint(shape_of(node)[-1]) >= min_vocab


def wide_nodes(graph: Graph, min_vocab: int) -> list[Node]:
    return [node for node in graph.nodes if is_wide(node, min_vocab)]


def is_as_wide(node: object, logits: Iterable[object]) -> bool:
    """A tensor of at least two dimensions, the last as large as that of one of `logits`."""
    if rank_of(node) < 2:
        return False
    columns = shape_of(node)[-1]
    return any(same(columns, shape_of(each)[-1]) for each in logits)


def byte_count(node: Node) -> int:
    """Bytes of a tensor, symbolic sizes by their hints; 0 if the number of rows depends on data."""
    tensor = value(node)
    return int(tensor.element_size()) * math.prod(map(hint, tensor.shape))


def ranks_of(group: object) -> int:
    """Ranks of a process group, by its name in the graph."""
    return int(group_size_by_name(group))  # type: ignore[arg-type]
