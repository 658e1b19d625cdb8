"""The part of a graph working row by row, around values as wide as a vocabulary.

Entry point: `regions_of`. A region begins at a value read across its columns (a gather, a maximum, a sort, a fused
operator), and grows over all nodes with the same rows. `steps` describes the computation of each node over a chunk of
rows, `sums` lists the nodes adding over all rows. All other nodes are outside; their values are inputs of the region.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import (
    hint,
    is_float_tensor,
    is_wide,
    rank_of,
    same,
    same_shape,
    shape_of,
    value,
)
from fx_passes.graph.operators import MATMULS, SHOWN, VIEWS, under
from fx_passes.graph.per_row import reduced_dims
from fx_passes.graph.rows import (
    Across,
    Block,
    Rows,
    Step,
    across,
    are_alternatives,
    block_of,
    in_front,
    normal,
    shape_of_value,
    step_of,
)
from fx_passes.rows import chunks

aten = torch.ops.aten
Stepped = Callable[[Node, Block], Step | None]

_SHARE = 4  # of the vocabulary: what has fewer columns than that share of it is narrow
_SCALES: set[Any] = {aten.exp.default, aten.log.default, aten.exp2.default, aten.log1p.default}


@dataclass
class Region:
    """A region working row by row on `rows` rows.

    Attributes:
        vocab: columns of its first values.
        blocks: the place of the rows in each value with rows, inputs included.
        steps: for each node computed row by row.
        sums: for each node adding over all rows.
        of_columns: its rows are the columns of logits.
    """

    rows: Any
    vocab: Any
    blocks: dict[Node, Block] = field(default_factory=dict)
    steps: dict[Node, Step] = field(default_factory=dict)
    sums: dict[Node, Across] = field(default_factory=dict)
    of_columns: bool = False

    @property
    def multiple(self) -> int:
        """Of the rows of a chunk."""
        return chunks.COLUMNS_MULTIPLE if self.of_columns else 1

    def is_wide(self, node: Node) -> bool:
        """Has rows, and about as many columns as the vocabulary; a node with several values counts."""
        if node not in self.blocks:
            return False
        if not isinstance(value(node), Tensor):
            return True
        columns = math.prod(map(hint, self.blocks[node].rest(shape_of_value(node))))
        return columns * _SHARE >= hint(self.vocab)

    def made_wide(self, node: Node) -> bool:
        """Wide, and computed in the region."""
        return node in self.steps and self.is_wide(node)

    def is_given(self, node: Node) -> bool:
        """A view of an input of the region."""
        return node.target in VIEWS and under(node, VIEWS) not in self.steps

    def widest(self, nodes: Iterable[Node]) -> tuple[int, int]:
        """Columns, and bytes of one, of the widest value among `nodes`."""
        found = [(1, 4)]
        for node in filter(self.is_wide, nodes):
            fakes = value(node)
            for fake in fakes if isinstance(fakes, (tuple, list)) else (fakes,):
                columns = math.prod(map(hint, self.blocks[node].rest(tuple(fake.shape))))
                found.append((columns, fake.element_size()))
        return max(found, key=math.prod)

    def depth(self, nodes: Iterable[Node]) -> int:
        """The largest depth of the matmuls computing full-vocabulary values among `nodes`; 0 without one."""
        heads = (node for node in nodes if node.target in MATMULS and self.made_wide(node))
        return max(map(depth_of, heads), default=0)


def depth_of(head: Node) -> int:
    """D of [N, D] @ [D, V]."""
    return hint(shape_of(head.all_input_nodes[-1])[-2])


def regions_of(graph: Graph, min_vocab: int, heads: bool) -> Iterator[Region]:
    """The regions of `graph`, the largest vocabulary first; no full-vocabulary value or sum is in two of them.

    The caller may put loops in the place of one before it asks for the next.

    Args:
        heads: are matmuls computing logits inside? Otherwise the logits are inputs.
    """
    step = step_of if heads else _step_of_given
    seeds = sorted(_seeds(graph, min_vocab), key=lambda n: -hint(shape_of_value(n)[-1]))
    widths = [hint(shape_of_value(seed)[-1]) for seed in seeds]
    taken: set[Node] = set()
    for seed, width in zip(seeds, widths, strict=True):
        if seed in taken or width * _SHARE < widths[0]:
            continue
        region = grown(graph, seed, step=step)
        wide = {node for node in region.blocks if region.is_wide(node)}
        mine = {node for node in wide if node in region.steps} | region.sums.keys()
        if taken.isdisjoint(mine) and _is_of_alternatives(region):
            taken |= wide | mine
            yield region


def _step_of_given(node: Node, block: Block) -> Step | None:
    return None if node.target in MATMULS else step_of(node, block)


def _seeds(graph: Graph, min_vocab: int) -> Iterator[Node]:
    """Values with a reader treating their columns as alternatives, and parts of their rows."""
    seen: set[Node] = set()
    for node in graph.nodes:
        if node.target in SHOWN and under(node, SHOWN) in seen and is_wide(node, min_vocab):
            yield node
        if node.op != "call_function" or not _is_about_columns(node):
            continue
        marks = node.target is aten.eq.Tensor  # the columns of some numbers
        wide = node if marks else node.all_input_nodes[0]
        if wide in seen or not (marks or is_float_tensor(wide)):
            continue
        if rank_of(wide) > 1 and hint(shape_of(wide)[-1]) >= min_vocab and not same(_rows(wide), 1):
            seen.add(wide)
            yield wide


def _is_about_columns(node: Node) -> bool:
    if node.target is aten.amax.default:
        return reduced_dims(node) == [len(shape_of_value(node.all_input_nodes[0])) - 1]
    return are_alternatives(node)


def _rows(wide: Node) -> Any:
    return math.prod(shape_of_value(wide)[:-1])


def _is_of_alternatives(region: Region) -> bool:
    """A maximum alone may be of anything: with an exponential beside it, it is a softmax's."""
    nodes = [n for n in region.steps if n.op == "call_function"]
    return any(are_alternatives(n) or n.target in _SCALES for n in nodes)


