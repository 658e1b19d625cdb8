"""Whether a root pays: a row value leaves, and fewer full-vocabulary values are left than there were."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from fx_passes.algebra.forms import Form, Mask
from fx_passes.graph.facts import is_backward, same, shape_of, value
from fx_passes.graph.operators import MATMULS, VIEWS, is_collective
from fx_passes.graph.order import computed
from fx_passes.walk.results import Result
from fx_passes.walk.walk import Walk


@dataclass(frozen=True)
class Verdict:
    """The roots that are taken, and why the others are not."""

    accepted: frozenset[Node]
    refused: dict[Node, str]


def judge(walk: Walk) -> Verdict:
    """In a graph with collectives forward alone decides: a rank that needs no gradient has no more than that, and all
    ranks must exchange the same.
    """
    account, roots = walk.account, walk.context.roots
    forward = any(map(is_collective, walk.graph.nodes))
    before = computed(walk.graph, {}, forward)
    after = computed(walk.graph, account.replacements, forward)
    accepted: set[Node] = set()
    refused: dict[Node, str] = {}
    for root in sorted(account.softmax_roots):
        values = [node for node, (_, of) in account.row_values.items() if of is root]
        found, left = _count(walk, root, before if forward else None, after)
        if not any(used_by_user(walk, node, after) for node in values):
            refused[root] = "no value per row leaves: its softmax is used in full"
        elif root in account.doubtful:
            refused[root] = "a value per row is compared with full-vocabulary values that stay"
        elif left >= found:
            refused[root] = f"{left} full-vocabulary values would be left of {found}"
        else:
            accepted |= {root, *(ally for ally, of in roots.allies.items() if of is root)}
    return Verdict(frozenset(accepted), refused)


def used_by_user(walk: Walk, node: Node, live: set[Node]) -> bool:
    return any(user in live and not walk.context.emitter.made(user) for user in node.users)


def _count(walk: Walk, root: Node, before: set[Node] | None, after: set[Node]) -> tuple[int, int]:
    """Full-vocabulary values of one root before and after; gradients that leave are not counted."""
    account = walk.account
    refused = _refused_over(walk, {root})
    mine = [
        node
        for node in wide_values(walk)
        if (walk.root(node) is root or node in refused) and (before is None or node in before)
    ]
    left = [node for node in mine if node in after and node not in account.replacements]
    new = [
        node
        for node, of in account.gradients.items()
        if of is root and node in after and not is_backward(node)
    ]
    gone = leaving_gradients(walk)
    return len([node for node in mine if node not in gone]), len(left) + len(new)


def wide_values(walk: Walk) -> set[Node]:
    """The user's full-vocabulary values: forms, masks, and in forward what refused rules made of them."""
    roots = walk.account.softmax_roots
    refused = _refused_over(walk, roots)
    return {
        node
        for node, meaning in walk.context.values.items()
        if node not in roots
        and _is_stored(node)
        and (_is_known(meaning) or (node in refused and looks_wide(node, roots)))
    }


def leaving_gradients(walk: Walk) -> set[Node]:
    """The user's nodes in whose place a gradient leaves."""
    account = walk.account
    return {
        old
        for old, new in account.replacements.items()
        if new in account.leaving and is_backward(old)
    }


def looks_wide(node: Node, roots: Iterable[Node]) -> bool:
    """Has the last dimension of a root, and is no matrix product."""
    if node.target in MATMULS or not isinstance(value(node), torch.Tensor):
        return False
    shape = shape_of(node)
    return len(shape) >= 2 and any(same(shape[-1], shape_of(root)[-1]) for root in roots)


def _refused_over(walk: Walk, roots: set[Node]) -> set[Node]:
    """Nodes that a rule refused, before the gradient left: what the user does to the gradient then is not ours."""
    refusals = walk.account.refusals
    return {each.node for each in refusals if each.roots & roots and not is_backward(each.node)}


def _is_known(meaning: Result) -> bool:
    """A form or mask, constants and spread row scalars aside: those are never stored."""
    spread = isinstance(meaning, Form) and meaning.is_row and meaning.x is None
    return isinstance(meaning, (Form, Mask)) and not spread


def _is_stored(node: Node) -> bool:
    tensor = isinstance(value(node), torch.Tensor)
    return node.op == "call_function" and tensor and node.target not in VIEWS
