"""The matmuls of heads, in the spellings of Dynamo's graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from fx_passes.graph.facts import hint
from fx_passes.graph.writes import example

_LINEAR: set[Any] = {F.linear}
_MATMULS: set[Any] = {torch.matmul, operator.matmul, torch.mm, "matmul", "mm", "__matmul__"}
_ADDMM: set[Any] = {torch.addmm}
_TWO_DIMENSIONS: set[Any] = {torch.mm, "mm", torch.addmm}


@dataclass(frozen=True)
class Head:
    """`node` is hidden [..., D] times a matrix: logits [..., V].

    Attributes:
        hidden: the operand with the rows.
        place: its position among the arguments, or its name.
    """

    node: Node
    hidden: Node
    place: int | str

    @property
    def vocab(self) -> int:
        """As an argument of a view."""
        vocab = example(self.node).shape[-1]
        return vocab if isinstance(vocab, int) else -1

    @property
    def only_matrices(self) -> bool:
        """Whether the operator takes two dimensions and no more."""
        return self.node.target in _TWO_DIMENSIONS

    def columns(self) -> Any:
        """The last size of hidden: a number, or a new node that computes it."""
        size = example(self.hidden).shape[-1]
        return (
            size
            if isinstance(size, int)
            else self.node.graph.call_method("size", (self.hidden, -1))
        )

    def over(self, hidden: Node) -> Node:
        """The same matmul over other rows, at the graph's place of insertion."""
        args, kwargs = list(self.node.args), dict(self.node.kwargs)
        if isinstance(self.place, int):
            args[self.place] = hidden
        else:
            kwargs[self.place] = hidden
        return copied(self.node, tuple(args), kwargs)


def copied(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    """`node` with other operands; what is known of its value is not."""
    made = node.graph.create_node(node.op, node.target, args, kwargs)
    made.meta = {name: each for name, each in node.meta.items() if name != "example_value"}
    return made


def heads_of(graph: Graph, min_vocab: int) -> Iterator[Head]:
    """All matmuls in `graph` whose result is as wide as a vocabulary."""
    for node in list(graph.nodes):
        head = _head(node)
        if head is not None and _has_rows(head, min_vocab):
            yield head


def _head(node: Node) -> Head | None:
    if node.op not in ("call_function", "call_method"):
        return None
    target: Any = node.target
    if target in _LINEAR:
        place: int | str = 0 if node.args else "input"
    elif target in _MATMULS and len(node.args) == 2:
        place = 0
    elif target in _ADDMM and len(node.args) == 3 and not node.kwargs:
        place = 1
    else:
        return None
    hidden = node.args[place] if isinstance(place, int) else node.kwargs.get(place)
    return Head(node, hidden, place) if isinstance(hidden, Node) else None


def _has_rows(head: Head, min_vocab: int) -> bool:
    logits, hidden = example(head.node), example(head.hidden)
    if not isinstance(logits, Tensor) or not isinstance(hidden, Tensor) or hidden.dim() < 2:
        return False
    others = [example(arg) for arg in head.node.all_input_nodes if arg is not head.hidden]
    per_row = any(isinstance(each, Tensor) and each.dim() > 2 for each in others)
    bias = example(head.node.args[0]) if head.place == 1 else None
    per_row |= isinstance(bias, Tensor) and bias.dim() > 1
    return not per_row and hint(logits.shape[-1]) >= min_vocab
