"""Torch's modes (gradients, autocast, inference) at each node of Dynamo's graph; nodes switch them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node


class Modes(NamedTuple):
    """What is equal at two nodes where all modes are equal; the reverse need not hold.

    Attributes:
        grad: whether gradients are on.
        entered, left: how often another mode was; what it changes to is not compared.
        usual: whether all modes are as where the graph is called.
    """

    grad: Any
    entered: int
    left: int
    usual: bool


def with_modes(graph: Graph) -> Iterator[tuple[Node, Modes]]:
    """Each node with the modes there."""
    given: Any = torch.is_grad_enabled()
    grad, entered, left = given, 0, 0
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "")
        if "set_grad_enabled" in name:
            grad = node.args[0]
        entered += name.startswith("_enter_")
        left += name.startswith("_exit_")
        yield node, Modes(grad, entered, left, grad == given and entered == left)
