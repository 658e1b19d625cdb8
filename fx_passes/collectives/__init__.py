"""Fewer collectives: the row-level all-reduces of a vocabulary-parallel loss become one all-gather.

Entry point: `merge`, over a graph with fused softmaxes. A rank's addend to an all-reduce is a function of a few row
values of its own (maximum, log-sum, mean, target logit) and of earlier results. So the ranks exchange those row values
once. Every rank then computes every rank's addends, and reduces them in rank order:

    all_reduce(f(own, earlier results))   ->   reduce_r f(gathered[r], earlier results)

NOTE [The same on all ranks]
The merged all-reduces and the order of the gathered values must be equal on all ranks. They follow from the structure
of the forward graph. Row values and numbers in f may differ between ranks: row values are gathered, and a number
written by the user in f prevents the merge. Nothing that differs between ranks decides (test_same_on_all_ranks.py
compares ranks with different values of each):

    columns of the shard, min_vocab   a value reduced over its columns for an all-reduce is a vocabulary, however narrow
                                      (`widths.py`)
    as many rows as columns           a value reduced over its columns, and values computed from it in the same shape,
                                      are never logits, whatever their sizes (`graph/per_row.py`)
    symbolic and static sizes         sizes are compared by their hints; only the two lines above use a size
    needs a gradient                  forward alone judges roots (`walk/verdict.py`). Logits changed by forward stay
                                      roots if ranks exchange; backward reads a copy (`fuse._read_in_backward`)
    save, consume_logits              change the tensors read or overwritten by backward only
    chunk_mib, grad_in_forward,       move matmuls, row_stats and row_grad, after this pass, and no collective; the row
    lm_head, rows worth a copy        values sent are equal with a shared head and without, with moved rows and without
    inline_below                      replaces operators by formulas, after partitioning
    MAX_NODES, MAX_ROUNDS             count nodes, ranks and rounds
    a pass after `fuse` that raises   is undone alone; the result of `fuse` stays (`backend/runner.py`)
    an inner compiler that raises     is not tried again unfused: NOTE [Collectives and a second try]
    verify                            raises `CannotExchange` for a mismatch: other ranks may not see it
    one column, or none               raise `CannotExchange`: a column looks like a number per row

Exceptions: all ranks need the same `merge_collectives`, the option for this exchange (`check_ranks=True` reports a
difference). A rank running the program in Python, or failing in `fuse` for its sizes, sends the program's own
all-reduces while others send the merged one. With `merge_collectives=False` on all ranks none of this matters.

On a group of one rank an all-reduce is its operand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fx_passes.collectives.plan import AllReduce, Plan
from fx_passes.collectives.replay import Replay
from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import hint, ranks_of, same_shape, shape_of, value
from fx_passes.graph.operators import is_collective
from fx_passes.graph.order import sort
from fx_passes.torch_private import FakeTensorMode

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

MAX_NODES = 4096


@dataclass(frozen=True)
class Merged:
    """Collectives of the graph, forward and backward, before and after; why some were not merged."""

    before: int = 0
    after: int = 0
    notes: tuple[str, ...] = ()


def merge(
    graph: Graph, fake_mode: FakeTensorMode, is_wide: Callable[[Node], bool], enabled: bool
) -> Merged:
    """Merges the all-reduces over each group.

    Args:
        graph: a functional ATen graph, joint or inference, after `fuse`; changed in place.
        fake_mode: of the graph's values.
        is_wide: True for a node with a full-vocabulary value. Such values are never gathered.
        enabled: False only counts.
    """
    before = _count(graph)
    notes: list[str] = []
    if before and enabled:
        for group in dict.fromkeys(each.group for each in _all_reduces(graph)):
            if isinstance(group, str):
                notes += _merge_group(graph, fake_mode, is_wide, group)
    return Merged(before, _count(graph), tuple(dict.fromkeys(notes)))


def _count(graph: Graph) -> int:
    return sum(map(is_collective, graph.nodes))


def _all_reduces(graph: Graph) -> list[AllReduce]:
    """All of them, in order; the plan takes those of forward."""
    waits = graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)
    return [each for wait in waits if (each := AllReduce.of(wait))]


def _merge_group(
    graph: Graph, fake_mode: FakeTensorMode, is_wide: Callable[[Node], bool], group: str
) -> list[str]:
    found = [each for each in _all_reduces(graph) if each.group == group]
    ranks = ranks_of(group)
    if ranks == 1:
        _replace(graph, {each: each.operand for each in found})
        return []
    _drop_copies(each.wait for each in found)
    plan = Plan({each.wait: each for each in found}, is_wide)
    for node in graph.nodes:
        plan.visit(node)
    if len(plan.members) < 2:
        return plan.notes
    if plan.cost() * ranks > MAX_NODES:
        return [
            f"{len(plan.members)} all-reduces are not merged: {plan.cost()} operations for each of {ranks} ranks "
            f"are more than {MAX_NODES}"
        ]
    emitter = Emitter(graph, fake_mode)
    with graph.inserting_before(graph.output_node()):
        made = Replay(emitter, plan, group, ranks).results()
        _replace(graph, {each: _laid_out(emitter, new, each.wait) for each, new in made.items()})
    sort(graph)  # the next group's plan goes through it in order
    return plan.notes


def _laid_out(emitter: Emitter, made: Node, wait: Node) -> Node:
    """`made` in the strides of an all-reduce's result, which is packed: later views depend on them.

    Symbolic sizes count by their hints, as for every layout in a compiled graph.
    """
    packed, found = ([hint(s) for s in value(node).stride()] for node in (wait, made))
    if packed == found or not value(wait).is_contiguous():
        return made
    return emitter.call(aten.clone.default, made, memory_format=torch.contiguous_format)


def _drop_copies(waits: Iterable[Node]) -> None:
    """An in-place all-reduce is traced as a copy of the result into the operand."""
    for wait in waits:
        for user in _aliases(wait):
            for copy in list(user.users):
                into = copy.args[0]
                if copy.target is aten.copy.default and copy.args[1] is user and _alike(into, wait):
                    copy.replace_all_uses_with(wait)
                    copy.graph.erase_node(copy)


def _aliases(node: Node) -> list[Node]:
    same = (aten.detach.default, aten.alias.default)
    return [node, *(n for user in node.users if user.target in same for n in _aliases(user))]


def _alike(left: object, right: Node) -> bool:
    return same_shape(shape_of(left), shape_of(right)) and value(left).dtype == value(right).dtype


def _replace(graph: Graph, results: dict[AllReduce, Node]) -> None:
    for each, made in results.items():
        each.wait.replace_all_uses_with(made)
    for each in results:
        (reduce,) = each.wait.all_input_nodes
        graph.erase_node(each.wait)
        graph.erase_node(reduce)
