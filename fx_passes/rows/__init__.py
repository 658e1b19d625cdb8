"""`by_rows`, after `fuse`: row-by-row work, a head's matmul included, runs over one chunk of rows at a time.

    by_rows    looks for regions, and decides if loops pay
    region     the part of a graph working row by row (`graph/rows.py`: the effect of each operator on rows)
    loops      the loops of a region, and the results of each
    columns    a loop of backward over columns instead, if its sums are smaller
    early      can forward compute the results of backward?
    program    a loop as text, the argument of its operator
    emission   the edits: one operator in place of each loop

The memory needs no rule about the loss: one chunk exists at a time, for a cross entropy as for a divergence or a sort.
A loop's results are numbers per row, sums over rows, and tensors needed in full by the program: the gradient of
given logits.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Literal

import torch
from torch.fx import Graph, Node

from fx_passes.graph.changes import changes_of
from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import (
    hint,
    is_backward,
    is_float_tensor,
    is_wide,
    rank_of,
    shape_of,
    value,
)
from fx_passes.graph.operators import MATMULS, SHOWN, name_of
from fx_passes.graph.order import tidy
from fx_passes.graph.returned import Returned
from fx_passes.graph.rows import in_front, normal
from fx_passes.graph.user_lines import source_of
from fx_passes.outcome import Rejection
from fx_passes.refused import Refused
from fx_passes.rows import chunks
from fx_passes.rows.chunks import SHARE, Sizes
from fx_passes.rows.columns import by_columns
from fx_passes.rows.early import tangent_of
from fx_passes.rows.emission import Emission, Plan
from fx_passes.rows.fewer import work_on_parts
from fx_passes.rows.loops import Loop, loops_of
from fx_passes.rows.of_all import read_all
from fx_passes.rows.parts import Part, put
from fx_passes.rows.region import Region, depth_of, regions_of
from fx_passes.rows.samples import compute_together
from fx_passes.rows.told import RowsOutcome, saved_bytes, told_of, why_whole
from fx_passes.torch_private import FakeTensorMode, detect_fake_mode
from fx_passes.verify import mismatch, trial_of

__all__ = ["InForward", "RowsConfig", "RowsOutcome", "by_rows"]

aten = torch.ops.aten
fused = torch.ops.slime_fused

_MANY_ROWS = 1 << 16  # a symbolic number of rows: the next call may have so many

InForward = Literal["auto", "always", "never"]


@dataclasses.dataclass(frozen=True)
class RowsConfig:
    """The configuration of the pass.

    Attributes:
        min_vocab: the smallest vocabulary, in columns of the last dimension.
        heads: compute a head's matmul in the loop reading its logits?
        chunk_bytes: of the widest value of a chunk; 0 for a share of it (`chunks.py`).
        in_forward: compute the gradients of a scalar loss in forward if this saves a matmul as large as the logits?
        verify: rewrite a copy first, and the graph only if both compute the same on random data.
        compiled: inductor compiles the body of a loop; else its operators run one after the other.
    """

    min_vocab: int
    heads: bool = True
    chunk_bytes: int = 0
    in_forward: InForward = "auto"
    verify: bool = False
    compiled: bool = True


def by_rows(graph: Graph, config: RowsConfig) -> RowsOutcome:
    """Replaces row-by-row work on values as wide as a vocabulary by loops over chunks of rows.

    Args:
        graph: a joint or inference graph, decomposed, after `fuse`.
        config: the smallest vocabulary, the size of a chunk, and more.
    """
    fake_mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    if fake_mode is None:
        return RowsOutcome()
    if not config.verify:
        return _by_rows(graph, config, fake_mode)
    trial = trial_of(graph)
    outcome = _by_rows(trial, config, fake_mode)
    if not outcome.loops:
        return outcome
    narrow = min(_dtypes(graph), key=lambda dtype: dtype.itemsize)
    reason = mismatch(graph, trial, graph.owning_module or torch.nn.Module(), narrow)
    if reason is None:
        return _by_rows(graph, config, fake_mode)
    return RowsOutcome(rejections=(Rejection(f"verify=True: {reason}"),))


def _dtypes(graph: Graph) -> list[torch.dtype]:
    """Of the floating values."""
    return [value(node).dtype for node in graph.nodes if is_float_tensor(node)]


def _by_rows(graph: Graph, config: RowsConfig, fake_mode: FakeTensorMode) -> RowsOutcome:
    outcome = RowsOutcome()
    work_on_parts(graph, config.min_vocab)
    read_all(graph, config.min_vocab, fake_mode)
    if _heads(graph, config):
        compute_together(graph, config.min_vocab, fake_mode)
    pieces = _pieces(graph, config)
    for beside in (False, True):
        for region in regions_of(graph, config.min_vocab, config.heads):
            emit = Emitter(graph, fake_mode)
            try:
                plan = _planned(graph, region, config, piece := not pieces.isdisjoint(region.steps))
                if not _pays(plan, region, beside and bool(outcome.loops)):
                    continue
                if all(each.whole for each in plan.sizes) and not piece:
                    made = RowsOutcome(one_chunk=True)
                else:
                    made = _rewritten(graph, region, emit, plan, config)
                outcome = outcome.then(made)
            except Refused as refused:
                emit.discard()
                node = refused.node or next(iter(region.steps))
                outcome = outcome.then(
                    RowsOutcome(rejections=(Rejection.at(refused.reason, node),))
                )
    left = sum(_is_left(node, config.min_vocab) for node in graph.nodes) if outcome.loops else 0
    return dataclasses.replace(
        outcome, left=left, rejections=(*outcome.rejections, *_still_whole(graph, config, outcome))
    )


def _still_whole(graph: Graph, config: RowsConfig, outcome: RowsOutcome) -> list[Rejection]:
    """Heads larger than a chunk, with fused operators still reading their logits."""
    told = {(each.node, each.source) for each in outcome.rejections}
    heads = [
        node
        for node in _heads(graph, config)
        if not _sizes(node, config).whole and _key(node) not in told and _serves(node, config)
    ]
    if not heads or not config.heads:
        return []
    return why_whole(graph, regions_of(graph, config.min_vocab, config.heads), heads)


def _serves(head: Node, config: RowsConfig) -> bool:
    """Do fused operators read values made from it, as wide as it is?"""
    found, waiting = {head}, [head]
    while waiting:
        users = waiting.pop().users
        if any(name_of(user.target) == "slime_fused::row_stats" for user in users):
            return True
        waiting += [u for u in users if u not in found and is_wide(u, config.min_vocab)]
        found.update(waiting)
    return False


def _key(node: Node) -> tuple[str, str]:
    return str(node.target), source_of(node)


def _heads(graph: Graph, config: RowsConfig) -> list[Node]:
    return [n for n in graph.nodes if n.target in MATMULS and is_wide(n, config.min_vocab)]


def _is_left(node: Node, min_vocab: int) -> bool:
    """A full-vocabulary value computed in full."""
    computed = node.op == "call_function" and node.target not in SHOWN | {operator.getitem}
    return computed and is_wide(node, min_vocab)


def _pieces(graph: Graph, config: RowsConfig) -> set[Node]:
    """Heads of rows cut by the program itself: each is one chunk at most, but backward would keep all of them."""
    sizes = {node: _sizes(node, config) for node in _heads(graph, config)}
    small = {n: each for n, each in sizes.items() if each.whole and "recompute" not in n.meta}
    if sum(each.bytes for each in small.values()) <= max(
        (each.chunk_bytes for each in small.values()), default=0
    ):
        return set()
    found: dict[Node, int] = {}
    for region in regions_of(graph, config.min_vocab, config.heads):
        late = [loop for loop in loops_of(graph, region) if loop.backward]
        again = {node for loop in late for node in loop.body if node in small}
        found |= {node: small[node].bytes for node in again if not is_backward(node)}
    limit = max((small[node].chunk_bytes for node in found), default=0)
    return set(found) if sum(found.values()) > limit else set()


def _sizes(head: Node, config: RowsConfig) -> Sizes:
    *lead, columns = map(hint, shape_of(head))
    item, depth = value(head).dtype.itemsize, depth_of(head)
    return Sizes(math.prod(lead), columns, item, config.chunk_bytes, depth=depth)


def _multiplies(loop: Loop) -> bool:
    """It makes the logits of a head."""
    return any(node.target in MATMULS and loop.region.made_wide(node) for node in loop.body)


def _rewritten(
    graph: Graph, region: Region, emit: Emitter, plan: Plan, config: RowsConfig
) -> RowsOutcome:
    """Puts the loops of `plan` in the place of `region`."""
    _check_unchanged(graph, plan.loops)
    early = plan.tangent is not None
    outcome = told_of(region, plan.loops, plan.sizes, early, plan.waits)
    outcome = dataclasses.replace(outcome, saved_bytes=saved_bytes(graph, region))
    emit.adopt_all()
    returned = Returned(graph)
    with graph.inserting_before(graph.output_node()):
        emission = Emission(plan, emit, config.compiled)
    emission.commit()
    tidy(graph)
    returned.keep_apart(emit.fake_mode, region.is_wide)
    graph.lint()
    return outcome


def _planned(graph: Graph, region: Region, config: RowsConfig, piece: bool) -> Plan:
    """The loops of `region`; of a `piece` the gradient waits."""
    loops = loops_of(graph, region)
    plan = Plan(loops, [], None, _puts_of(loops, region))
    late = [loop for loop in loops if loop.backward]
    if any(map(_multiplies, late)):
        try:
            tangent, early = _early(graph, region, loops, config, piece)
            plan = Plan(early, [], tangent, _puts_of(early, region))
        except Refused as reason:
            kept = plan.puts.keys()
            loops = [
                each if each.results.keys() & kept else _turned(graph, each, config)
                for each in loops
            ]
            plan = dataclasses.replace(plan, loops=loops, waits=str(reason))
    return dataclasses.replace(plan, sizes=[_sizes_of(loop, config) for loop in plan.loops])


def _turned(graph: Graph, loop: Loop, config: RowsConfig) -> Loop:
    """`loop` over columns, if this takes less memory and its chunks are wide enough for matmuls."""
    found = by_columns(graph, loop)
    least = min(chunks.COLUMNS_MIN, hint(found.region.rows))
    narrow = found is not loop and _sizes_of(found, config).row_chunk < least
    return loop if narrow else found


def _early(
    graph: Graph, region: Region, loops: Sequence[Loop], config: RowsConfig, piece: bool
) -> tuple[Node, list[Loop]]:
    """The tangent replaced by 1, and loops computing backward's results in forward.

    Raises:
        Refused: this is impossible or does not pay, with the reason.
    """
    if config.in_forward == "never":
        raise Refused("option grad_in_forward is never")
    if piece:
        raise Refused("each piece would keep a gradient of the weight")
    late = [loop for loop in loops if loop.backward]
    tangent = tangent_of(graph, region, late)
    early = loops_of(graph, region, early=True)
    if sum(map(_multiplies, early)) >= sum(map(_multiplies, loops)):
        raise Refused("it needs sums over all rows of the loss")
    total = sum(loop.sum_bytes for loop in late)
    if config.in_forward == "auto" and total > _sizes_of(late[0], config).bytes // SHARE:
        mib = total / 2**20
        raise Refused(f"its sum would take {mib:,.0f} MiB, more than a chunk may")
    return tangent, early


def _puts_of(loops: Sequence[Loop], region: Region) -> dict[Node, Part]:
    """The values put among other rows, if all such results of a loop have the same row numbers."""
    found: dict[Node, Part] = {}
    for loop in loops:
        wide = [node for node in loop.results if region.is_wide(node) and _is_flat(node, region)]
        parts = {node: part for node in wide if (part := put(node)) is not None}
        if len({part.key for part in parts.values()}) == 1:
            found |= parts
    return found


def _is_flat(node: Node, region: Region) -> bool:
    """[rows..., V]"""
    block = region.blocks.get(node)
    return block is not None and block == normal(in_front(rank_of(node) - 1), shape_of(node))


def _sizes_of(loop: Loop, config: RowsConfig) -> Sizes:
    """Of a loop's chunks. A symbolic number of rows counts as many if a matmul's result would be materialised."""
    region = loop.region
    columns, item = region.widest(loop.body)
    depth = region.depth(loop.body)
    rows = _MANY_ROWS if depth and not isinstance(region.rows, int) else hint(region.rows)
    return Sizes(rows, columns, item, config.chunk_bytes, region.multiple, depth)


def _pays(plan: Plan, region: Region, beside: bool) -> bool:
    """Does a loop compute a wide value besides its results, other than a view of its inputs?

    Logits of a matmul always are one. For given logits the answer is no if the graph goes on with a wide result: the
    result would be in memory beside the values made from it. The loop itself puts a slice's gradient among other rows.
    """
    loops = plan.loops
    spared = [node for loop in loops for node in loop.spared]
    inside = [node for node in spared if node.target not in SHOWN and _is_computed(node)]
    if any(node.target in MATMULS for node in inside):
        return True
    # of given values without a gradient of theirs inductor stores little, but where it is cut off from the gradient's
    handed_out = [n for loop in loops for n in loop.results if region.is_wide(n)]
    whole = [plan.puts[node].every if node in plan.puts else node for node in handed_out]
    goes_on = any(_goes_on(node, region) for node in whole)
    return bool(inside and (handed_out or beside)) and not goes_on


def _is_computed(node: Node) -> bool:
    """Computed from tensors; otherwise it is a constant, such as zeros below a written gradient."""
    return any(isinstance(value(each), torch.Tensor) for each in node.all_input_nodes)


def _goes_on(node: Node, region: Region) -> bool:
    """Whether an operator outside the region reads `node`, or a view of it."""
    for user in node.users:
        stays = user in region.steps or user in region.sums
        if stays or user.op == "output" or user.target is aten.copy_.default:
            continue
        if user.target not in SHOWN or _goes_on(user, region):
            return True
    return False


def _check_unchanged(graph: Graph, loops: Sequence[Loop]) -> None:
    """Backward reads forward's inputs again, after forward has overwritten some of them."""
    changed = changes_of(graph).in_forward
    if not changed:
        return
    for loop in loops:
        for node in loop.body:
            if loop.backward and not changed.isdisjoint(node.all_input_nodes):
                raise Refused("the function changes in place a value a loop would read again", node)
