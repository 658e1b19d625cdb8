"""Indices known without data: consecutive numbers."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from fx_passes.graph.facts import Shape, rank_of, same, shape_of, value
from fx_passes.graph.operators import SAME_VALUE, under
from fx_passes.torch_private import FakeTensor, unset_fake_temporarily

aten = torch.ops.aten
prims = torch.ops.prims

_SAME = SAME_VALUE | {aten.lift_fresh_copy.default}
_EXACT = {torch.int32, torch.int64}


def is_integer(node: Node) -> bool:
    """Whether it has integers, as an index needs, or a number compared with columns."""
    dtype = getattr(value(node), "dtype", torch.float32)
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def counting_axis(node: Node) -> int | None:
    """The dimension along which `node` counts 0, 1, 2, ..., equal in all others; None if there is none."""
    path = []
    while node.op == "call_function" and node.target is not prims.iota.default:
        if not isinstance(node.args[0] if node.args else None, Node):
            return None
        path.append(node)
        node = node.args[0]  # type: ignore[assignment]
    if not (_is_written_down(node) if node.op == "get_attr" else _is_iota(node)):
        return None
    axis: int | None = 0
    for moved in reversed(path):
        axis = None if axis is None else _moved_axis(moved, axis)
    return axis


def _is_iota(node: Node) -> bool:
    if node.op != "call_function" or node.kwargs.get("start", 0) != 0:
        return False
    if node.kwargs.get("step", 1) != 1:
        return False
    return value(node).dtype in _EXACT


def _is_written_down(node: Node) -> bool:
    """`[0, 1, 2, ...]` or `range(n)` in the user's code: a constant with copies only, never changed."""
    if any(user.target is not aten.lift_fresh_copy.default for user in node.users):
        return False
    constant = getattr(node.graph.owning_module, str(node.target), None)
    if not isinstance(constant, torch.Tensor) or isinstance(constant, FakeTensor):
        return False
    if constant.dim() != 1 or constant.dtype not in _EXACT:
        return False
    with unset_fake_temporarily():
        return torch.equal(constant.cpu(), torch.arange(len(constant), dtype=constant.dtype))


def _moved_axis(node: Node, axis: int) -> int | None:
    """The counting dimension after an operator."""
    target, inner = node.target, shape_of(node.args[0])
    shape, rank = shape_of(node), rank_of(node)
    if target in _SAME or target is prims.convert_element_type.default:
        return axis if value(node).dtype in _EXACT else None
    if target is aten.unsqueeze.default:
        return axis + int(node.args[1] % rank <= axis)  # type: ignore[operator]
    if target is aten.expand.default:
        place = axis + rank - len(inner)
        return place if same(shape[place], inner[axis]) else None
    if target is aten.slice.Tensor:
        return axis if node.args[1] % rank != axis or _from_zero(node) else None  # type: ignore[operator]
    if target is aten.view.default:
        return _viewed_axis(inner, shape, axis)
    return None


def _from_zero(node: Node) -> bool:
    return node.args[2:3] in ((), (0,), (None,)) and node.args[4:5] in ((), (1,))


def _viewed_axis(inner: Shape, shape: Shape, axis: int) -> int | None:
    """A view that only adds dimensions of size 1 around the counting one."""
    alone = all(same(size, 1) for at, size in enumerate(inner) if at != axis)
    places = [at for at, size in enumerate(shape) if not same(size, 1)]
    if not alone or len(places) != 1 or not same(shape[places[0]], inner[axis]):
        return None
    return places[0]


def are_distinct(index: Node, dim: int) -> bool:
    """The columns of `topk`: no two in a row are the same."""
    found = under(index, SAME_VALUE)
    if found.target is not operator.getitem or found.args[1] != 1:
        return False
    (chosen,) = found.all_input_nodes
    if chosen.target is not aten.topk.default:
        return False
    along: Any = chosen.args[2] if len(chosen.args) > 2 else chosen.kwargs.get("dim", -1)
    return bool(along % rank_of(index) == dim)
