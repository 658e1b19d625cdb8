"""Lets a gradient overwrite the logits it was computed from: `row_grad` becomes another operator.

Entry points: `mark_inputs` on the joint graph, whose inputs and results are still known; `inplace` on the backward
graph. Nothing becomes in-place in a joint graph, a forward graph or an inference graph (with a mutating operator in the
joint graph the partitioner may move its users into forward: wrong gradients, silently).

    the logits are              the operator     it overwrites them
    computed in this graph      row_grad_        always
    overwritten with it anyway  row_grad_        always: the program works in place in backward (slime's entropy)
    saved, donated              row_grad_over    unless the graph is retained, or code has read what autograd saved
    the caller's own            row_grad_over    consume_logits=True: unless the graph is retained
    visible to the caller       row_grad_over    consume_logits="auto": if nothing else references them at that moment

Torch calls saved logits without other references a donated activation. Never overwritten are: outputs of this graph,
inputs changed by the function, a leaf, logits with an alias read later in this graph (`graph/aliases.py`), and logits
of another dtype or other strides than the gradient's. See NOTE [Readers of the logits] and NOTE [What is decided at run
time].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any, Literal

import torch
from torch.fx import Graph, Node

from fx_passes.graph.aliases import Aliases, changed_inputs
from fx_passes.graph.facts import Size, byte_count, is_given, same, same_layout, value
from fx_passes.graph.operators import MATMULS
from fx_passes.graph.order import ancestors, descendants
from fx_passes.graph.user_lines import source_of
from fx_passes.refused import Refused
from fx_passes.rows.program import wide_results
from fx_passes.torch_private import PlainAOTInput, statically_known_true

aten = torch.ops.aten

_INPUT = "slime_fused_input"
"""Meta key of a joint graph's placeholder: why the caller's tensor may not be overwritten, or "" if it may."""

_CHANGED = "the function changes them in place"


Consume = Literal["auto", True, False]
"""May the gradient overwrite logits passed in? "auto": if nothing else references them."""

Owner = Literal["", "graph", "caller", "anyone"]
"""The owner of the logits, as an argument of `row_grad_over`; "" if the operator needs none."""

# NOTE [What is decided at run time]
# `row_grad_over` decides at each call whether its result is the logits' memory or new memory; the values are equal. For
# torch it is a function that changes no input. A declared mutation would make torch copy: functionalization, aligned
# and static inputs copy the result back over the logits, also if the operator has not touched them. So only data
# dependencies order it: the operator must depend on every reader of the logits, or get it in `after`. And inductor must
# not reuse the memory of its inputs: a graph with decisions at run time has no donated inputs
# (`slime_compile/backend/passes.py`).


@dataclasses.dataclass(frozen=True)
class Decision:
    """One gradient.

    Attributes:
        node: its name.
        source: the user's `file:line`.
        in_place: whether it overwrites the logits; with an `owner`, at run time.
        reason: the reason against it.
        owner: the decision left to run time: "" none, the others as in the table above.
    """

    node: str
    source: str
    in_place: bool
    reason: str
    owner: Owner = ""


def mark_inputs(graph: Graph, held: dict[int, str]) -> None:
    """Notes on the placeholders of a joint graph whether backward may overwrite them.

    Args:
        held: inputs that must not be overwritten, by position, and the reason ("they are a leaf", ...).
    """
    aliases = Aliases(graph)
    returned = aliases.of_outputs(graph)
    changed = changed_inputs(graph)
    for node in graph.find_nodes(op="placeholder"):
        place = node.meta.get("desc")
        if not isinstance(place, PlainAOTInput):
            continue
        node.meta[_INPUT] = held.get(place.idx, "")
        if node in changed:
            node.meta[_INPUT] = _CHANGED
        elif node in returned:
            node.meta[_INPUT] = "they are returned to the caller"


def inplace(
    graph: Graph,
    donated: set[Node],
    consume_logits: Consume,
    recorded: bool = False,
    beside: Collection[Node] = (),
) -> list[Decision]:
    """Rewrites each `row_grad` of a backward graph that may overwrite its root.

    Args:
        donated: placeholders referenced by this graph alone.
        consume_logits: may the gradient overwrite logits that are inputs of the compiled function?
        recorded: the graph is recorded and replayed without calling its operators (CUDA graphs).
        beside: gradients to leave unchanged.
    """
    decisions: list[Decision] = []
    writers = (torch.ops.slime_fused.row_grad.default, torch.ops.slime_fused.row_loop.default)
    every = [node for node in graph.nodes if node.target in writers and node not in beside]
    gradients = [gradient for node in every for gradient in _gradients_of(node)]
    if not gradients:
        return decisions
    aliases = Aliases(graph)
    for gradient in gradients:
        node = gradient.node
        if not gradient.of_loop and _write_over(graph, aliases, node):
            continue
        reason = ""
        owner: Owner = ""
        after: list[Node] = []
        try:
            owner, after = _check(graph, aliases, gradient, donated, consume_logits)
            if gradient.of_loop and not owner:
                continue  # the graph owns its memory, and inductor reuses it
            if recorded and owner == "graph":
                owner = ""  # and torch refuses to retain the graph
            elif recorded and owner:
                raise Refused("CUDA graphs are recorded, and nothing can be decided at run time")
        except Refused as refused:
            reason, owner = str(refused), ""
        decisions.append(Decision(node.name, source_of(node), not reason, reason, owner))
        if not reason:
            aliases.replaced(node, gradient.rewritten(graph, owner, after))
    return decisions


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """The result of `node` may overwrite `x`, an operand of it.

    Attributes:
        over: for a loop, the position of x among its tensors with rows, and that of the result.
    """

    node: Node
    x: Node
    over: tuple[int, int] = (-1, -1)

    @property
    def of_loop(self) -> bool:
        return self.over[0] >= 0

    def rewritten(self, graph: Graph, owner: Owner, after: list[Node]) -> Node:
        if not self.of_loop:
            return _rewrite(graph, self.node, owner, after)
        return _rewrite_loop(graph, self, owner, after)


def _gradients_of(node: Node) -> list[_Gradient]:
    """For a loop over rows, the first result with the layout of the largest value it reads: the logits."""
    if node.target is torch.ops.slime_fused.row_grad.default:
        return [_Gradient(node, node.args[0])]  # type: ignore[arg-type]
    rows: Any = node.args[0]
    columns, results = wide_results(node.args[3])  # type: ignore[arg-type]
    largest = max(map(byte_count, rows))
    for result, wide in enumerate(value(node)):
        for at, x in enumerate(rows):
            own = value(x)
            if (
                result in results
                and rows.count(x) == 1
                and same(own.shape[-1], columns)
                and byte_count(x) == largest
                and own.dtype == wide.dtype
                and _is_same_memory(own, wide)
            ):
                return [_Gradient(node, x, (at, result))]
    return []


def _is_same_memory(x: torch.Tensor, made: torch.Tensor) -> bool:
    """Rows of both lie in memory alike: x is [rows..., V], without gaps, and the result [N, V]."""
    alike = made.dim() == 2 and x.dim() > 1 and x.is_contiguous()
    return (
        alike
        and statically_known_true(x.shape[-1] == made.shape[-1])
        and (statically_known_true(x.numel() == made.numel()))
    )


def _rewrite_loop(graph: Graph, gradient: _Gradient, owner: Owner, after: list[Node]) -> Node:
    node, x, at = gradient.node, gradient.x, gradient.over[0]
    rows, whole, sizes, program, compiled, chunk, region = node.args
    others = _others(graph, x) if owner == "caller" else []
    beside = [each for number, each in enumerate(rows) if number != at]  # type: ignore[arg-type]
    with graph.inserting_before(node):
        write = graph.call_function(
            torch.ops.slime_fused.row_loop_over.default,
            (x, beside, whole, sizes, program, compiled, chunk, list(gradient.over), owner, region),
            {**({"others": others} if others else {}), **({"after": after} if after else {})},
        )
    write.meta = dict(node.meta)
    node.replace_all_uses_with(write)
    graph.erase_node(node)
    return write


def _write_over(graph: Graph, aliases: Aliases, node: Node) -> bool:
    """Merges `node` and the copy of its result over its own logits, if the result has no other use."""
    x, copy = node.args[0], next(iter(node.users), node)
    assert isinstance(x, Node), node
    over = copy.target is aten.copy_.default and copy.args[0] is x
    if not over or copy.users or len(node.users) > 1:
        return False
    copy.prepend(node)
    try:
        _check_layout(x, node)
        _check_readers(aliases, x, node, copy)
    except Refused:
        return False
    graph.erase_node(copy)
    aliases.replaced(node, _rewrite(graph, node, "", []))
    return True


def _rewrite(graph: Graph, node: Node, owner: Owner, after: list[Node]) -> Node:
    """Puts the operator in the place of `node`; the gradient from now on."""
    x, terms, affine, index, weight, softmax, _, region = node.args
    assert isinstance(x, Node), node
    if not owner:
        with graph.inserting_before(node):
            write = graph.call_function(
                torch.ops.slime_fused.row_grad_.default,
                (x, terms, affine, index, weight, softmax, region),
            )
        write.meta = {**node.meta, "val": None}
        gradient = x
    else:
        others = _others(graph, x) if owner == "caller" else []
        with graph.inserting_before(node):
            write = graph.call_function(
                torch.ops.slime_fused.row_grad_over.default,
                (x, terms, affine, index, weight, softmax, owner, region),
                {
                    **({"others": others} if others else {}),
                    **({"after": after} if after else {}),
                    **({} if same_layout(value(x), value(node)) else {"strided": True}),
                },
            )
        write.meta = dict(node.meta)
        gradient = write
    node.replace_all_uses_with(gradient)
    graph.erase_node(node)
    return gradient


def _others(graph: Graph, x: Node) -> list[Node]:
    """Saved tensors that may share the memory of the caller's logits at some later call; the operator then refuses."""
    given = graph.find_nodes(op="placeholder")
    return [n for n in given if n is not x and n.users and isinstance(value(n), torch.Tensor)]


