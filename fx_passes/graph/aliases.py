"""Values of a graph with shared memory, and the inputs a graph changes.

Storages and the operators' own alias declarations decide; `clone()` in the user's code proves nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node
from torch.multiprocessing.reductions import StorageWeakRef

from fx_passes.graph.facts import value
from fx_passes.torch_private import InputMutationAOTOutput

aten = torch.ops.aten

_VIEWS_UNDECLARED = {aten._unsafe_view.default, aten.lift_fresh.default}


def changed_inputs(graph: Graph) -> set[Node]:
    """The inputs that a joint or inference graph changes in place, and every value that may share their memory.

    After forward these hold the values written by forward.
    """
    written = {n for each in graph.nodes for n in written_inputs(each)} | changed_outside(graph)
    if not written:
        return set()
    aliases = Aliases(graph)
    return {alias for node in written for alias in aliases.of(node)}


def changed_outside(graph: Graph) -> set[Node]:
    """Inputs overwritten by torch after forward: their new value is an output."""
    described = graph.output_node().meta.get("desc") or ()
    updated = {each.mutated_input for each in described if isinstance(each, InputMutationAOTOutput)}
    return {n for n in graph.find_nodes(op="placeholder") if n.meta.get("desc") in updated}


class Aliases:
    """Groups of values with possibly shared storage, by view operators and by the storage of their fake values."""

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[Node, Node] = {n: n for n in graph.nodes}
        by_storage: dict[StorageWeakRef, Node] = {}
        for node in graph.nodes:
            for base in viewed_inputs(node):
                self._join(base, node)
            for storage in () if _makes_several(node) else _storages(node):
                self._join(by_storage.setdefault(storage, node), node)
        self._members: dict[Node, list[Node]] = {}
        for node in graph.nodes:
            self._members.setdefault(self._memory(node), []).append(node)

    def of(self, node: Node) -> list[Node]:
        """All values that may share memory with `node`, itself included, in the order of the graph."""
        return self._members.get(self._memory(node), [node])

    def of_outputs(self, graph: Graph) -> set[Node]:
        """All values that may share memory with an output of the graph."""
        return {alias for node in graph.output_node().all_input_nodes for alias in self.of(node)}

    def replaced(self, old: Node, new: Node) -> None:
        """`new` has replaced `old`, which has been erased from the graph."""
        together = {*self.of(old), *self.of(new)} - {old}
        for node in (old, new):
            self._members.pop(self._memory(node), None)
        self._join(old, new)
        self._members[self._memory(new)] = sorted(together)

    def share(self, left: Node, right: Node) -> bool:
        return self._memory(left) is self._memory(right)

    def only_views(self, user: Node, node: Node) -> bool:
        """`user` is only another alias of `node`; the readers of that alias are checked separately."""
        return self.share(user, node) and bool(viewed_inputs(user))

    def _memory(self, node: Node) -> Node:
        """One representative of all nodes that may share memory."""
        parent = self._parent
        while parent.setdefault(node, node) is not node:  # a new node has memory of its own
            parent[node] = node = parent[parent[node]]
        return node

    def _join(self, left: Node, right: Node) -> None:
        self._parent[self._memory(right)] = self._memory(left)


def _storages(node: Node) -> Iterator[StorageWeakRef]:
    found = value(node)
    for each in found if isinstance(found, list | tuple) else (found,):
        if isinstance(each, torch.Tensor) and each.layout is torch.strided:
            yield StorageWeakRef(each.untyped_storage())


def viewed_inputs(node: Node) -> list[Node]:
    """The inputs of which the value of `node` may be a view."""
    if node.op != "call_function":
        return []
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        if target is operator.getitem and _makes_several(node.all_input_nodes[0]):
            return []
        return list(node.all_input_nodes)  # getitem, higher-order operators: treated as views
    if target in _VIEWS_UNDECLARED or _converts_nothing(node):
        return list(node.all_input_nodes)
    if not any(r.alias_info is not None for r in target._schema.returns):
        return []
    declared = [a.alias_info is not None for a in target._schema.arguments]
    given = [a for a, viewed in zip(node.args, declared, strict=False) if viewed]
    return [
        n
        for a in given
        for n in (a if isinstance(a, list | tuple) else (a,))
        if isinstance(n, Node)
    ]


def own_copy(graph: Graph, node: Node) -> Node:
    """A copy of `node` at the insertion point: its maximum with itself, because inductor removes many clones."""
    copy = graph.call_function(aten.maximum.default, (node, node))
    # an input's meta describes the input, and that the graph changes it
    told = {} if node.op == "placeholder" else node.meta
    copy.meta = {**told, "val": value(node).clone()}
    return copy


def _makes_several(node: Node) -> bool:
    """An operator with several results, each in new memory."""
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(
        value(node), tuple | list
    ):
        return False
    return not any(r.alias_info is not None for r in node.target._schema.returns)


def written_inputs(node: Node) -> list[Node]:
    """The inputs mutated by `node`."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    arguments = zip(node.target._schema.arguments, node.args, strict=False)
    written = [a for s, a in arguments if s.alias_info is not None and s.alias_info.is_write]
    return [a for a in written if isinstance(a, Node)]


def _converts_nothing(node: Node) -> bool:
    """A conversion to the same dtype may return its input."""
    if node.target is not torch.ops.prims.convert_element_type.default:
        return False
    source = node.args[0]
    return isinstance(source, Node) and source.meta["val"].dtype == node.args[1]
