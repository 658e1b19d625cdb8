"""Logits returned next to a loss: detached in the graph, with their own way back to their inputs.

Entry point: `detach_returned`, on Dynamo's graph. Without it AOTAutograd gives backward a gradient of every
differentiable output. If the caller never differentiates the logits, that gradient is zeros, as large as the logits,
and the loss's gradient is added to it. Only backward at run time knows which outputs have a gradient, and autograd
calls only their nodes. So the graph returns the logits without a gradient, and `Returned` holds a computation of the
logits from narrow values; the graph's caller makes an autograd node of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fx_passes.graph.facts import hint, same
from fx_passes.graph.order import descendants, following
from fx_passes.graph.writes import Writes, example

_MATMULS: dict[Any, int] = {
    F.linear: 0, torch.matmul: 0, operator.matmul: 0, torch.mm: 0, torch.addmm: 1,
    "matmul": 0, "mm": 0, "__matmul__": 0,
}  # fmt: skip
"""Of hidden states and a matrix, and the place of the hidden states among the arguments."""

_ARITHMETIC: set[Any] = {
    operator.truediv, operator.mul, operator.add, operator.sub, operator.neg,
    torch.div, torch.mul, torch.tanh, torch.neg, torch.add, torch.sub,
    "div", "mul", "add", "sub", "neg", "tanh", "float", "double", "half", "bfloat16", "to", "type",
    "contiguous", "clone", "detach",
}  # fmt: skip
"""Of logits; views of them are none of these."""


@dataclass(frozen=True)
class Way:
    """The computation of logits among the outputs.

    Attributes:
        output: the position of the logits among the outputs.
        replay: computes them from the operands.
        operands: positions among the inputs, followed by positions among the outputs.
    """

    output: int
    replay: GraphModule
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Returned:
    """The changes made by `detach_returned`.

    Attributes:
        added: outputs behind the user's.
    """

    ways: tuple[Way, ...] = ()
    added: int = 0


def detach_returned(gm: GraphModule, min_vocab: int) -> Returned:
    """Detaches the returned logits computed by `gm`, if `gm` also returns a possible loss of theirs.

    Their operands become further outputs, unless they are inputs of `gm`; numbers per row as copies, since the caller
    may write to its own.

    Args:
        gm: one of Dynamo's, with `meta["example_value"]`.
        min_vocab: the smallest last dimension treated as a vocabulary.
    """
    graph = gm.graph
    output = graph.output_node()
    given: Any = output.args[0]
    outputs: list[Any] = list(given)
    inputs = graph.find_nodes(op="placeholder")
    found: list[Way] = []
    copies: dict[Node, Node] = {}
    for place, chain in _chains(graph, given, min_vocab):
        for leaf in chain.leaves:
            if leaf not in inputs and leaf not in copies:
                copies[leaf] = _copied(graph, leaf) if _is_narrow(leaf) else leaf
        outputs += [copies[leaf] for leaf in copies if copies[leaf] not in outputs]
        operands = [
            inputs.index(leaf) if leaf in inputs else len(inputs) + outputs.index(copies[leaf])
            for leaf in chain.leaves
        ]
        found.append(Way(place, chain.replay(gm.graph, given[place]), tuple(operands)))
    for way in found:
        node = given[way.output]
        with graph.inserting_before(output):
            detached = graph.call_method("detach", (node,))
        detached.meta = {**node.meta, "example_value": example(node).detach()}
        outputs[way.output] = detached
    if found:
        output.args = (tuple(outputs),)
        gm.recompile()
    return Returned(tuple(found), len(outputs) - len(given))


def _copied(graph: Graph, node: Node) -> Node:
    with graph.inserting_before(graph.output_node()):
        copy = graph.call_method("clone", (node,))
    copy.meta = {**node.meta, "example_value": example(node).clone()}
    return copy


def _chains(graph: Graph, outputs: Sequence[Any], min_vocab: int) -> Iterator[tuple[int, _Chain]]:
    """The outputs that may be detached, by position."""
    usual, writes = _in_usual_modes(graph), Writes(graph)
    for place, node in enumerate(outputs):
        chain = _Chain(writes)
        if not _is_wide(node, min_vocab) or not chain.leads_to(node):
            continue
        others = [*outputs, *graph.find_nodes(op="placeholder")]
        own = not _shares_memory(writes, node, others)
        again = own and chain.made <= usual and not _changed(writes, chain)
        if again and not _is_hidden(node, min_vocab) and _has_loss(outputs, node, chain):
            yield place, chain


def _in_usual_modes(graph: Graph) -> set[Node]:
    """The nodes with the modes of the graph's call: gradients, autocast and inference."""
    given: Any = torch.is_grad_enabled()
    grad, depth, found = given, 0, set()
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if "set_grad_enabled" in name:
            grad = node.args[0]
        depth += name.startswith("_enter_") - name.startswith("_exit_")
        if grad == given and not depth:
            found.add(node)
    return found


