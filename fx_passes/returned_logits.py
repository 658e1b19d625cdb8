"""Logits returned beside a loss: detached in the graph, with their own way back to their inputs.

Entry point: `detach_returned`, on Dynamo's graph: AOTAutograd then gives backward a gradient of every output that may
have one. Where the caller never differentiates the logits it is a tensor of zeros, as large as they are, to which the
loss's gradient is added. Whether there is one is known when backward runs, and autograd calls only what has one. So
the graph returns the logits without a gradient, and `Returned` says how to compute them again from values that are
narrow: what calls the graph makes a node of autograd of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fx_passes.graph.facts import hint
from fx_passes.graph.order import descendants, following
from fx_passes.graph.writes import Writes, example
from fx_passes.row_demand.heads import Head, heads_of
from fx_passes.row_demand.modes import with_modes
from fx_passes.row_demand.moves import kind_of
from fx_passes.row_demand.region import POINTWISE, is_narrow

_TURNS: set[Any] = {"t", "transpose", torch.t, torch.transpose}


@dataclass(frozen=True)
class Way:
    """How logits among the outputs are made.

    Attributes:
        output: their place among the outputs.
        replay: computes them from the operands.
        operands: places among the inputs, and behind them the outputs.
    """

    output: int
    replay: GraphModule
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Returned:
    """What `detach_returned` has changed.

    Attributes:
        added: outputs behind the user's.
    """

    ways: tuple[Way, ...] = ()
    added: int = 0


def detach_returned(gm: GraphModule, min_vocab: int) -> Returned:
    """Detaches the returned logits that `gm` makes, where `gm` also returns what may be their loss.

    What they are made of, if `gm` is not given it, becomes an output behind the others.

    Args:
        gm: one of Dynamo's, with `meta["example_value"]`.
        min_vocab: the smallest last dimension that is taken for a vocabulary.
    """
    graph = gm.graph
    output = graph.output_node()
    given: Any = output.args[0]
    outputs: list[Any] = list(given)
    inputs = graph.find_nodes(op="placeholder")
    found: list[Way] = []
    for place, chain in _chains(graph, given, min_vocab):
        outputs += [leaf for leaf in chain.leaves if leaf not in inputs and leaf not in outputs]
        operands = [
            inputs.index(leaf) if leaf in inputs else len(inputs) + outputs.index(leaf)
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


def _chains(graph: Graph, outputs: Sequence[Any], min_vocab: int) -> Iterator[tuple[int, _Chain]]:
    """Those of the outputs that may be detached, by their places."""
    heads = {head.node: head for head in heads_of(graph, min_vocab)}
    usual = {node for node, modes in with_modes(graph) if modes.usual}
    writes = Writes(graph)
    for place, node in enumerate(outputs):
        chain = _Chain(heads)
        if not _is_wide(node, min_vocab) or not chain.leads_to(node):
            continue
        others = [*outputs, *graph.find_nodes(op="placeholder")]
        own = not _shares_memory(writes, node, others)
        again = own and chain.made <= usual and not _changed(writes, chain)
        if again and not _is_hidden(node, heads) and _has_loss(outputs, node, chain):
            yield place, chain


class _Chain:
    """How logits are made of values that are given, or as narrow as hidden states.

    Attributes:
        root: the logits that the chain begins with: a matmul's, or given ones.
        made: what is computed again.
        leaves: what it is computed of.
    """

    def __init__(self, heads: Mapping[Node, Head]) -> None:
        self.heads = heads
        self.root: Node | None = None
        self.made: set[Node] = set()
        self.leaves: dict[Node, None] = {}

    def leads_to(self, node: Node) -> bool:
        """Whether `node` is a matmul's logits, or made of such or of given ones by operators that can be run again."""
        if node.op == "placeholder":
            self.root = node
            self.leaves[node] = None
            return True
        self.made.add(node)
        head = self.heads.get(node)
        if head is not None:
            self.root = node
            self.leaves[head.hidden] = None
            weights = [each for each in node.all_input_nodes if each is not head.hidden]
            # else a weight that is trained is nothing that its own gradient reads, and may be changed before
            return _has_gradient(head.hidden) and all(map(self._is_weight, weights))
        if node.op not in ("call_function", "call_method"):
            return False
        inner, *others = sorted(node.all_input_nodes, key=_elements, reverse=True) or [node]
        if not all(isinstance(example(each), Tensor) for each in (inner, *others)):
            return False
        if node.target in POINTWISE:
            again = all(is_narrow(example(each), example(inner)) for each in others)
        else:
            again = inner is node.args[0] and kind_of(node, inner) in ("view", "take")
        self.leaves |= dict.fromkeys(others)
        return again and self.leads_to(inner)

    def _is_weight(self, node: Node) -> bool:
        """Whether it is given, or made of what is by operators that can be run again."""
        if node.op == "placeholder":
            self.leaves[node] = None
            return True
        self.made.add(node)
        again = node.op in ("call_function", "call_method") and node.target in POINTWISE | _TURNS
        return again and all(self._is_weight(each) for each in node.all_input_nodes)

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
    found = example(node)
    return _has_gradient(node) and found.dim() > 1 and hint(found.shape[-1]) >= min_vocab


def _is_hidden(node: Node, heads: Mapping[Node, Head]) -> bool:
    """Whether a matmul reads what is made of it: hidden states may be as wide as a vocabulary."""
    return not heads.keys().isdisjoint(descendants([node]) - {node})


def _shares_memory(writes: Writes, node: Node, others: Sequence[Any]) -> bool:
    """Whether it is a view of another, or the other of it: for the caller, and for autograd, it stays one."""
    beside = writes.memory(each for each in others if each is not node)
    return not beside.isdisjoint(writes.memory([node]))


def _has_gradient(node: object) -> bool:
    found = example(node)
    return isinstance(found, Tensor) and found.requires_grad


def _has_loss(outputs: Sequence[Any], logits: Node, chain: _Chain) -> bool:
    """Another, smaller output has a gradient through the logits: else the caller makes the loss, of these logits."""
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
