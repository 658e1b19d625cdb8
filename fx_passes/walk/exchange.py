"""Numbers per row for other ranks, without the common offset of the logits.

Entry point: `exchanged`. In a mean over all columns, each rank adds its share. Terms equal on all ranks can be taken
out of the sum, since the shares sum to 1:

    sum_r share_r (mean_r + (max_r - peak) + peak)   ->   peak + sum_r share_r (mean_r + (max_r - peak))

NOTE [What ranks send]
The new all-reduce has as many numbers as the old one, in the same dtype, and depends on the forward graph alone: a rank
without a gradient of the logits does the same as the others. A number in full-vocabulary arithmetic (a temperature)
must be equal on all ranks, as for `collectives`; a factor of numbers per row may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch.fx import Node

from fx_passes.algebra.poly import ZERO, Monomial, Poly
from fx_passes.graph.facts import is_float_tensor, ranks_of, value
from fx_passes.graph.operators import CASTS, RESHAPES, SAME_VALUE, is_zero, under
from fx_passes.walk.context import Context
from fx_passes.walk.known import Weighted

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def exchanged(c: Context, wait: Node, row_values: Container[Node]) -> Node | None:
    """The replacement of an all-reduce's result; None if it stays.

    Args:
        row_values: the user's nodes with one number per row of full-vocabulary values.
    """
    reduce = wait.all_input_nodes[0]
    if reduce.target is not c10d.all_reduce.default or not is_float_tensor(wait):
        return None
    operand, operation, group = reduce.args
    assert isinstance(operand, Node)
    if ranks_of(group) == 1:
        return c.emitter.represents.get(operand, operand)
    c.rows.tell(wait, group=group, logits=_level(c, operand))
    if under(operand, RESHAPES | SAME_VALUE | CASTS) not in row_values:
        return None
    return _added(c, wait, operand, group) if operation == "sum" else None


def _level(c: Context, operand: Node) -> Node | None:
    """The logits whose magnitude and offset a rank's number has: of a logsumexp, or of a logit on the rank of its
    column.
    """
    operand = under(operand, RESHAPES | SAME_VALUE)
    if operand.target is aten.where.self:
        left, right = operand.all_input_nodes[1:]
        operand = right if is_zero(left) else left if is_zero(right) else operand
    offsets = c.rows.offsets(c.rows.meaning(operand))
    alone = [logits for logits, factors in offsets if not factors]
    return alone[0] if len(offsets) == 1 and alone else None


def _added(c: Context, wait: Node, operand: Node, group: object) -> Node | None:
    number, own = c.rows.meaning(operand).as_share() or (0.0, operand)
    own = under(own, RESHAPES)
    if number != 1:
        return None
    weighted = c.rows.fact(own, ()).weighted
    if c.rows.fact(own, ()).exponent is not None:
        c.rows.tell(wait, own=own)
    return None if weighted is None else _mean(c, wait, weighted, group)


def _mean(c: Context, wait: Node, weighted: Weighted, group: object) -> Node | None:
    alike, others = ZERO, ZERO
    for monomial, number in weighted.number.terms.items():
        rest = _shared_by_all(c, monomial, weighted.mass, group)
        if rest is None:
            others += Poly({monomial: number})
        else:
            alike += Poly({rest: number})
    if alike.is_zero:
        return None
    dtype = value(weighted.mass).dtype
    product = c.weighted(Weighted(weighted.mass, others))
    mean = _all_reduced(c, product, "sum", group, wait)
    c.rows.tell(mean, group=group, level_free=True)
    return _emit(c, alike + Poly.atom(mean), dtype, wait)


def _shared_by_all(c: Context, monomial: Monomial, mass: Node, group: object) -> Monomial | None:
    """The factors next to a rank's share, if they are equal on all ranks and contain an offset."""
    facts = {factor: c.rows.fact(factor[0], RESHAPES) for factor in monomial}
    totals = [at for at, fact in facts.items() if at[1] == -1 and fact.own is mass]
    if len(totals) != 1 or any(fact.group != group for fact in facts.values()):
        return None
    rest = tuple(factor for factor in monomial if factor != totals[0])
    return rest if c.rows.has_level(rest) else None


def _all_reduced(c: Context, node: Node, operation: str, group: object, like: Node) -> Node:
    """Over all ranks, in the program's dtype for the exchange."""
    sent = c.emitter.cast(node, value(like).dtype)
    result = c.emitter.call(c10d.all_reduce.default, sent, operation, group)
    return c.emitter.call(c10d.wait_tensor.default, result)


def _emit(c: Context, poly: Poly, dtype: torch.dtype, like: Node) -> Node:
    number = c.rows.emit_node(poly, dtype, like)
    return c.emitter.cast(c.emitter.reshape(number, c.emitter.sizes(like)), value(like).dtype)