# ---- the checks ---------------------------------------------------------------------------------------------------


def _check(
    graph: Graph, aliases: Aliases, gradient: _Gradient, donated: set[Node], consume_logits: Consume
) -> tuple[Owner, list[Node]]:
    """The owner of the logits, see `Owner`; for a decision at run time, also the nodes that must run before."""
    x, node = gradient.x, gradient.node
    if not gradient.of_loop:
        _check_layout(x, node)
    _check_readers(aliases, x, node)
    owner = _owner(graph, aliases, x, donated, consume_logits)
    return owner, list(_unordered(aliases, x, node)) if owner else []


def _check_layout(x: Node, node: Node) -> None:
    old, new = value(x), value(node)
    if old.dtype != new.dtype:
        raise Refused(f"the gradient is {new.dtype}, the logits are {old.dtype}")
    if same_layout(value(x), value(node)):
        return
    leaves_only = all(user.op == "output" for user in node.users)
    if not (leaves_only and _non_overlapping(old)):
        raise Refused(f"the logits have strides {list(old.stride())}, the gradient is contiguous")


def _non_overlapping(logits: torch.Tensor) -> bool:
    """Every element has a place of its own, as far as the strides say for certain."""
    extent: Size = 1
    dims = [(d, s) for d, s in zip(logits.stride(), logits.shape, strict=True)]
    for stride, size in reversed(dims):
        if statically_known_true(size == 1):
            continue
        if not statically_known_true(stride >= extent):
            return False
        extent = stride * size
    return True


