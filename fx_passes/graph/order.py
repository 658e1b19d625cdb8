"""Order of nodes: ancestors, descendants, computed nodes, and an order able to run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter

import torch
from torch.fx import Graph, Node

from fx_passes.graph.aliases import Aliases
from fx_passes.graph.facts import is_backward


def ancestors(
    nodes: Iterable[Node],
    inputs: Callable[[Node], Iterable[Node]] = attrgetter("all_input_nodes"),
) -> set[Node]:
    """All nodes that `nodes` are computed from, along `inputs`; of `nodes` themselves those needed by others."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        new = set(inputs(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def descendants(nodes: Iterable[Node], stop: Node | None = None) -> set[Node]:
    """`nodes` and all nodes computed from them, except through `stop`."""
    found = set(nodes)
    waiting = list(found)
    while waiting:
        new = set(waiting.pop().users) - found - {stop}
        found |= new
        waiting += new
    return found


def following(node: Node) -> Iterator[Node]:
    """The nodes after it, in the order of the graph."""
    while node.op != "output":
        node = node.next
        yield node


def computed(graph: Graph, replacements: Mapping[Node, Node], forward: bool = False) -> set[Node]:
    """The nodes that run after `replacements`; `forward`: only those needed by forward's outputs."""
    output = graph.output_node()
    returned = [n for n in output.all_input_nodes if not (forward and is_backward(n))]
    effects = [n for n in _effects(graph) if not (forward and is_backward(n))]
    stack = [replacements.get(node, node) for node in returned] + effects
    found = {output, *stack}
    while stack:
        for arg in stack.pop().all_input_nodes:
            arg = replacements.get(arg, arg)
            if arg not in found:
                found.add(arg)
                stack.append(arg)
    return found


def _effects(graph: Graph) -> Iterator[Node]:
    """Operators that run even if unread. Torch is slow to answer, so each operator is looked up once."""
    known: dict[object, bool] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if not isinstance(node.target, torch._ops.OpOverload):  # its arguments may decide
            impure = node.is_impure()
        elif node.target in known:
            impure = known[node.target]
        else:
            impure = known[node.target] = node.is_impure()
        if impure:
            yield node


def is_dead(node: Node) -> bool:
    """Whether no running node reads it; some passes remove dead nodes only at their end."""
    return node.op == "call_function" and not node.is_impure() and all(map(is_dead, node.users))


def tidy(graph: Graph) -> None:
    """Needed nodes, each after its inputs."""
    sort(graph)
    graph.eliminate_dead_code()


# NOTE [Who reads an input reads it before it is written]
# Torch's graphs are functional except for their end, where `copy_` overwrites the inputs changed by the program. A new
# node reading such an input means the original value. No data dependency puts it before the write, so the order of the
# graph does. If a write of backward comes before nodes computed from a tangent, the partitioner (torch 2.13) moves it
# to the front of backward, before all recomputed nodes. So a write of backward comes last.


def sort(graph: Graph) -> None:
    """Puts every node after its inputs, every write after new nodes reading its destination, backward's writes last.

    Otherwise the order stays.

    Raises:
        ValueError: a node depends on itself.
    """
    placed: set[Node] = set()
    entered: set[Node] = set()
    last = None
    before = _readers_of_written(graph)
    late = [write for write in before if is_backward(write)]
    *nodes, output = graph.nodes
    for node in (*(n for n in nodes if n not in late), *late, output):
        stack = [node]
        while stack:
            top = stack[-1]
            needed = (*top.all_input_nodes, *before.get(top, ()))
            waiting = [each for each in needed if each not in placed]
            if waiting:
                if top in entered:
                    raise ValueError(f"{top} depends on itself")
                entered.add(top)
                stack.extend(reversed(waiting))
                continue
            stack.pop()
            if top in placed:
                continue
            if last is not None and last.next is not top:
                last.append(top)
            placed.add(top)
            last = top


def _readers_of_written(graph: Graph) -> dict[Node, list[Node]]:
    """For every write of an input, the new nodes reading that input."""
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    if not writes:
        return {}
    aliases = Aliases(graph)
    return {
        write: [
            user
            for alias in aliases.of(write.args[0])
            for user in alias.users
            if user.meta.get("slime_fused")
        ]
        for write in writes
    }
