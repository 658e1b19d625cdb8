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
    """All that `nodes` are computed from, by their `inputs`; themselves only where they depend on each other."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        new = set(inputs(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def descendants(nodes: Iterable[Node], stop: Node | None = None) -> set[Node]:
    """`nodes` and all that is computed from them other than through `stop`."""
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
    """What runs once `replacements` are in place; `forward`: for what forward returns only."""
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
    """Operators that run even if unread. Torch answers slowly, so each operator is asked once."""
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
    """Whether nothing reads it that runs; there are passes that take nodes out at their end."""
    return node.op == "call_function" and not node.is_impure() and all(map(is_dead, node.users))


def tidy(graph: Graph) -> None:
    """Needed nodes, each after its inputs."""
    sort(graph)
    graph.eliminate_dead_code()


# NOTE [Who reads an input reads it before it is written]
# Torch's graphs are functional but for their end, where inputs that the program changes are written by `copy_`. A node
# that a pass makes of such an input means what was given; nothing in the graph itself says that it has to run before
# the write, so the order says it. The partitioner (torch 2.13) takes a write that stands before what is computed from
# a tangent to the front of backward, before all that it computes again there: a write of backward stands last.


def sort(graph: Graph) -> None:
    """Puts every node after its inputs, every write after the new nodes that read there, backward's last of all.

    Else keeps the order.

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
    """For every write of an input the nodes made by passes that read what it writes."""
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
