"""Writes a gradient over the logits it was made from: `row_grad` becomes `row_grad_`, after partitioning only.

Entry points: `mark_inputs` on the joint graph, where it is still known who the inputs are and what is returned;
`inplace` on the backward graph. In a joint graph, a forward graph or an inference graph nothing is made in place (a
mutating operator in the joint graph lets the partitioner move its users into the forward: wrong gradients, silently).

A root may be overwritten if nobody can see it afterwards:

    a donated saved activation    torch says that only this graph has it
    made in this graph            and neither an output nor an alias of one
    the caller's own tensor       if `consume_logits`; never a leaf, never returned, never one of several wide inputs

and if, in this graph, no alias of it is read later (`graph/aliases.py`) and the gradient has its dtype and strides; see
NOTE [Readers of the logits must be kernels of their own].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from fx_passes.graph.aliases import Aliases, changed_inputs
from fx_passes.graph.facts import Size, value
from fx_passes.graph.operators import MATMULS
from fx_passes.graph.order import ancestors, descendants
from fx_passes.graph.user_lines import source_of
from fx_passes.torch_private import PlainAOTInput, statically_known_true

_INPUT = "slime_fused_input"
"""Meta key of a joint graph's placeholder: why the caller's tensor may not be overwritten, or "" if it may."""


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
    aliases = Aliases(graph)
    returned = {a for n in graph.output_node().all_input_nodes for a in aliases.of(n)}
    changed = changed_inputs(graph)
    for node in graph.find_nodes(op="placeholder"):
        place = node.meta.get("desc")
        if not isinstance(place, PlainAOTInput):
            continue
        node.meta[_INPUT] = held.get(place.idx, "")
        if node in changed:
            node.meta[_INPUT] = "the function changes them in place"
        elif node in returned:
            node.meta[_INPUT] = "they are returned to the caller"


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
            _overwrite(graph, node, _may_alias(graph, node, donated))
    return decisions


def _may_alias(graph: Graph, node: Node, donated: set[Node]) -> list[Node]:
    """Saved tensors that may share the caller's logits' memory at some later call, where the operator then refuses.

    None for logits that only this graph can see.
    """
    x = node.args[0]
    assert isinstance(x, Node), node
    given = [n for n in graph.find_nodes(op="placeholder") if n not in donated and n.users]
    if not any(Aliases(graph).share(n, x) for n in given):
        return []
    return [n for n in given if n is not x and isinstance(value(n), torch.Tensor)]


def _overwrite(graph: Graph, node: Node, others: list[Node]) -> None:
    x, terms, affine, index, weight, softmax, _, region = node.args
    assert isinstance(x, Node), node
    with graph.inserting_before(node):
        write = graph.call_function(
            torch.ops.slime_fused.row_grad_.default,
            (x, terms, affine, index, weight, softmax, region),
            {"others": others} if others else {},
        )
    write.meta = {**node.meta, "val": None}
    node.replace_all_uses_with(x)
    graph.erase_node(node)


# ---- the checks ---------------------------------------------------------------------------------------------------


def _check(graph: Graph, node: Node, donated: set[Node], consume_logits: bool) -> None:
    x = node.args[0]
    assert isinstance(x, Node), node
    aliases = Aliases(graph)
    _check_layout(x, node)
    _check_readers(graph, aliases, x, node)
    _check_owner(graph, aliases, x, donated, consume_logits)


def _check_layout(x: Node, node: Node) -> None:
    old, new = value(x), value(node)
    if old.dtype != new.dtype:
        raise _Refused(f"the gradient is {new.dtype}, the logits are {old.dtype}")
    if _same(old.stride(), new.stride()):
        return
    leaves_only = all(user.op == "output" for user in node.users)
    if not (leaves_only and non_overlapping(old)):
        raise _Refused(f"the logits have strides {list(old.stride())}, the gradient is contiguous")


def _same(left: Sequence[Size], right: Sequence[Size]) -> bool:
    return all(statically_known_true(a == b) for a, b in zip(left, right, strict=True))


def non_overlapping(logits: torch.Tensor) -> bool:
    """Every element has a place of its own, as far as the strides say for certain."""
    extent: Size = 1
    dims = [(d, s) for d, s in zip(logits.stride(), logits.shape, strict=True)]
    for stride, size in reversed(dims):
        if not statically_known_true(stride >= extent):
            return False
        extent = stride * size
    return True


# NOTE [Readers of the logits must be kernels of their own]
# Inductor does not compute an element-wise reader where it stands in the graph but where its result is needed, and it
# does not see that a custom operator writes over what is read (torch 2.13: tanh of the logits, used after `row_grad_`,
# came out as tanh of the gradient). So a reader must either be a kernel by itself, or be needed by `row_grad_` alone.


def is_kernel(node: Node) -> bool:
    target = node.target
    own = isinstance(target, torch._ops.OpOverload) and target.namespace == "slime_fused"
    return own or target in MATMULS


def _check_readers(graph: Graph, aliases: Aliases, x: Node, node: Node) -> None:
    order = {n: i for i, n in enumerate(graph.nodes)}
    before = ancestors([node])
    for alias in aliases.of(x):
        if alias is not x and alias in node.all_input_nodes:
            raise _Refused("the gradient's coefficients alias the logits")
        for user in alias.users:
            if user.op == "output":
                raise _Refused("the logits leave the backward graph")
            if user is node or aliases.only_views(user, x):
                continue
            if order[user] > order[node]:
                raise _Refused(f"the logits are read again at {source_of(user) or user.name}")
            if not is_kernel(user) and not descendants(user, node) <= before:
                raise _Refused(
                    f"the logits are read at {source_of(user) or user.name}, for later use"
                )


def _check_owner(
    graph: Graph, aliases: Aliases, x: Node, donated: set[Node], consume_logits: bool
) -> None:
    owners = [n for n in aliases.of(x) if n.op in ("placeholder", "get_attr")]
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


def _check_other_inputs(graph: Graph, aliases: Aliases, x: Node) -> None:
    """Two inputs may share storage at some later call; torch guards on that only where the forward mutates."""
    logits = value(x)
    for other in graph.find_nodes(op="placeholder"):
        wide = value(other)
        if other is x or not isinstance(wide, torch.Tensor) or _INPUT not in other.meta:
            continue
        if wide.dtype.is_floating_point and wide.dim() and other.users and _wide(wide, logits):
            raise _Refused("another input with the same vocabulary is read in backward")


def _wide(other: torch.Tensor, logits: torch.Tensor) -> bool:
    """Has a vocabulary: numbers per row may be as many, where rows outnumber it."""
    return other.dim() > 1 and not statically_known_true(other.shape[-1] < logits.shape[-1])
