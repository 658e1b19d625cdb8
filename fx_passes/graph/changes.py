"""The inputs a training graph changes in place: safe reads, and their time.

Entry points: `changes_of`, and `keep_out_of_backward` for the partitioner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fx_passes.graph.aliases import Aliases, changed_outside, own_copy, written_inputs
from fx_passes.graph.backward import is_joint
from fx_passes.graph.facts import is_backward, is_given, same_layout, value
from fx_passes.graph.order import computed
from fx_passes.refused import Refused

aten = torch.ops.aten

# NOTE [Logits that the graph changes]
# A joint graph is functional: an in-place change of an input is a new value, copied over the input at the end of
# forward or of backward. Backward runs after forward's copies, so a read of the input there (for example by `row_grad`)
# gets the values written by forward. Hence:
#
#     an input changed by forward,      may be read in forward only (`Changes.left`). `walk/left.py` replaces it by the
#     if backward does not need it      softmax written into it by forward
#     the same, if backward needs it,   is no root, nor is any value sharing its memory (`Changes.never`). The first
#     if it has aliases, or if torch    value computed from it is a root; no other code references that one
#     copies after forward
#     an input changed by backward      may be read everywhere: the copy is the last node of backward
#     only, without aliases
#
# The order of the graph puts each read before the copy: NOTE [Who reads an input reads it before it is written].
# An inference graph is forward alone and reads its inputs before the copy.
#
# The partitioner (torch 2.13) does not know this. It recomputes cheap values in backward, from the changed input, and
# the gradient is wrong, also in a graph without any rewrite. So forward's readers of such inputs are saved.


@dataclass(frozen=True)
class Changes:
    """The inputs a joint graph changes.

    Attributes:
        never: values that are different in backward.
        left: inputs readable in forward only, each with the value that forward writes into it.
        aliases: for each input in `left`, all values that may share its memory.
    """

    never: frozenset[Node] = frozenset()
    left: Mapping[Node, Node] = field(default_factory=dict)
    aliases: Mapping[Node, frozenset[Node]] = field(default_factory=dict)

    @property
    def in_forward(self) -> frozenset[Node]:
        """All values that are different in backward, readable in forward or not."""
        return self.never.union(*self.aliases.values())

    def without(self, inputs: Iterable[Node]) -> Changes:
        """`inputs` are read in backward after all."""
        gone = frozenset(inputs)
        never = self.never.union(*(self.aliases[node] for node in gone))
        return replace(
            self, never=never, left={k: v for k, v in self.left.items() if k not in gone}
        )


def changes_of(graph: Graph) -> Changes:
    """Nothing in a graph without a backward."""
    if not is_joint(graph):
        return Changes()
    writes: dict[Node, list[Node]] = {}
    late = set()
    for node in graph.nodes:
        for written in written_inputs(node):
            if is_backward(node):
                late.add(written)
            else:
                writes.setdefault(written, []).append(node)
    outside = changed_outside(graph)
    if not writes and not late and not outside:
        return Changes()
    aliases = Aliases(graph)
    memory = {written: frozenset(aliases.of(written)) for written in (*writes, *late)}
    left, never = {}, {alias for node in outside for alias in aliases.of(node)}
    for written, shared in memory.items():
        aliased = sum(is_given(n) for n in shared) > 1
        early = [write for alias in shared for write in writes.get(alias, ())]
        final = _left_in(written, early) if early else None
        if aliased or shared & outside or (early and final is None):
            never |= shared
        elif final is not None:
            left[written] = final
    return Changes(frozenset(never), left, {written: memory[written] for written in left})


def keep_out_of_backward(graph: Graph) -> None:
    """Values computed from inputs changed by forward are saved, not recomputed from the changed input.

    Backward itself reads a copy, made in forward.
    """
    changed = changes_of(graph).in_forward
    readers = {user for node in changed for user in node.users if _computes(user)} - changed
    if not readers:
        return
    if readers - computed(graph, {}, forward=True):
        readers = _read_copies(graph, [n for n in changed if is_given(n)])
        graph.lint()
        for copy in readers - computed(graph, {}, forward=True):
            # the partitioner runs in forward only nodes needed by forward
            if any(user.meta.get("slime_fused") for user in copy.users):
                raise Refused("only backward reads an input, and forward changes it")
    for reader in _with_own_copies(graph, readers):
        reader.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _read_copies(graph: Graph, inputs: list[Node]) -> set[Node]:
    """Copies of `inputs`, for all their readers."""
    copies = set()
    *_, last = graph.find_nodes(op="placeholder")
    for node in inputs:
        readers = [user for user in node.users if _computes(user)]
        with graph.inserting_after(last if node.op == "placeholder" else node):
            copy = own_copy(graph, node)
        for user in readers:
            user.replace_input_with(node, copy)
        copies.add(copy)
    return copies


def _with_own_copies(graph: Graph, readers: set[Node]) -> set[Node]:
    """The readers; clones among them become copies that inductor keeps."""
    for clone in [node for node in readers if node.target is aten.clone.default]:
        source = clone.all_input_nodes[0]
        if not same_layout(value(clone), value(source)):
            continue
        with graph.inserting_before(clone):
            copy = own_copy(graph, source)
        clone.replace_all_uses_with(copy)
        graph.erase_node(clone)
        readers = readers - {clone} | {copy}
    return readers


def _computes(node: Node) -> bool:
    return node.op == "call_function" and node.target is not aten.copy_.default


def _left_in(node: Node, writes: list[Node]) -> Node | None:
    """The value written by forward's only write of an input, if it overwrites all of it."""
    if len(writes) != 1 or node.op != "placeholder":
        return None
    (write,) = writes
    final = write.args[1] if write.target is aten.copy_.default else None
    return final if isinstance(final, Node) else None
