"""Outputs of a graph stay separate tensors.

Entry point: `Returned`, constructed before a rewrite. A view of an input stays one. The caller may change one result in
place: that must not change another result, an input, or a tensor saved for backward. And if a tensor is returned twice,
once detached, autograd treats both as without a gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fx_passes.graph.aliases import Aliases, own_copy, viewed_inputs
from fx_passes.graph.facts import is_backward, is_given, same, value
from fx_passes.graph.fakes import result_of
from fx_passes.graph.order import ancestors
from fx_passes.torch_private import FakeTensorMode, TangentAOTInput


class Returned:
    """The results of forward by position, each with the results and inputs that share its memory."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._places = [
            at
            for at, node in enumerate(self._results())
            if isinstance(node, Node) and not is_backward(node)
            if isinstance(value(node), torch.Tensor)
        ]
        aliases = Aliases(graph)
        self._before = self._memory(aliases)
        self._readers = {
            at: {reader for reader in readers if not reader.meta.get("slime_fused")}
            for at, readers in self._read(aliases).items()
        }

    def views(self) -> set[Node]:
        """Results that are views of inputs or share memory with other results, and the nodes between.

        The nodes between start at the inputs, or at the last value that two of the results are views of.
        """
        results = self._results()
        of_inputs = [
            results[at]
            for at, group in self._before.items()
            if any(isinstance(each, str) for each in group)
        ]
        found = {*of_inputs, *ancestors(of_inputs, viewed_inputs)}
        for group in set(self._before.values()):
            returned = {results[at] for at in group if isinstance(at, int)}
            paths = [{node, *ancestors([node], viewed_inputs)} for node in returned]
            for one, other in itertools.combinations(paths, 2):
                found |= one ^ other
        return found

    def keep_apart(self, fake_mode: FakeTensorMode, is_wide: Callable[[Node], bool]) -> None:
        """Copies results that share memory since the rewrite: with inputs, earlier results, or values read by backward.

        Exception: logits returned in full, or with a gradient, are not copied for backward's sake; autograd compares
        their version.
        """
        output, results, aliases = self.graph.output_node(), self._results(), Aliases(self.graph)
        earlier: set[int | str] = set()
        now = self._memory(aliases)
        saved = {
            at
            for at in self._newly_saved(aliases)
            if not is_wide(results[at]) or self._is_part(results[at], output.meta, at)
        }
        with self.graph.inserting_before(output):
            for group in dict.fromkeys(self._before.values()):
                places = [at for at in group if isinstance(at, int)]
                shared = frozenset().union(*(now[at] for at in places)) - group
                late = not group.isdisjoint(saved)
                if late or any(at in earlier or isinstance(at, str) for at in shared):
                    copies: dict[Node, Node] = {}
                    for at in places:
                        results[at] = self._copied(results[at], copies, fake_mode)
                earlier |= group
        output.args = (results[0] if isinstance(output.args[0], Node) else tuple(results),)

    def _is_part(self, node: Node, told: dict[str, Any], at: int) -> bool:
        """Whether it is a part of a larger value, without a gradient: autograd knows no view made by inductor."""
        found = value(node)
        if same(found.untyped_storage().nbytes(), found.numel() * found.element_size()):
            return False
        given = [n.meta.get("desc") for n in self.graph.find_nodes(op="placeholder")]
        tangents = [each.output for each in given if isinstance(each, TangentAOTInput)]
        described = told.get("desc") or ()
        return at < len(described) and described[at] not in tangents

    def _copied(self, node: Node, copies: dict[Node, Node], fake_mode: FakeTensorMode) -> Node:
        """The same views of a copy of the memory."""
        if node not in copies:
            bases = viewed_inputs(node)
            for base in bases:
                self._copied(base, copies, fake_mode)
            copies[node] = (
                self._view(node, copies, fake_mode) if bases else own_copy(self.graph, node)
            )
        return copies[node]

    def _view(self, node: Node, copies: dict[Node, Node], fake_mode: FakeTensorMode) -> Node:
        copy = self.graph.node_copy(node, lambda arg: copies.get(arg, arg))
        args, kwargs = map_arg((copy.args, copy.kwargs), value)
        copy.meta = {**node.meta, "val": result_of(fake_mode, copy.target, args, kwargs)}
        return copy

    def _results(self) -> list[Any]:
        returned = self.graph.output_node().args[0]
        return list(returned) if isinstance(returned, (list, tuple)) else [returned]

    def _newly_saved(self, aliases: Aliases) -> set[int]:
        """The positions of results that backward reads since the rewrite, other than through their former readers."""
        needed = ancestors(node for node in self.graph.nodes if is_backward(node))
        late = {
            at: {reader for reader in readers if is_backward(reader) or reader in needed}
            for at, readers in self._read(aliases).items()
        }
        return {
            at
            for at, before in self._readers.items()
            if late[at] - before and not any(map(is_backward, before))
        }

    def _read(self, aliases: Aliases) -> dict[int, set[Node]]:
        """The readers of the memory of each result that is no view of an input."""
        results = self._results()
        return {
            at: {user for alias in aliases.of(results[at]) for user in alias.users}
            for at, group in self._before.items()
            if all(isinstance(each, int) for each in group)
        }

    def _memory(self, aliases: Aliases) -> dict[int, frozenset[int | str]]:
        results = self._results()
        of_forward = {at: results[at] for at in self._places}
        found: dict[int, frozenset[int | str]] = {}
        for at, node in of_forward.items():
            shared = set(aliases.of(node))
            places = [other for other, result in of_forward.items() if result in shared]
            inputs = [each.name for each in shared if is_given(each)]
            found[at] = frozenset([*places, *inputs])
        return found