def _hidden_of(node: Node) -> Node | None:
    """The hidden states `[..., D]`, if `node` is a matmul of them with a matrix; otherwise None."""
    place = _MATMULS.get(node.target)
    if place is None or node.op not in ("call_function", "call_method"):
        return None
    found = node.args[place] if len(node.args) > place else node.kwargs.get("input")
    weights = [example(each) for each in node.all_input_nodes if each is not found]
    matrices = all(isinstance(each, Tensor) and each.dim() <= 2 for each in weights)
    hidden = example(found)
    bias = example(node.args[0]) if place == 1 else None
    per_row = isinstance(bias, Tensor) and bias.dim() > 1
    rows = isinstance(hidden, Tensor) and hidden.dim() >= 2
    return found if isinstance(found, Node) and rows and matrices and not per_row else None


class _Chain:
    """The computation of logits from values that are inputs, or as narrow as hidden states.

    Attributes:
        root: the logits at the start of the chain: a matmul's, or passed in.
        made: the recomputed nodes.
        leaves: their operands.
    """

    def __init__(self, writes: Writes) -> None:
        self.writes = writes
        self.root: Node | None = None
        self.made: set[Node] = set()
        self.leaves: dict[Node, None] = {}

    def leads_to(self, node: Node) -> bool:
        """Whether `node` is logits of a matmul, or computed from such or from logits passed in, by repeatable
        operators.
        """
        if node.op == "placeholder":
            self.root = node
            self.leaves[node] = None
            return True
        self.made.add(node)
        hidden = _hidden_of(node)
        if hidden is not None:
            self.root = node
            self.leaves[hidden] = None
            weights = [each for each in node.all_input_nodes if each is not hidden]
            # without a gradient of hidden, autograd saves no weight: the program could change it before backward
            return _has_gradient(hidden) and all(map(self._is_weight, weights))
        inner, *others = sorted(node.all_input_nodes, key=_elements, reverse=True) or [node]
        if inner is node or not self._runs_again(node):
            return False
        self.leaves |= dict.fromkeys(others)
        return _same_columns(node, inner) and all(map(_is_narrow, others)) and self.leads_to(inner)

    def _is_weight(self, node: Node) -> bool:
        """Whether it is an input, or computed from inputs by repeatable operators."""
        if node.op == "placeholder":
            self.leaves[node] = None
            return True
        self.made.add(node)
        return self._runs_again(node) and all(map(self._is_weight, node.all_input_nodes))

    def _runs_again(self, node: Node) -> bool:
        """Whether it is arithmetic or a view, and gives the same again."""
        given = self.writes.memory(node.all_input_nodes)
        shows = not self.writes.memory([node]).isdisjoint(given)
        return (shows or node.target in _ARITHMETIC) and self.writes.repeatable(node)

    def replay(self, graph: Graph, node: Node) -> GraphModule:
        """A module that computes `node` from the leaves, in their order."""
        made = Graph()
        copies = {leaf: made.placeholder(f"operand_{at}") for at, leaf in enumerate(self.leaves)}
        for each in graph.nodes:
            if each in self.made:
                copies[each] = made.node_copy(each, copies.__getitem__)
        made.output(copies[node])
        return GraphModule({}, made)


def _is_wide(node: object, min_vocab: int) -> bool:
    """As logits are, and has a gradient."""
    return _has_gradient(node) and _has_columns(node, min_vocab)


def _has_columns(node: object, min_vocab: int) -> bool:
    found = example(node)
    return isinstance(found, Tensor) and found.dim() > 1 and hint(found.shape[-1]) >= min_vocab


def _same_columns(node: Node, inner: Node) -> bool:
    made, given = example(node), example(inner)
    both = isinstance(made, Tensor) and isinstance(given, Tensor) and made.dim() and given.dim()
    return bool(both) and same(made.shape[-1], given.shape[-1])


def _is_narrow(node: Node) -> bool:
    """One value per column, or one per row."""
    found = example(node)
    return isinstance(found, Tensor) and (found.dim() <= 1 or same(found.shape[-1], 1))


def _is_hidden(node: Node, min_vocab: int) -> bool:
    """Whether a head's matmul reads a value computed from it: hidden states may be as wide as a vocabulary."""
    after = descendants([node]) - {node}
    return any(_hidden_of(each) is not None and _has_columns(each, min_vocab) for each in after)


def _shares_memory(writes: Writes, node: Node, others: Sequence[Any]) -> bool:
    """Whether it is a view of another, or the other of it: for the caller, and for autograd, it stays one."""
    beside = writes.memory(each for each in others if each is not node)
    return not beside.isdisjoint(writes.memory([node]))


def _has_gradient(node: object) -> bool:
    found = example(node)
    return isinstance(found, Tensor) and found.requires_grad


def _has_loss(outputs: Sequence[Any], logits: Node, chain: _Chain) -> bool:
    """Whether another, smaller output has a gradient through the logits. If not, the caller computes the loss from
    them.
    """
    after = descendants([chain.root] if chain.root is not None else [])
    losses = [each for each in outputs if each in after and _has_gradient(each)]
    return any(2 * _elements(each) <= _elements(logits) for each in losses)


def _elements(node: Node) -> int:
    found = example(node)
    return math.prod(map(hint, found.shape)) if isinstance(found, Tensor) else 0


def _changed(writes: Writes, chain: _Chain) -> bool:
    """Whether the graph writes to anything on the way once it is there, or hooks its gradient."""
    way = [*chain.leaves, *chain.made]
    return any(writes.change(following(each), writes.memory([each])) for each in way)