# NOTE [Readers of the logits]
# Inductor does not compute an element-wise reader at its place in the graph but where its result is needed, and it
# does not see that a custom operator overwrites the reader's input (torch 2.13: tanh of the logits, used after
# `row_grad_`, came out as tanh of the gradient). So a reader must be a separate kernel, or only the gradient may need
# it.


def _is_kernel(node: Node) -> bool:
    target = node.target
    own = isinstance(target, torch._ops.OpOverload) and target.namespace == "slime_fused"
    return own or target in MATMULS


def _check_readers(aliases: Aliases, x: Node, node: Node, copy: Node | None = None) -> None:
    for alias in aliases.of(x):
        if alias is not x and alias in node.all_input_nodes:
            raise Refused("the gradient's coefficients alias the logits")
        for user in alias.users:
            if user.op == "output":
                raise Refused("the logits leave the backward graph")
            if user in (node, copy) or aliases.only_views(user, x):
                continue
            if user > node:
                raise Refused(f"the logits are read again at {source_of(user) or user.name}")
            if not _is_kernel(user) and not descendants([user], node) <= ancestors([node]):
                raise Refused(
                    f"the logits are read at {source_of(user) or user.name}, for later use"
                )


def _unordered(aliases: Aliases, x: Node, node: Node) -> Iterator[Node]:
    """Results of readers of the logits on which the gradient does not depend: if they exist, the readers have run."""
    users = dict.fromkeys(user for alias in aliases.of(x) for user in alias.users)
    readers = [user for user in users if user is not node and not aliases.only_views(user, x)]
    before = ancestors([node]) if readers else set()
    for reader in readers:
        if reader in before:
            continue
        results = [r for r in (reader, *reader.users) if isinstance(value(r), torch.Tensor)]
        if not results:
            raise Refused(f"the logits are read at {source_of(reader) or reader.name}")
        yield results[0]


