"""Indices that are known without data: numbers that count."""

from __future__ import annotations

import torch
from torch.fx import Node

aten = torch.ops.aten
prims = torch.ops.prims

_LOOKED_THROUGH = {
    aten.view.default,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.alias.default,
    aten.clone.default,
    prims.convert_element_type.default,
}


def is_iota(node: object) -> bool:
    """0, 1, 2, ... along its only dimension that is not 1, seen through views, integer casts and slices from 0."""
    while isinstance(node, Node) and node.op == "call_function":
        if node.target is prims.iota.default:
            return bool(node.kwargs.get("start", 0) == 0 and node.kwargs.get("step", 1) == 1)
        from_zero = node.args[2:3] in ((), (0,), (None,)) and len(node.args) < 5
        if node.target is aten.slice.Tensor and not from_zero:
            return False
        if node.target is not aten.slice.Tensor and node.target not in _LOOKED_THROUGH:
            return False
        node = node.args[0]
    return False


def rolled_by(index: object, size: object) -> int | None:
    """k where `index` is `fmod(iota(n) + k, n)`."""
    if not isinstance(index, Node) or index.target is not aten.fmod.Scalar or index.args[1] != size:
        return None
    added = index.args[0]
    if not isinstance(added, Node) or added.target is not aten.add.Tensor:
        return None
    shift = added.args[1]
    return shift if isinstance(shift, int) and is_iota(added.args[0]) else None
