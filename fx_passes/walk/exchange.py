"""Facts about numbers per row that ranks have exchanged, and the exchange of one rank, which is none.

Entry point: `exchanged`.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from fx_passes.graph.facts import is_float_tensor, ranks_of
from fx_passes.graph.operators import RESHAPES, SAME_VALUE, is_zero, under
from fx_passes.walk.context import Context

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def exchanged(c: Context, wait: Node) -> Node | None:
    """What an all-reduce over one rank is given; None over several ranks."""
    reduce = wait.all_input_nodes[0]
    if reduce.target is not c10d.all_reduce.default or not is_float_tensor(wait):
        return None
    operand, _, group = reduce.args
    assert isinstance(operand, Node)
    if ranks_of(group) == 1:
        return c.emitter.represents.get(operand, operand)
    c.rows.tell(wait, logits=_level(c, operand))
    return None


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