def _owner(
    graph: Graph, aliases: Aliases, x: Node, donated: set[Node], consume_logits: Consume
) -> Owner:
    owners = [n for n in aliases.of(x) if is_given(n)]
    if len(owners) > 1:
        raise Refused("two saved tensors share the storage of the logits")
    if not owners:
        return ""
    if owners[0] in donated:
        return "graph"
    if consume_logits == "auto" and owners[0].op == "placeholder":
        return _anyone(owners[0], x)
    _check_consumed(owners[0], x, bool(consume_logits))
    _check_other_inputs(graph, aliases, x)
    return "caller"


def _anyone(owner: Node, x: Node) -> Owner:
    if owner.meta.get(_INPUT) == _CHANGED:
        raise Refused(f"the logits are an input and {_CHANGED}")
    if owner is not x:
        raise Refused("only a view of the logits is used, and its references cannot be counted")
    return "anyone"


def _check_consumed(owner: Node, x: Node, consume_logits: bool) -> None:
    """The caller's own, with permission."""
    reason = owner.meta.get(_INPUT)
    if reason is None:
        raise Refused("the saved logits alias a value the caller can see")
    if not consume_logits:
        raise Refused(
            "the logits are an input of the compiled function; "
            "options={'consume_logits': True} lets the gradient overwrite them"
        )
    if reason:
        raise Refused(f"the logits are an input and {reason}")
    if owner is not x:
        raise Refused("only a view of the caller's logits is used, and autograd does not check it")


def _check_other_inputs(graph: Graph, aliases: Aliases, x: Node) -> None:
    """Two inputs may share storage at some later call; torch guards on that only if forward mutates one of them."""
    logits = value(x)
    for other in graph.find_nodes(op="placeholder"):
        wide = value(other)
        if other is x or not isinstance(wide, torch.Tensor) or _INPUT not in other.meta:
            continue
        if wide.dtype.is_floating_point and wide.dim() and other.users and _wide(wide, logits):
            raise Refused("another input with the same vocabulary is read in backward")


def _wide(other: torch.Tensor, logits: torch.Tensor) -> bool:
    """May have a vocabulary. Numbers per row can be equally many if there are more rows than columns."""
    return other.dim() > 1 and not statically_known_true(other.shape[-1] < logits.shape[-1])