def grown(
    graph: Graph, *seeds: Node, block: Block | None = None, step: Stepped = step_of
) -> Region:
    """The nodes working row by row on the rows of the first of `seeds`: all its dimensions but the last.

    Args:
        block: the place of the rows in the first one, if elsewhere.
        step: says how a node is computed over a chunk.
    """
    seed, *others = seeds
    shape = shape_of_value(seed)
    block = normal(block or in_front(len(shape) - 1), shape)
    region = Region(math.prod(block.lead(shape)), math.prod(block.rest(shape)))
    growth = _Growth(region, step)
    if not growth.enter(seed, block):
        region.blocks[seed] = block
    for each in others:
        region.blocks[each] = normal(in_front(rank_of(each) - 1), shape_of(each))
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    size = -1
    while size != len(region.blocks):
        size = len(region.blocks)
        for node in nodes:
            if node not in region.steps and node not in region.sums:
                growth.look_at(node)
    return region


def in_place_of(old: Node, found: Node, region: Region, emit: Emitter) -> Node:
    """A result over rows, [N, ...], in the shape of the user's value."""
    across = region.sums.get(old)
    if across is not None:
        if across.mean_of:
            inner: Node = old.args[0]  # type: ignore[assignment]
            for dim in across.mean_of:
                found = emit.call(aten.div.Tensor, found, emit.size(inner, dim))
        return emit.cast(found, value(old).dtype)
    block, sizes = region.blocks[old], emit.sizes(old)
    found = emit.reshape(found, [*block.lead(sizes), *block.rest(sizes)])
    now = [*block.dims, *block.rest(range(len(sizes)))]
    found = emit.permute(found, [now.index(dim) for dim in range(len(sizes))])
    assert same_shape(shape_of(found), shape_of(old)), (old, found)
    return found


class _Growth:
    def __init__(self, region: Region, step: Stepped) -> None:
        self.region, self.step = region, step

    def look_at(self, node: Node) -> None:
        """Takes `node` into the region if it works on rows of values there."""
        known = self.region.blocks.get
        block = block_of(node, known)
        if block is not None:
            self.enter(node, block)
            return
        found = across(node, known)
        if found is not None and self._agrees(found.step):
            self.region.sums[node] = found
            self._pull(found.step)

    def enter(self, node: Node, block: Block) -> bool:
        """Whether `node` can be computed over chunks of the rows in `block`; then it is of the region."""
        block = normal(block, shape_of_value(node))
        if node in self.region.blocks:
            return self.region.blocks[node] == block
        if not self._has_rows(node, block):
            return False
        if node.target is operator.getitem and not self.enter(node.all_input_nodes[0], block):
            return False
        step = self.step(node, block)
        if step is None or not self._agrees(step):
            return False
        self.region.blocks[node], self.region.steps[node] = block, step
        self._pull(step)
        return True

    def _has_rows(self, node: Node, block: Block) -> bool:
        shape = shape_of_value(node)
        return block.fits(shape) and same(math.prod(block.lead(shape)), self.region.rows)

    def _agrees(self, step: Step) -> bool:
        """Every known operand has its rows at the place the step requires."""
        for operand in step.operands():
            known = self.region.blocks.get(operand.node)
            if not isinstance(operand, Rows):
                if known is not None:
                    return False
            elif (known is not None and known != _normal(operand)) or not self._has_rows(
                operand.node, operand.block
            ):
                return False
        return True

    def _pull(self, step: Step) -> None:
        """Missing wide operands come into the region if they work row by row; otherwise they become inputs."""
        for operand in step.operands():
            node = operand.node
            if not isinstance(operand, Rows) or node in self.region.blocks:
                continue
            if node.op == "call_function" and self._is_large(node, operand.block):
                self.enter(node, operand.block)

    def _is_large(self, node: Node, block: Block) -> bool:
        columns = math.prod(map(hint, block.rest(shape_of_value(node))))
        return columns * _SHARE >= hint(self.region.vocab)


def _normal(operand: Rows) -> Block:
    return normal(operand.block, shape_of_value(operand.node))
