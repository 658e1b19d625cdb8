"""A loop of backward over chunks of columns instead of rows.

    by rows       hidden's gradient is complete after each chunk, the weight's is a sum over chunks
    by columns    the weight's gradient is complete after each chunk, hidden's is a sum over chunks

Entry point: `by_columns`. In half precision a sum over chunks takes a float32 buffer beside the result, so the pass
takes the loop with the smaller sums. A loop over columns is possible if every value of the loop works column by column
on columns of the weight, once the statistics are known. It is the region of the same nodes with the vocabulary as
"rows".
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Graph, Node

from fx_passes.graph.facts import rank_of
from fx_passes.graph.operators import MATMULS, name_of
from fx_passes.graph.rows import NUMBERS, Block, Rows, Step, Whole, step_of
from fx_passes.rows.loops import Loop
from fx_passes.rows.region import Region, grown

aten = torch.ops.aten


def by_columns(graph: Graph, loop: Loop) -> Loop:
    """`loop` over chunks of columns; unchanged if this is impossible or takes no less memory."""
    region = loop.region
    products = [n for n in loop.body if n.target in MATMULS and region.made_wide(n)]
    summed = loop.backward and loop.sum_bytes > 0
    if not summed or not products or any(map(region.is_wide, loop.results)):
        return loop
    turned = grown(graph, products[0], block=Block((rank_of(products[0]) - 1,)), step=_step_of)
    turned.of_columns = True
    if turned.steps.keys().isdisjoint(products[:1]):
        return loop
    if not all(node in turned.steps or _is_last_sum(node, turned, loop) for node in loop.body):
        return loop
    found = dataclasses.replace(loop, region=turned)
    return found if found.sum_bytes < loop.sum_bytes else loop


def _is_last_sum(node: Node, region: Region, loop: Loop) -> bool:
    """A sum over the columns without a reader in the loop."""
    read = any(user in loop.body for user in node.users)
    return node in region.sums and node in loop.results and not read


def _step_of(node: Node, block: Block) -> Step | None:
    """`node` over a chunk of columns, its last dimension: [n, rows...], a view of memory with the rows in front."""
    if block.dims != (rank_of(node) - 1,):
        return step_of(node, block)
    if node.target in MATMULS and rank_of(node) == 2:
        return _product_of_columns(node)
    if name_of(node.target) == "slime_fused::row_grad":
        return _gradient_of_columns(node)
    return step_of(node, block)


def _product_of_columns(node: Node) -> Step | None:
    args: Any = node.args
    *bias, left, right = args
    if any(rank_of(each) != 1 for each in bias):
        return None
    columns = Step(aten.permute.default, (Rows(right, Block((1,))), [1, 0]))
    added = [Rows(each, Block((0,))) for each in bias]
    product = Step(node.target, (*added, Whole(left), columns), node.kwargs)
    return Step(aten.permute.default, (product, [1, 0]))


def _gradient_of_columns(node: Node) -> Step:
    """A column of another chunk gets a number outside this one and matches nothing."""
    args: Any = node.args
    x, terms, affine, index, *others = args
    rank = rank_of(node)
    wide = Step(aten.permute.default, (Rows(x, Block((rank - 1,))), [*range(1, rank), 0]))
    first = Step(aten.select.int, (NUMBERS, 0, 0))
    shifted = Step(aten.sub.Tensor, (Whole(index), first))
    weight, softmax, dtype, _ = others
    moved = (wide, Whole(terms), Whole(affine), shifted, Whole(weight), softmax, dtype, "")
    return Step(aten.permute.default, (Step(node.target, moved), [rank - 1, *range(rank - 1)]))
