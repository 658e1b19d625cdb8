"""Writes a gradient over the logits it was made from: `row_grad` becomes `row_grad_`, after partitioning only.

Entry points: `mark_inputs` on the joint graph, where it is still known who the inputs are and what is returned;
`inplace` on the backward graph. In a joint graph, a forward graph or an inference graph nothing is made in place (a
mutating operator in the joint graph lets the partitioner move its users into the forward: wrong gradients, silently).

A root may be overwritten if nobody can see it afterwards:

    a donated saved activation    torch says that only this graph has it
    made in this graph            and neither an output nor an alias of one
    the caller's own tensor       if `consume_logits`; never a leaf, never returned, never one of several wide inputs

and if, in this graph, no alias of it is read later and the gradient has its dtype and strides (see NOTE [Readers of
the logits must be kernels of their own]). The check is by storage
and by the operators' own alias declarations; that a user wrote `clone()` proves nothing.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTInput
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.multiprocessing.reductions import StorageWeakRef

from fx_passes.graph.user_lines import source_of

aten = torch.ops.aten

_INPUT = "slime_fused_input"
"""Meta key of a joint graph's placeholder: why the caller's tensor may not be overwritten, or "" if it may."""

_VIEWS_UNDECLARED = {aten._unsafe_view.default, aten.lift_fresh.default}


@dataclasses.dataclass(frozen=True)
class Decision:
    """One gradient: its node, the user's `file:line`, whether it was put in place, and the reason if not."""

    node: str
    source: str
    in_place: bool
    reason: str


class _Refused(Exception):
    """Why a gradient stays out of place; never leaves this module."""


def mark_inputs(graph: Graph, held: dict[int, str]) -> None:
    """Notes on the placeholders of a joint graph whether backward may write over them.

    Args:
        held: inputs that may not be overwritten, by their position, and why ("they are a leaf", ...).
    """
    aliases = _Aliases(graph)
    returned = {aliases.root(n) for n in graph.output_node().all_input_nodes}
    changed = changed_inputs(graph)
    for node in graph.find_nodes(op="placeholder"):
        place, root = node.meta.get("desc"), aliases.root(node)
        if not isinstance(place, PlainAOTInput):
            continue
        node.meta[_INPUT] = held.get(place.idx, "")
        if node in changed:
            node.meta[_INPUT] = "the function changes them in place"
        elif root in returned:
            node.meta[_INPUT] = "they are returned to the caller"


def changed_inputs(graph: Graph) -> set[Node]:
    """The inputs that a joint or inference graph changes in place, and every value that may share their memory.

    Whoever reads one of these later than forward finds what forward has written there.
    """
    aliases = _Aliases(graph)
    described = graph.output_node().meta.get("desc") or ()
    updated = {d.mutated_input for d in described if isinstance(d, InputMutationAOTOutput)}
    roots = {aliases.root(n) for each in graph.nodes for n in _written(each)}
    roots |= {
        aliases.root(n) for n in graph.find_nodes(op="placeholder") if n.meta.get("desc") in updated
    }
    return {node for root in roots for node in aliases.members(root)}


def inplace(graph: Graph, donated: set[Node], consume_logits: bool) -> list[Decision]:
    """Rewrites each `row_grad` of a backward graph that may write over its root.

    Args:
        donated: placeholders that only this graph can see.
        consume_logits: the caller lets us overwrite logits that are inputs of the compiled function.
    """
    decisions = []
    for node in graph.find_nodes(op="call_function", target=torch.ops.slime_fused.row_grad.default):
        reason = ""
        try:
            _check(graph, node, donated, consume_logits)
        except _Refused as refused:
            reason = str(refused)
        decisions.append(Decision(node.name, source_of(node), not reason, reason))
        if not reason:
            _overwrite(graph, node)
    return decisions


def _overwrite(graph: Graph, node: Node) -> None:
    x, terms, affine, index, weight, softmax, _, region = node.args
    assert isinstance(x, Node), node
    with graph.inserting_before(node):
        write = graph.call_function(
            torch.ops.slime_fused.row_grad_.default,
            (x, terms, affine, index, weight, softmax, region),
        )
    write.meta = {**node.meta, "val": None}
    node.replace_all_uses_with(x)
    graph.erase_node(node)


# ---- the checks ---------------------------------------------------------------------------------------------------


def _check(graph: Graph, node: Node, donated: set[Node], consume_logits: bool) -> None:
    x = node.args[0]
    assert isinstance(x, Node), node
    aliases = _Aliases(graph)
    _check_layout(x, node)
    _check_readers(graph, aliases, x, node)
    _check_owner(graph, aliases, x, donated, consume_logits)


def _check_layout(x: Node, node: Node) -> None:
    old, new = x.meta["val"], node.meta["val"]
    if old.dtype != new.dtype:
        raise _Refused(f"the gradient is {new.dtype}, the logits are {old.dtype}")
    if _same(old.stride(), new.stride()):
        return
    leaves_only = all(user.op == "output" for user in node.users)
    if not (leaves_only and _non_overlapping(old)):
        raise _Refused(f"the logits have strides {list(old.stride())}, the gradient is contiguous")


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return all(statically_known_true(a == b) for a, b in zip(left, right, strict=True))


def _non_overlapping(value: torch.Tensor) -> bool:
    """Every element has a place of its own, as far as the strides say for certain."""
    extent: Any = 1
    dims = [(d, s) for d, s in zip(value.stride(), value.shape, strict=True)]
    for stride, size in reversed(dims):
        if not statically_known_true(stride >= extent):
            return False
        extent = stride * size
    return True


