"""Whether a root pays: a row value is used outside, and fewer full-vocabulary values remain than there were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from fx_passes.algebra.forms import Form, Mask
from fx_passes.graph.facts import is_as_wide, is_backward, value
from fx_passes.graph.operators import MATMULS, VIEWS, is_collective
from fx_passes.graph.order import ancestors, computed, descendants
from fx_passes.walk.results import Result
from fx_passes.walk.walk import Walk


@dataclass(frozen=True)
class Verdict:
    """The accepted roots, and the reasons against the others."""

    accepted: frozenset[Node]
    refused: dict[Node, str]


def judge(walk: Walk) -> Verdict:
    """In a graph with collectives only forward decides: a rank without a gradient has forward alone, and all ranks must
    exchange the same values.
    """
    account = walk.account
    forward = any(map(is_collective, walk.graph.nodes))
    before = computed(walk.graph, {}, forward) if forward else None
    after = computed(walk.graph, account.replacements, forward)
    read = {of for node, (_, of) in account.row_values.items() if used_by_user(walk, node, after)}
    counts = _counts(walk, before, after)
    accepted: set[Node] = set()
    refused: dict[Node, str] = {}
    for root in sorted(account.softmax_roots):
        found, left = counts[root]
        if root not in read and not _is_left_to_arithmetic(walk, root, after):
            refused[root] = "no value per row is used: the softmax is used in full"
        elif root in account.doubtful:
            refused[root] = "a per-row value is compared with unfused full-vocabulary values"
        elif left >= found:
            refused[root] = (
                f"the rewrite would have {left} full-vocabulary values, the graph has {found}"
            )
        else:
            accepted.add(root)
    allies = {ally for ally, of in walk.context.roots.allies.items() if of in accepted}
    return Verdict(frozenset(accepted | allies), refused)


def _is_left_to_arithmetic(walk: Walk, root: Node, live: set[Node]) -> bool:
    """Whether the values leaving it are computed at their readers, next to other logits: a teacher's softmax is not
    stored.
    """
    leaving = [
        each
        for new, each in walk.account.leaving.items()
        if new in live and _root_of(walk, each.form) is root
    ]
    computed_there = bool(leaving) and not any(each.operators for each in leaving)
    return computed_there and _meets_others(walk, root)


def _meets_others(walk: Walk, root: Node) -> bool:
    """Whether its values are combined with those of other logits, as a teacher's and a student's are."""
    met = {r for each in walk.account.refusals if root in each.roots for r in each.roots}
    return bool(met & walk.account.softmax_roots - {root})


def _root_of(walk: Walk, form: Form) -> Node | None:
    return None if form.x is None else walk.context.roots.root_of[form.x]


def used_by_user(walk: Walk, node: Node, live: set[Node]) -> bool:
    return any(user in live and not walk.context.emitter.made(user) for user in node.users)


def _counts(
    walk: Walk, before: set[Node] | None, after: set[Node]
) -> Mapping[Node, tuple[int, int]]:
    """Full-vocabulary values of each root before and after; gradients leaving the graph do not count."""
    account, gone = walk.account, leaving_gradients(walk)
    refused = _refused_over(walk, account.softmax_roots)
    found: Counter[Node | None] = Counter()
    left: Counter[Node | None] = Counter(
        of for node, of in account.gradients.items() if node in after and not is_backward(node)
    )
    for node in wide_values(walk):
        if before is not None and node not in before:
            continue
        roots = {walk.root(node), *refused.get(node, ())}
        if node not in gone:
            found.update(roots)
        if node in after and node not in account.replacements:
            left.update(roots)
    return {root: (found[root], left[root]) for root in account.softmax_roots}


def wide_values(walk: Walk) -> set[Node]:
    """The user's full-vocabulary values: forms, masks, and forward's values of refused rules."""
    roots = walk.account.softmax_roots
    refused = _refused_over(walk, roots)
    return {
        node
        for node, meaning in walk.context.values.items()
        if node not in roots
        and _is_stored(node)
        and (_is_known(meaning) or (node in refused and looks_wide(node, roots)))
    }


def unknown_values(walk: Walk) -> set[Node]:
    """Other values of the user as wide as the logits: computed from them, or added to their gradient in backward.

    Not counted: values the logits are computed from, their derivatives, and values computed from the finished gradient.
    """
    roots, made = walk.account.softmax_roots, walk.context.emitter.made
    gone = leaving_gradients(walk)
    added = ancestors(gone)
    known = {node for node, found in walk.context.values.items() if isinstance(found, (Form, Mask))}
    return {
        node
        for node in descendants(roots) - descendants(gone) - ancestors(roots) - roots - known
        if not made(node)
        and (node in added or not is_backward(node))
        and _is_stored(node)
        and looks_wide(node, roots)
    }


def leaving_gradients(walk: Walk) -> set[Node]:
    """The user's nodes replaced by a finished gradient."""
    account = walk.account
    return {
        old
        for old, new in account.replacements.items()
        if new in account.leaving and is_backward(old)
    }


def looks_wide(node: Node, roots: Iterable[Node]) -> bool:
    """Has the last dimension of a root, and is no matrix product."""
    return node.target not in MATMULS and is_as_wide(node, roots)


def _refused_over(walk: Walk, roots: set[Node]) -> dict[Node, set[Node]]:
    """Nodes refused by a rule over `roots` before the gradient was finished; later operations on it are the user's."""
    found: dict[Node, set[Node]] = {}
    for each in walk.account.refusals:
        if each.roots & roots and not is_backward(each.node):
            found.setdefault(each.node, set()).update(each.roots)
    return found


def _is_known(meaning: Result) -> bool:
    """A form or mask, constants and spread row scalars aside: those are never stored."""
    spread = isinstance(meaning, Form) and meaning.is_row and meaning.x is None
    return isinstance(meaning, (Form, Mask)) and not spread


def _is_stored(node: Node) -> bool:
    """A tensor of its own, neither a view nor written over an input."""
    own = node.target not in VIEWS and node.target is not torch.ops.aten.copy_.default
    return node.op == "call_function" and own and isinstance(value(node), torch.Tensor)
