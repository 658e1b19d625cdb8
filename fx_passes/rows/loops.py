"""The loops of a region over chunks, and their results.

Entry point: `loops_of`. A loop computes values for one chunk of rows after the other. A value is one *level* later if
it needs a sum over all rows, a tangent, or a value computed outside the region from results of a loop. Each loop
computes its wide values again from the inputs of the region; none of them exists in full. Numbers per row and sums are
computed once, by the first possible loop, and kept. Exception: a maximum compared with a wide value is computed again,
because a matmul over other rows may round otherwise. Exception: forward's mask by sorted columns of given logits is
kept for backward, a byte for each logit, instead of sorting twice; without loops the order itself would be kept.

    loss = (p * q).sum(-1).mean()       level 0: p * q, its sum per row; the mean is outside
    d loss / d logits                   level 1, since it needs a tangent: p and q again, and the gradient
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fx_passes.graph.facts import byte_count, is_backward, value
from fx_passes.graph.operators import COMPARISONS, MATMULS, SHOWN, VIEWS, under
from fx_passes.graph.returned import Returned
from fx_passes.graph.rows import Rows, Step
from fx_passes.rows.region import Region

__all__ = ["Loop", "loops_of"]


@dataclass
class Loop:
    """One loop over chunks of rows.

    Attributes:
        region: its region.
        level: loops of lower levels compute its inputs.
        results: values read by the graph or a later loop, in the order of the graph.
        body: the nodes computed for a chunk, in the order of the graph.
        backward: it needs values of backward.
    """

    region: Region
    level: int
    backward: bool
    results: dict[Node, None] = field(default_factory=dict)
    body: dict[Node, None] = field(default_factory=dict)

    @property
    def spared(self) -> list[Node]:
        """Full-vocabulary values made by chunks, other than its results.

        Exception: the softmax kept for backward under `save="softmax"`.
        """
        shown = self.handed_out
        made = [node for node in self.body if self.region.made_wide(node) and node not in shown]
        return [node for node in made if isinstance(value(node), Tensor) and not _is_kept(node)]

    @property
    def handed_out(self) -> set[Node]:
        """The results, and what wide ones show; of a few columns the loop writes a copy."""
        wide = filter(self.region.is_wide, self.results)
        return {under(node, SHOWN) for node in wide} | self.results.keys()

    @property
    def sum_bytes(self) -> int:
        """The bytes of float32 totals for sums in half precision."""
        sums = [node for node in self.results if node in self.region.sums]
        return sum(2 * byte_count(node) for node in sums if value(node).dtype.itemsize == 2)


def _is_kept(node: Node) -> bool:
    """A softmax read by another `row_grad`."""
    grad = torch.ops.slime_fused.row_grad.default
    return node.target is grad and any(n.target is grad and n.args[0] is node for n in node.users)


def loops_of(graph: Graph, region: Region, early: bool = False) -> list[Loop]:
    """The loops of `region` by their levels, without unread ones.

    Args:
        early: nothing waits for backward; `early.py` decides if this is possible.
    """
    levels = _Levels(graph, region, early)
    shared = _shared(graph, region)
    loops = _Demands(graph, region, levels, shared).loops()
    if levels.sorted and sum(any(map(_sorts, loop.body)) for loop in loops) > 1:
        levels.sorted.clear()  # backward sorts all the same
        loops = _Demands(graph, region, levels, shared).loops()
    return loops


def _shared(graph: Graph, region: Region) -> set[Node]:
    """Views with the memory of another returned one, if one of the two is wide."""
    views = Returned(graph).views()
    wide = {under(node, VIEWS) for node in views if region.is_wide(node)}
    return {node for node in views if under(node, VIEWS) in wide}


class _Levels:
    """For each node, the level able to make a chunk of it, and the first level with all of it as an input."""

    def __init__(self, graph: Graph, region: Region, early: bool) -> None:
        self.region = region
        self.early = early
        self.compared = _compared(region)
        nodes = list(graph.nodes)
        given = not any(node.target in MATMULS and region.made_wide(node) for node in nodes)
        masks = _made_of_sorted(nodes, region) if given else ()
        self.sorted = {node for node in masks if not self.waits(node)}
        self.level: dict[Node, int] = {}
        self.ready: dict[Node, int] = {}
        self.in_loop: set[Node] = set()
        self.backward = 0
        for node in nodes:
            if not self.waits(node):
                self._enter(node)
        self.backward = 1 + max((self.level[n] for n in self.in_loop), default=-1)
        for node in nodes:
            if self.waits(node):
                self._enter(node)

    def waits(self, node: Node) -> bool:
        """For backward."""
        return is_backward(node) and not self.early

    def _enter(self, node: Node) -> None:
        region = self.region
        first = self.backward if self.waits(node) else 0
        inputs = [each for each in node.all_input_nodes if each in self.ready]
        if node not in region.steps and node not in region.sums:
            self.ready[node] = max([first, *(self.ready[each] for each in inputs)])
            return
        # a chunk of what a loop of this level makes is at hand in it, all of it only afterwards
        found = [self.level[each] if self._of_loop(each) else self.ready[each] for each in inputs]
        level = self.level[node] = max([first, *found])
        reads = any(self._of_loop(each) and self.level[each] == level for each in inputs)
        wide = any(region.is_wide(each) for each in inputs) or region.made_wide(node)
        if wide or reads or node in region.sums:
            self.in_loop.add(node)
            self.ready[node] = level + 1
        else:
            self.ready[node] = max([first, *(self.ready[each] for each in inputs)])

    def _of_loop(self, node: Node) -> bool:
        return node in self.in_loop and node not in self.region.sums

    def is_frontier(self, node: Node) -> bool:
        """Narrow, and made of something wide: a loop has to make it."""
        region = self.region
        narrow = node in region.steps and not region.is_wide(node)
        return narrow and any(region.is_wide(each) for each in node.all_input_nodes)


def _compared(region: Region) -> set[Node]:
    """Numbers per row compared with values of a loop, and the numbers below them."""
    found: set[Node] = set()
    waiting = [node for node in region.steps if node.target in COMPARISONS]
    waiting = [node for node in waiting if any(map(region.made_wide, node.all_input_nodes))]
    while waiting:
        for inner in waiting.pop().all_input_nodes:
            if inner in region.steps and not region.is_wide(inner) and inner not in found:
                found.add(inner)
                waiting.append(inner)
    return found


def _made_of_sorted(nodes: list[Node], region: Region) -> Iterator[Node]:
    """Masks made from sorted columns directly, not through other masks."""
    found: set[Node] = set()
    masks: set[Node] = set()
    for node in filter(region.steps.__contains__, nodes):
        is_mask = region.is_wide(node) and getattr(value(node), "dtype", None) == torch.bool
        read = (found if is_mask else found - masks).intersection(node.all_input_nodes)
        if read or _sorts(node):
            found.add(node)
            if is_mask:
                masks.add(node)
                yield node


def _sorts(node: Node) -> bool:
    return node.target in (torch.ops.aten.sort.default, torch.ops.aten.sort.stable)


class _Demands:
    """The values read by the graph, returned ones first.

    `shared` views stay views, of what a loop makes.
    """

    def __init__(self, graph: Graph, region: Region, levels: _Levels, shared: set[Node]) -> None:
        self.region, self.levels, self.shared = region, levels, shared
        self.order = {node: at for at, node in enumerate(graph.nodes)}
        self.found: dict[int, Loop] = {}
        self.seen: set[Node] = set()
        self.waiting = [n for n in graph.nodes if n.op == "output" or n.is_impure()]
        while self.waiting:
            self._need(self.waiting.pop())

    def loops(self) -> list[Loop]:
        for loop in self.found.values():
            for kept in (loop.results, loop.body):
                ordered = sorted(kept, key=self.order.__getitem__)
                kept.clear()
                kept.update(dict.fromkeys(ordered))
        return [self.found[level] for level in sorted(self.found)]

    def _need(self, node: Node) -> None:
        """`node` is read outside the loops, or by a later one."""
        if node in self.seen:
            return
        self.seen.add(node)
        region, levels = self.region, self.levels
        made = node in region.sums or region.made_wide(node) or levels.is_frontier(node)
        if (
            not made
            or node in self.shared
            or region.is_given(node)
            or not isinstance(value(node), Tensor)
        ):
            self.waiting += node.all_input_nodes
            return
        level = levels.level[node]
        loop = self.found.setdefault(level, Loop(region, level, levels.waits(node)))
        loop.results[node] = None
        self._fill(loop, [node])

    def _fill(self, loop: Loop, nodes: Iterable[Node]) -> None:
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if node in loop.body:
                continue
            loop.body[node] = None
            for operand in self.step(node).operands():
                inner = operand.node
                if isinstance(operand, Rows) and self.is_in(loop, inner):
                    stack.append(inner)
                else:
                    self.waiting.append(inner)

    def step(self, node: Node) -> Step:
        region = self.region
        return region.sums[node].step if node in region.sums else region.steps[node]

    def is_in(self, loop: Loop, node: Node) -> bool:
        """Whether `loop` makes its chunks of `node` itself."""
        if node not in self.region.steps:
            return False
        if node in self.levels.sorted and self.levels.level[node] < loop.level:
            return False
        if self.region.is_wide(node) or node in self.levels.compared:
            return True
        return node in self.levels.in_loop and self.levels.level[node] == loop.level