# NOTE [Readers of the logits must be kernels of their own]
# Inductor does not compute an element-wise reader where it stands in the graph but where its result is needed, and it
# does not see that a custom operator writes over what is read (torch 2.13: tanh of the logits, used after `row_grad_`,
# came out as tanh of the gradient). So a reader must either be a kernel by itself, or be needed by `row_grad_` alone.

_MATMULS = {aten.mm.default, aten.addmm.default, aten.bmm.default}


def _is_kernel(node: Node) -> bool:
    target = node.target
    own = isinstance(target, torch._ops.OpOverload) and target.namespace == "slime_fused"
    return own or target in _MATMULS


def _check_readers(graph: Graph, aliases: "_Aliases", x: Node, node: Node) -> None:
    root = aliases.root(x)
    order = {n: i for i, n in enumerate(graph.nodes)}
    before = _ancestors(node)
    for alias in aliases.members(root):
        if alias is not x and alias in node.all_input_nodes:
            raise _Refused("the gradient's coefficients alias the logits")
        for user in alias.users:
            if user.op == "output":
                raise _Refused("the logits leave the backward graph")
            if user is node or aliases.only_views(user, root):
                continue
            if order[user] > order[node]:
                raise _Refused(f"the logits are read again at {source_of(user) or user.name}")
            if not _is_kernel(user) and not _reached(user, node) <= before:
                raise _Refused(
                    f"the logits are read at {source_of(user) or user.name}, for later use"
                )


def _ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    waiting = [node]
    while waiting:
        new = set(waiting.pop().all_input_nodes) - found
        found |= new
        waiting += new
    return found


def _reached(start: Node, stop: Node) -> set[Node]:
    """What is computed from `start` other than through `stop`."""
    found = {start}
    waiting = [start]
    while waiting:
        new = set(waiting.pop().users) - found - {stop}
        found |= new
        waiting += new
    return found


def _check_owner(
    graph: Graph, aliases: "_Aliases", x: Node, donated: set[Node], consume_logits: bool
) -> None:
    root = aliases.root(x)
    owners = [n for n in aliases.members(root) if n.op in ("placeholder", "get_attr")]
    if len(owners) > 1:
        raise _Refused("two saved tensors share the storage of the logits")
    if not owners or owners[0] in donated:
        return
    reason = owners[0].meta.get(_INPUT)
    if reason is None:
        raise _Refused("the saved logits alias a value that the caller can see")
    if not consume_logits:
        raise _Refused(
            "the logits are an input of the compiled function; "
            "options={'consume_logits': True} lets the gradient take their place"
        )
    if reason:
        raise _Refused(f"the logits are an input and {reason}")
    if owners[0] is not x:
        raise _Refused("only a view of the caller's logits is used, which autograd could not watch")
    _check_other_inputs(graph, aliases, x)


def _check_other_inputs(graph: Graph, aliases: "_Aliases", x: Node) -> None:
    """Two inputs may share storage at some later call; torch guards on that only where the forward mutates."""
    value = x.meta["val"]
    for other in graph.find_nodes(op="placeholder"):
        wide = other.meta.get("val")
        if other is x or not isinstance(wide, torch.Tensor) or _INPUT not in other.meta:
            continue
        if wide.dtype.is_floating_point and wide.dim() and other.users and _wide(wide, value):
            raise _Refused("another input with the same vocabulary is read in backward")


def _wide(other: torch.Tensor, value: torch.Tensor) -> bool:
    """Has a vocabulary: numbers per row may be as many, where rows outnumber it."""
    return other.dim() > 1 and not statically_known_true(other.shape[-1] < value.shape[-1])


# ---- aliases ------------------------------------------------------------------------------------------------------


class _Aliases:
    """Which values of a graph may share storage: joined by view operators, and by the storage of their fake values."""

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[Node, Node] = {n: n for n in graph.nodes}
        by_storage: dict[StorageWeakRef, Node] = {}
        for node in graph.nodes:
            for base in _viewed(node):
                self._join(base, node)
            for storage in _storages(node):
                self._join(by_storage.setdefault(storage, node), node)
        self._members: dict[Node, list[Node]] = {}
        for node in graph.nodes:
            self._members.setdefault(self.root(node), []).append(node)

    def root(self, node: Node) -> Node:
        while self._parent[node] is not node:
            node = self._parent[node]
        return node

    def members(self, root: Node) -> list[Node]:
        return self._members[root]

    def only_views(self, user: Node, root: Node) -> bool:
        """Makes nothing but another alias, whose own readers are looked at by themselves."""
        return self.root(user) is root and bool(_viewed(user))

    def _join(self, left: Node, right: Node) -> None:
        self._parent[self.root(right)] = self.root(left)


def _storages(node: Node) -> Iterator[StorageWeakRef]:
    value = node.meta.get("val")
    for each in value if isinstance(value, list | tuple) else (value,):
        if isinstance(each, torch.Tensor) and each.layout is torch.strided:
            yield StorageWeakRef(each.untyped_storage())


def _viewed(node: Node) -> list[Node]:
    """The inputs that the value of `node` may be a view of."""
    if node.op != "call_function":
        return []
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return list(node.all_input_nodes)  # getitem, higher-order operators: taken for views
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


def _written(node: Node) -> list[Node]:
    """The inputs that `node` mutates."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    arguments = zip(node.target._schema.arguments, node.args, strict=False)
    written = [a for s, a in arguments if s.alias_info is not None and s.alias_info.is_write]
    return [a for a in written if isinstance(a, Node)]


def _converts_nothing(node: Node) -> bool:
    """A conversion to the dtype that is there already may hand its input on."""
    if node.target is not torch.ops.prims.convert_element_type.default:
        return False
    source = node.args[0]
    return isinstance(source, Node) and source.meta["val"].dtype == node.args[1]
